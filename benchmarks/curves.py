"""Learning curves of the algorithms on the two embedded worlds, at equal numbers of network evaluations.

    python -m benchmarks.curves --out runs/curves --seeds scenes=3,words=1

On `scenes-fast` each cell's learning rate is chosen from three as in `g2rpo compare`, by one pilot each; on
`words` it is the same rate. With 0 seeds the curves of `scenes` are the pilots'. Runs that are finished are not repeated, and
`--pilots FILE`, the curves.json of an earlier call, spares the pilots of the cells that it has.
Writes curves.json and curves.png in the folder.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from g2rpo.cli.output import Output
from g2rpo.core.files import write_whole
from g2rpo.evaluation.work import iterations_within
from g2rpo.lab.compare.jobs import Workers, locked
from g2rpo.lab.compare.outcomes import History, Point, curve
from g2rpo.lab.compare.results import change_lines
from g2rpo.lab.compare.study import Study
from g2rpo.lab.compare.workflow import Workspace
from g2rpo.monitor.curves import Panel, save_figure, small_multiples
from g2rpo.run.rates import PILOT_SEEDS, RateGain, smallest_good_rate

TURNS = ["algorithm.branch_schedule=turns", "algorithm.tail=closed"]
SMALL = "algorithm.group_size=12"
FORWARD = {
    "diffusion_nft": ["algorithm.name=diffusion_nft", "algorithm.share=0.2", SMALL],
    "awm": ["algorithm.name=awm", "algorithm.times=2", SMALL],
    "dgpo": ["algorithm.name=dgpo", "algorithm.times=2", SMALL],
}
DPPO = ["algorithm.name=flow_dppo", "algorithm.update_every=6", "trainer.prompts_per_iteration=2", SMALL]
REFL = [
    *("algorithm.name=refl", "algorithm.ceiling=2"),
    *("rewards.scene_accuracy=", "rewards.scene_clip=1", "evaluation.rewards.scene_clip="),
    "evaluation.rewards.scene_accuracy.options={partial: 0.33}",
]
"""Trained on the learned score `scene_clip`, whose gradient it takes; no differentiable score reads words."""
RATES = [4e-4, 1e-3, 2.5e-3]
SHOWN = {"scenes": ("scene_accuracy", "scene_correct"), "words": ("ocr", "ocr_exact")}


def cells(world: str, steps: int) -> dict[str, list[str]]:
    """Overrides by cell; the G2RPO family branches at one of the first `steps` steps an iteration, in turn."""
    turns = [f"algorithm.branch_steps={list(range(steps))}", *TURNS]
    return {
        "g2rpo": ["algorithm.name=g2rpo"],
        "pave_grpo": ["algorithm.name=pave_grpo", "algorithm.eta=0.7", *turns],
        "adagrpo": ["algorithm.name=adagrpo", "algorithm.candidates=4", *turns],
        **FORWARD,
        "flow_dppo": DPPO,
        **({"refl": REFL} if world == "scenes" else {}),
    }


def study(world: str, seeds: int) -> Study:
    overrides = {
        "scenes": ["evaluation.every=25", "evaluation.num_prompts=96"],
        "words": ["policy.lora_above=0", "trainer.prompts_per_iteration=4", "evaluation.every=12", "evaluation.num_prompts=96"],
    }
    recipe, steps = {"scenes": ("scenes-fast", 8), "words": ("words", 6)}[world]
    fixed: dict[str, Any] = {"budget": 10000, "unit": "evaluations", "rates": RATES, "pilots": 1, "steps": [10]}
    return Study(recipe=recipe, overrides=overrides[world], cells=cells(world, steps), seeds=seeds, **fixed)


def rates(
    workspace: Workspace, iterations: Mapping[str, int], known: Mapping[str, Sequence[RateGain]], workers: Workers
) -> tuple[dict[str, float], dict[str, list[RateGain]]]:
    """The rate of each cell, and what its pilots gained, which is `known` for some."""
    pilots = {cell: workspace.pilots(cell, iterations[cell]) for cell in iterations if cell not in known}
    workers.run(workspace.training(pilot) for own in pilots.values() for of_seeds in own.values() for pilot in of_seeds)
    gains = {cell: list(own) for cell, own in known.items() if cell in iterations}
    for cell, own in pilots.items():
        gains[cell] = workspace.gains(workspace.config(workspace.study.overrides_of(cell)), own)
    return {cell: smallest_good_rate(gains[cell]) for cell in iterations}, gains


def earlier(path: Path | None, study: Study) -> dict[str, list[RateGain]]:
    """What the pilots gained by cell in a curves.json, of cells that are the same in `study`."""
    if path is None:
        return {}
    found = json.loads(path.read_text())["scenes"]
    same = {cell for cell, own in found["study"]["cells"].items() if own == study.cells.get(cell)}
    for key in ("recipe", "overrides", "budget", "unit", "rates", "pilots"):
        if found["study"][key] != study.model_dump(mode="json")[key]:
            raise SystemExit(f"{path}: another study, whose {key} is {found['study'][key]!r}")
    gains = found["pilots"]["gain_in_std"]
    return {cell: [RateGain(**one) for one in gains[cell]] for cell in gains if cell in same}


def histories(
    workspace: Workspace, chosen: Mapping[str, float], iterations: Mapping[str, int], seeds: int, workers: Workers
) -> dict[str, list[History]]:
    """The runs of every cell; without seeds of their own the pilots at the chosen rates."""
    if not seeds:
        return {
            cell: [workspace.history(pilot) for pilot in workspace.pilots(cell, iterations[cell])[rate][-1:]]
            for cell, rate in chosen.items()
        }
    runs = {cell: workspace.runs(cell, chosen[cell], iterations[cell]) for cell in iterations}
    workers.run(workspace.training(own[seed]) for seed in next(iter(runs.values())) for own in runs.values())
    return {cell: [workspace.history(run) for run in own.values()] for cell, own in runs.items()}


def draw(path: Path, curves: Mapping[str, Mapping[str, Mapping[str, Sequence[Point]]]], seeds: Mapping[str, int]) -> None:
    """curves[world][reward][cell] against evaluations; bands where there are three seeds."""
    rows = []
    for world, rewards in curves.items():
        many = f"{seeds[world]} seeds" if seeds[world] > 1 else "one seed"
        row = []
        for reward, own in rewards.items():
            lines = change_lines(own, lambda point: point.work / 1000)
            if seeds[world] < 3:
                lines = [replace(line, ends=()) for line in lines]
            title = f"{world}: change of {reward}, {many}"
            row.append(Panel(title, lines, "thousand network evaluations, training included"))
        rows.append(row)
    save_figure(path, small_multiples(rows, legend=True, zero=True))


def main() -> None:
    args = arguments()
    seeds = {world: int(count) for world, _, count in (word.partition("=") for word in args.seeds.split(","))}
    found: dict[str, Any] = {"unit": "change against each run's own base evaluation; 95 % intervals over seeds and prompts"}
    curves: dict[str, Any] = {}
    chosen: dict[str, float] = {}
    with locked(args.out) as lock:
        workers = Workers(1, lock, Output())
        for world in seeds:
            workspace = Workspace(study(world, max(1, seeds[world])), args.out / world)
            configs = {cell: workspace.config(workspace.study.overrides_of(cell)) for cell in workspace.study.cells}
            iterations = {cell: iterations_within(config, workspace.study.budget) for cell, config in configs.items()}
            gains: dict[str, Any] = {}
            if world == "scenes":
                chosen, gains = rates(workspace, iterations, earlier(args.pilots, workspace.study), workers)
            runs = histories(workspace, chosen, iterations, seeds[world], workers)
            curves[world] = {reward: {cell: curve(own, reward) for cell, own in runs.items()} for reward in SHOWN[world]}
            found[world] = summary(workspace.study, chosen, iterations, gains, runs, curves[world])
        write_whole(args.out / "curves.json", json.dumps(found, indent=1).encode())
        draw(args.out / "curves.png", curves, seeds)


def summary(study: Study, chosen: dict, iterations: dict, gains: dict, runs: Mapping[str, list[History]], curves: dict) -> dict:
    """What is written: settings, costs and curves of a world."""
    return {
        "study": study.model_dump(mode="json"),
        "pilots": {
            "seed_offset": PILOT_SEEDS,
            "gain_in_std": {cell: [asdict(one) for one in own] for cell, own in gains.items()},
        },
        "cells": {
            cell: {
                "rate": chosen[cell],
                "iterations": iterations[cell],
                "evaluations": sum(run.work[-1] for run in own) / len(own),
                "seconds": math.fsum(run.seconds[-1] for run in own) / len(own),
            }
            for cell, own in runs.items()
        },
        "curves": {
            reward: {cell: [asdict(point) for point in points] for cell, points in own.items()}
            for reward, own in curves.items()
        },
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/curves"))
    parser.add_argument("--seeds", default="scenes=3,words=3", help="training seeds by world")
    parser.add_argument("--pilots", type=Path, help="curves.json whose pilots are not repeated")
    return parser.parse_args()


if __name__ == "__main__":
    main()
