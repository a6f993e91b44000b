"""The embedded scenes learn the style of a folder that no reward expresses: 24 pictures of the base, chosen or changed.

Of 768 pictures of training prompts, "dark" and "large" are those that are darkest, or fullest, of a prompt's eight; "night" are
any, darkened to three fifths. `share` is the way from the base's mean of that measure to the folder's, on held-out prompts;
`correct` is an independent judge; agreement and `nearest` are the reward's own figures, at its first and last fit.

    python -m benchmarks.style --styles dark night --seeds 42 --runs runs/style --out style.json
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.teach import GUARDED, TASTES
from g2rpo import api
from g2rpo.evaluation.heldout import paired
from g2rpo.rewards.pixels import to_pil, to_uint8
from g2rpo.testbed.grammar import prompts as prompts_of

PROMPTS, NOISES, PICTURES = 96, 8, 24
MEASURES = {**TASTES, "night": TASTES["dark"]}
OVERRIDES = [*GUARDED, "trainer.iterations=40", "evaluation.every=20", "evaluation.controls=true"]


def folder_of(style: str, place: Path) -> Tensor:
    """The pictures of a style, which are saved to `place`."""
    sampler = api.trainer("scenes", OVERRIDES).evaluator.sampler_now(seed=11)
    images = sampler.pictures([prompt for prompt in prompts_of("train")[:PROMPTS] for _ in range(NOISES)])
    values = MEASURES[style](images).view(PROMPTS, NOISES)
    best = images.unflatten(0, (PROMPTS, NOISES))[range(PROMPTS), values.argmax(1)]
    chosen = (
        best[(values.amax(1) - values.mean(1)).topk(PICTURES).indices]
        if style != "night"
        else 0.6 * images[:: PROMPTS * NOISES // PICTURES]
    )
    place.mkdir(parents=True)
    for number, picture in enumerate(to_pil(to_uint8(chosen))):
        picture.save(place / f"{number:02}.png")
    return chosen


def run_of(style: str, seed: int, weight: float, runs: Path, overrides: list[str]) -> dict[str, Any]:
    """A run's figures on held-out pictures."""
    place = runs / f"{style}-{weight:g}-{seed}"
    folder = folder_of(style, place / "folder")
    reward = [f"rewards.style.weight={weight:g}", f"rewards.style.options.folder={place}/folder"] if weight else []
    trainer = api.trainer("scenes", [*OVERRIDES, *reward, f"trainer.seed={seed}", *overrides], place / "run")
    rows = list(trainer.train())
    table, base, tuned = trainer.finish(), trainer.evaluator.base(), trainer.final
    assert base is not None and tuned is not None
    measure = MEASURES[style]
    before, after = (measure(one.images.float() / 255) for one in (base, tuned))
    change = paired(before, after)
    whole = float(measure(folder).mean() - before.mean())
    looks = [row for row in rows if row["kind"] == "eval"]
    return {
        "base": float(before.mean()),
        "folder": float(measure(folder).mean()),
        "tuned": float(after.mean()),
        "share": (change.tuned - change.base) / whole,
        "share_error": change.error / abs(whole),
        "scores": {name: [row.base, row.tuned, row.error] for name, row in table.items()},
        "diversity": [row.get("diversity") for row in looks],
        "learnt": [[row["iteration"], row["style/agreement"], row["style/nearest"]] for row in rows if "style/nearest" in row],
        "alarms": {row["iteration"]: row["alarms"] for row in rows if "alarms" in row},
    }


def table_of(found: dict[str, Any]) -> str:
    """In Markdown."""
    lines = [
        "| run | share of the way | correct | preference | diversity | agreement | nearest |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        judged = [
            f"{one[0]:.2f} to {one[1]:.2f}" for one in (row["scores"]["scene_correct"], row["scores"]["scene_preference"])
        ]
        spread = " to ".join(f"{one:.3f}" for one in (row["diversity"][0], row["diversity"][-1]))
        ends = [
            " to ".join(f"{one[k]:.2f}" for one in (row["learnt"][0], row["learnt"][-1])) if row["learnt"] else ""
            for k in (1, 2)
        ]
        lines.append(f"| {name} | {row['share']:.2f} ± {row['share_error']:.2f} | {' | '.join([*judged, spread, *ends])} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--styles", nargs="+", default=["dark", "night"], choices=MEASURES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument("--weights", nargs="+", type=float, default=[0.5], help="of the reward; 0: the guard alone")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the recipe")
    parser.add_argument("--runs", type=Path, required=True, help="a folder for runs and pictures")
    parser.add_argument("--out", type=Path, help="a JSON file, to which runs are added that it lacks")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    found = json.loads(args.out.read_text(encoding="utf-8")) if args.out and args.out.exists() else {}
    for seed, weight, style in product(args.seeds, args.weights, args.styles):
        if (name := f"{style}, weight {weight:g}, seed {seed}") not in found:
            found[name] = run_of(style, seed, weight, args.runs, args.set)
            print(name, json.dumps(found[name]), flush=True)
            if args.out:
                args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table_of(found))


if __name__ == "__main__":
    main()
