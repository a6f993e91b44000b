"""What rolling out some prompts at once hides of a reward that is waited for, such as one behind
HTTP.

    python -m benchmarks.overlap --wait 0.01 --out benchmarks/results/overlap.json

The testbed's recipe with a reward that sleeps `--wait` seconds a picture, as a server elsewhere
would take them; the settings take turns. The last is the default for a reward that declares to wait
(`waits`); the others do not. The floor is the longer of what this machine computes and what it
waits for.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe
from g2rpo.config.read import load_config
from g2rpo.train.build import Request, build
from g2rpo.train.found import Given
from g2rpo.train.trainer import Trainer


def main() -> None:
    args = arguments()

    def elsewhere(images: Tensor, prompts: list[str]) -> Tensor:
        time.sleep(args.wait * len(images))
        return images.flatten(1).mean(1)

    def waiting(images: Tensor, prompts: list[str]) -> Tensor:
        return elsewhere(images, prompts)

    waiting.waits = True  # type: ignore[attr-defined]
    trainers = {
        str(at_once or "all"): prepared(at_once, elsewhere, args.overrides)
        for at_once in (None, 2, 1)
    }
    trainers["default"] = prepared(None, waiting, args.overrides)
    rows: dict[str, list[dict[str, Any]]] = {at_once: [] for at_once in trainers}
    for _ in range(args.repeats + 1):
        for at_once, trainer in trainers.items():
            rows[at_once].append(trainer.iterate())
    results = {at_once: summary(own[1:]) for at_once, own in rows.items()}  # the first warms up
    print(
        "| prompts at once | iteration | rollout | waiting | decode and rewards | meanwhile | faster |\n"
        + "|---" * 7
        + "|"
    )
    for at_once, own in results.items():
        scoring = own["seconds/decode"] + own["seconds/rewards"]
        shown = [
            own["seconds"],
            own["seconds/rollout"],
            own.get("seconds/waiting", 0.0),
            scoring,
            own["seconds_overlapped"],
        ]
        ratio = results["all"]["seconds"] / own["seconds"]
        print(
            f"| {at_once} | " + " | ".join(f"{value:.2f}" for value in shown) + f" | {ratio:.2f}x |"
        )
    if args.out:
        settings = {"wait": args.wait, "repeats": args.repeats, "overrides": args.overrides}
        record = {
            "settings": settings,
            "machine": describe(torch.device("cpu")),
            "seconds": results,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def prepared(at_once: int | None, reward: Any, overrides: list[str]) -> Trainer:
    config = load_config("scenes", overrides)
    trainer = build(
        Request(config=config, given=Given(rewards=dict.fromkeys(config.rewards, reward)))
    )
    trainer.collector.at_once = at_once
    return trainer


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of everything in seconds."""
    return {key: median(row[key] for row in rows) for key in rows[0] if key.startswith("seconds")}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--wait", type=float, default=0.01, help="seconds a picture")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
