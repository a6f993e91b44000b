"""An embedded world learns the style of a folder that no reward expresses: 24 pictures of the base,
chosen or changed.

Of 768 pictures of training prompts, "dark", "large" and "spelt" (in words) are those of a prompt's
eight that lead the others by most; "night" are any, darkened to three fifths. `share` is the way
from the base's mean of that measure to the folder's, on held-out prompts; agreement and `nearest`
are the reward's own figures, at its first and last fit.

    python -m studies.style --styles dark night --seeds 42 --runs runs/style --out style.json
    python -m studies.style --world words --styles spelt night --seeds 42 43 --weights 0 0.35
    --runs runs/style
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo import api
from g2rpo.assembly.prompts import build_prompts
from g2rpo.core.statistics import paired
from g2rpo.rewards.pixels import to_pil, to_uint8
from studies.teach import WORLDS
from studies.teach_people import SPELT, TASTES, values_of

PROMPTS, NOISES, PICTURES = 96, 8, 24
STYLES = [*TASTES, SPELT, "night"]
OVERRIDES = [
    "trainer.iterations=40",
    "evaluation.every=20",
    "evaluation.num_prompts=192",
    "trainer.prompts_per_iteration=4",
]


def recipe_of(world: str) -> list[str]:
    """Overrides of a world's recipe: its guard, and a run's length."""
    return [*WORLDS[world][0], *OVERRIDES]


def measure(style: str, images: Tensor, prompts: Sequence[str]) -> Tensor:
    return values_of("dark" if style == "night" else style, images, prompts)


def folder_of(world: str, style: str, place: Path) -> float:
    """Saves the pictures of a style to `place`; the mean of their measure."""
    trainer = api.trainer(world, recipe_of(world))
    prompts = build_prompts(trainer.config.prompts.train, "prompts")[:PROMPTS]
    repeated = [prompt for prompt in prompts for _ in range(NOISES)]
    images = trainer.evaluator.sampler_now(seed=11).pictures(repeated)
    values = measure(style, images, repeated).view(PROMPTS, NOISES)
    of_prompts = (values.amax(1) - values.mean(1)).topk(PICTURES).indices
    picked, factor = of_prompts * NOISES + values.argmax(1)[of_prompts], 1.0
    if style == "night":
        picked, factor = torch.arange(0, len(images), len(images) // PICTURES), 0.6
    place.mkdir(parents=True)
    for number, picture in enumerate(to_pil(to_uint8(factor * images[picked]))):
        picture.save(place / f"{number:02}.png")
    return float(
        measure(style, factor * images[picked], [repeated[number] for number in picked]).mean()
    )


def run_of(
    world: str, style: str, seed: int, weight: float, runs: Path, overrides: list[str]
) -> dict[str, Any]:
    """A run's figures on held-out pictures."""
    place = runs / f"{world}-{style}-{weight:g}-{seed}"
    folder = folder_of(world, style, place / "folder")
    reward = (
        [f"rewards.style.weight={weight:g}", f"rewards.style.options.folder={place}/folder"]
        if weight
        else []
    )
    trainer = api.trainer(
        world, [*recipe_of(world), *reward, f"trainer.seed={seed}", *overrides], place / "run"
    )
    rows = list(trainer.train())
    table, base, tuned = trainer.finish(), trainer.evaluator.base(), trainer.final
    assert base is not None and tuned is not None
    before, after = (measure(style, one.images.float() / 255, one.prompts) for one in (base, tuned))
    change = paired(before, after)
    whole = folder - float(before.mean())
    looks = [row for row in rows if row["kind"] == "eval"]
    return {
        "base": float(before.mean()),
        "folder": folder,
        "tuned": float(after.mean()),
        "share": change.change / whole,
        "share_error": change.error / abs(whole),
        "scores": {name: [row.base, row.tuned, row.error] for name, row in table.items()},
        "diversity": [row.get("diversity") for row in looks],
        "learnt": [
            [row["iteration"], row["style/agreement"], row["style/nearest"]]
            for row in rows
            if "style/nearest" in row
        ],
        "alarms": {row["iteration"]: row["alarms"] for row in rows if "alarms" in row},
    }


def table_of(found: dict[str, Any]) -> str:
    """In Markdown."""
    lines = [
        "| run | share of the way | judges | diversity | agreement | nearest |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        scores = {name: one for name, one in row["scores"].items() if name != "style"}
        judged = ", ".join(
            f"{name} {one[0]:.4g} to {one[1]:.4g} ± {one[2]:.2g}" for name, one in scores.items()
        )
        spread = " to ".join(f"{one:.3f}" for one in (row["diversity"][0], row["diversity"][-1]))
        ends = [
            " to ".join(f"{one[k]:.2f}" for one in (row["learnt"][0], row["learnt"][-1]))
            if row["learnt"]
            else ""
            for k in (1, 2)
        ]
        lines.append(
            f"| {name} | {row['share']:.2f} ± {row['share_error']:.2f} | {' | '.join([judged, spread, *ends])} |"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", choices=WORLDS, default="scenes")
    parser.add_argument("--styles", nargs="+", default=["dark", "night"], choices=STYLES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[42])
    parser.add_argument(
        "--weights", nargs="+", type=float, default=[0.5], help="of the reward; 0: the guard alone"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the recipe"
    )
    parser.add_argument("--runs", type=Path, required=True, help="a folder for runs and pictures")
    parser.add_argument(
        "--out", type=Path, help="a JSON file, to which runs are added that it lacks"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    found = (
        json.loads(args.out.read_text(encoding="utf-8")) if args.out and args.out.exists() else {}
    )
    for seed, weight, style in product(args.seeds, args.weights, args.styles):
        if (name := f"{style}, weight {weight:g}, seed {seed}") not in found:
            found[name] = run_of(args.world, style, seed, weight, args.runs, args.set)
            print(name, json.dumps(found[name]), flush=True)
            if args.out:
                args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table_of(found))


if __name__ == "__main__":
    main()
