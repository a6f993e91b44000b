"""A floor against weights: how far one reward rises, and what becomes of another, by how the other
counts in training.

    python -m studies.floors --out studies/results/floors.json

In `words` OCR is to rise and the drawing to stay; in `scenes` correctness, and the learned
preference. All cells have the recipe's settings and as many iterations; only the other reward's
weight and floor differ. A change is the last evaluation's less the base's, mean over seeds, with
its standard error over seeds. A cell that stands in --out is not run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from g2rpo import api
from g2rpo.core.files import write_whole

COUNTS: dict[str, dict[str, Any]] = {
    "weight 0.1": {"weight": 0.1},
    "weight 0.4": {"weight": 0.4},
    "weight 1": {"weight": 1},
    "weight 1, floor": {"weight": 1, "floor": "base"},
}
"""By its name in the table, how the other reward counts."""
WORLDS: dict[str, tuple[str, list[str]]] = {
    "words": ("word_drawing", ["trainer.iterations=18"]),
    "scenes": (
        "scene_preference",
        [
            "trainer.iterations=40",
            "evaluation.every=40",
            "evaluation.num_prompts=96",
            "evaluation.rewards.scene_preference=",
        ],
    ),
}
"""By recipe: the reward that is to stay, and overrides. Colour keeps the recipe's weight."""
SHOWN = {
    "words": ("ocr_exact", "word_drawing", "word_colour"),
    "scenes": ("scene_correct", "scene_preference", "scene_clip"),
}


def cell(world: str, how: str, seed: int) -> dict[str, Any]:
    """Base and tuned by reward, of one run."""
    other, overrides = WORLDS[world]
    counts = f"rewards.{other}={json.dumps(COUNTS[how])}"
    more = [f"trainer.seed={seed}", "evaluation.controls=false", "trackers=[]"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = api.trainer(world, [*overrides, counts, *more], Path(folder) / "run")
        for _ in trainer.train():
            pass
        table = trainer.finish()
    return {name: asdict(one) for name, one in table.items()}


def changes(
    cells: dict[str, Any], seeds: list[int]
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """By world, way and reward: the mean change over seeds, and with several its standard error."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {world: {} for world in SHOWN}
    for (world, names), how in product(SHOWN.items(), COUNTS):
        done = [cells[key] for seed in seeds if (key := f"{world}/{how}/{seed}") in cells]
        if done:
            each = {name: [_change(one[name]) for one in done] for name in names}
            found[world][how] = {name: _mean(values) for name, values in each.items()}
    return found


def table(found: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    lines = []
    for world, ways in found.items():
        lines += [
            f"\n| {world}: {WORLDS[world][0]} has | {' | '.join(SHOWN[world])} |",
            "|---|---|---|---|",
        ]
        for how, means in ways.items():
            texts = [
                " ± ".join([f"{mean:+.3f}", *(f"{error:.3f}" for error in errors)])
                for mean, *errors in means.values()
            ]
            lines.append(f"| {how} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _change(one: dict[str, float]) -> float:
    return one["tuned"] - one["base"]


def _mean(values: list[float]) -> list[float]:
    errors = [stdev(values) / len(values) ** 0.5] if len(values) > 1 else []
    return [mean(values), *errors]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[42, 43, 44])
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    out: Path = args.out
    out.parent.mkdir(parents=True, exist_ok=True)
    stored = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"cells": {}}
    found = stored["cells"]
    for seed, world, how in product(args.seeds, args.worlds, COUNTS):
        if (name := f"{world}/{how}/{seed}") not in found:
            found[name] = cell(world, how, seed)
            stored["changes"] = changes(found, args.seeds)
            write_whole(out, json.dumps(stored, indent=1).encode())
            print(
                name,
                json.dumps({key: _change(found[name][key]) for key in SHOWN[world]}),
                flush=True,
            )
    print(table(changes(found, args.seeds)))


if __name__ == "__main__":
    main()
