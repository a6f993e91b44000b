"""Learning curves of the algorithms on the two embedded worlds, at equal numbers of network
evaluations.

    python -m studies.curves --out runs/curves --seeds scenes=3,words=1

On `scenes-fast` pilots choose each cell's learning rate, as in `g2rpo compare --find-rate`; on
`words` it is the same rate. Runs that are finished are not repeated. Writes curves.json and
curves.png in the folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from g2rpo.cli.output import Output
from g2rpo.core.files import write_whole
from g2rpo.core.statistics import Interval
from g2rpo.lab.compare.results import Point, change_lines
from g2rpo.lab.compare.workflow import compare
from g2rpo.monitor.curves import Panel, save_figure, small_multiples

TURNS = ["algorithm.branch_schedule=turns", "algorithm.tail=closed"]
SMALL = "algorithm.group_size=12"
FORWARD = {
    "diffusion_nft": ["algorithm.name=diffusion_nft", "algorithm.share=0.2", SMALL],
    "awm": ["algorithm.name=awm", "algorithm.times=2", SMALL],
    "dgpo": ["algorithm.name=dgpo", "algorithm.times=2", SMALL],
}
DPPO = [
    "algorithm.name=flow_dppo",
    "algorithm.update_every=6",
    "trainer.prompts_per_iteration=2",
    SMALL,
]
REFL = [
    *("algorithm.name=refl", "algorithm.ceiling=2"),
    *("rewards.scene_accuracy=", "rewards.scene_clip=1", "evaluation.rewards.scene_clip="),
    "evaluation.rewards.scene_accuracy.options={partial: 0.33}",
]
"""Trained on the learned score `scene_clip`, whose gradient it takes; no differentiable score reads
words."""
SHOWN = {"scenes": ("scene_accuracy", "scene_correct"), "words": ("ocr", "ocr_exact")}


def cells(world: str, steps: int) -> dict[str, list[str]]:
    """Overrides by cell; the G2RPO family branches at one of the first `steps` steps an iteration,
    in turn."""
    turns = [f"algorithm.branch_steps={list(range(steps))}", *TURNS]
    return {
        "g2rpo": ["algorithm.name=g2rpo"],
        "pave_grpo": ["algorithm.name=pave_grpo", "algorithm.eta=0.7", *turns],
        "adagrpo": ["algorithm.name=adagrpo", "algorithm.candidates=4", *turns],
        **FORWARD,
        "flow_dppo": DPPO,
        **({"refl": REFL} if world == "scenes" else {}),
    }


def study(world: str, seeds: int, rates: Mapping[str, float], out: Path) -> dict[str, Any]:
    """What `g2rpo compare` found; without `rates` by cell, pilots choose them."""
    overrides = {
        "scenes": ["evaluation.every=25", "evaluation.num_prompts=96"],
        "words": [
            "policy.lora_above=0",
            "trainer.prompts_per_iteration=4",
            "evaluation.every=12",
            "evaluation.num_prompts=96",
        ],
    }
    recipe, steps = {"scenes": ("scenes-fast", 8), "words": ("words", 6)}[world]
    own = {
        cell: [f"optim.learning_rate={rates[cell]}"] if rates else []
        for cell in cells(world, steps)
    }
    changes = {cell: [*words, *own[cell]] for cell, words in cells(world, steps).items()}
    folder = compare(
        recipe,
        overrides[world],
        changes,
        ("evaluations", 10000),
        find_rate=not rates,
        seeds=seeds,
        out=out / world,
        emit=Output(),
    )
    found: dict[str, Any] = json.loads(folder.results.read_text())
    return found


def points(found: Sequence[dict[str, Any]]) -> list[Point]:
    """As results.json has them."""
    return [Point(**{**point, "change": Interval(**point["change"])}) for point in found]


def draw(
    path: Path, curves: Mapping[str, Mapping[str, Mapping[str, Any]]], seeds: Mapping[str, int]
) -> None:
    """curves[world][reward][cell] against evaluations; bands where there are three seeds."""
    rows = []
    for world, rewards in curves.items():
        many = f"{seeds[world]} seeds" if seeds[world] > 1 else "one seed"
        row = []
        for reward, own in rewards.items():
            lines = change_lines(
                {cell: points(found) for cell, found in own.items()},
                lambda point: point.work / 1000,
            )
            if seeds[world] < 3:
                lines = [replace(line, ends=()) for line in lines]
            title = f"{world}: change of {reward}, {many}"
            row.append(Panel(title, lines, "thousand network evaluations, training included"))
        rows.append(row)
    save_figure(path, small_multiples(rows, legend=True, zero=True))


def main() -> None:
    args = arguments()
    seeds = {
        world: int(count)
        for world, _, count in (word.partition("=") for word in args.seeds.split(","))
    }
    found: dict[str, Any] = {}
    rates: dict[str, float] = {}
    for world in seeds:
        found[world] = study(world, seeds[world], rates, args.out)
        rates = rates or {
            cell: spent["learning_rate"] for cell, spent in found[world]["spent"].items()
        }
        found[world]["curves"] = {reward: found[world]["curves"][reward] for reward in SHOWN[world]}
    write_whole(args.out / "curves.json", json.dumps(found, indent=1).encode())
    draw(args.out / "curves.png", {world: own["curves"] for world, own in found.items()}, seeds)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/curves"))
    parser.add_argument("--seeds", default="scenes=3,words=3", help="training seeds by world")
    return parser.parse_args()


if __name__ == "__main__":
    main()
