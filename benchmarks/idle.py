"""How long the devices of several ranks are idle, with rollouts, prompts and scores that take unequal times.

    torchrun --nproc-per-node 4 -m benchmarks.idle --out benchmarks/results/idle.json

Devices are simulated: a call of the network sleeps for its rows, so that ranks need no processor, and is busy meanwhile. The
trainer is the real one, on a policy with a closed form; an iteration has four prompts a rank, and a training row takes three
times as long as one without gradient. Idle is what is left of an iteration's time: waiting for scores and for other ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe
from g2rpo.config.resolve import resolve
from g2rpo.config.schema import Config
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.runtime.distributed import World, joined
from g2rpo.runtime.sharding import Replicated
from g2rpo.training.trainer import Trainer
from g2rpo.types import Cond

EACH = 4
"""Prompts of a rank."""
SCENARIOS = {
    "even": "all calls and scores take equally long",
    "slow rank": "the device of rank 0 takes twice as long in rollouts",
    "uneven prompts": "a prompt's calls take from a half to twice as long",
    "late scores": "scores come from elsewhere, after times with a long tail",
}


class Device(GaussianPolicy):
    """A policy whose calls take `row_s` seconds a row, by `slowness(prompt)` longer without gradient; `busy_s` is their sum."""

    def __init__(self, row_s: float, slowness: Callable[[float], float]) -> None:
        super().__init__()
        self.row_s, self.slowness, self.busy_s = row_s, slowness, 0.0

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        rows = [3.0] * len(x) if torch.is_grad_enabled() else [self.slowness(float(shift)) for shift in cond.tensors["shift"]]
        start = time.perf_counter()
        time.sleep(self.row_s * sum(rows))
        self.busy_s += time.perf_counter() - start
        return super().velocity(x, sigma, cond)


def prompts(ranks: int) -> list[str]:
    """Numbers between -1 and 1: what a prompt's calls take is 2 to their power in "uneven prompts"."""
    generator = torch.Generator().manual_seed(0)
    return [f"{float(value):.3f}" for value in 2 * torch.rand(8 * EACH * ranks, generator=generator) - 1]


def config(ranks: int, overrides: Sequence[str]) -> Config:
    settings = {
        "recipe": "idle",
        "policy": {"path": "none", "height": 4, "width": 4},
        "algorithm": {"group_size": 4, "branch_steps": [0, 1], "granularities": [1]},
        "rewards": {"bright": 1.0},
        "prompts": {"train": "none"},
        "sampling": {"num_steps": 4, "batch_size": 8, "decode_batch_size": 8},
        "optim": {"learning_rate": 0.05},
        "trainer": {"iterations": 100, "prompts_per_iteration": EACH * ranks, "micro_batch_size": 8},
        "evaluation": {"prompts": "none", "num_prompts": ranks},
    }
    return resolve(settings, overrides)


def build(scenario: str, world: World, args: argparse.Namespace) -> Trainer:
    def slowness(prompt: float) -> float:
        if scenario == "slow rank" and world.rank == 0:
            return 2.0
        return 2.0**prompt if scenario == "uneven prompts" else 1.0

    def bright(images: Tensor, prompts: Sequence[str]) -> Tensor:
        scores = images.flatten(1).mean(1)
        if scenario == "late scores":  # exponential times, drawn by the picture, so that they do not depend on who asks
            waits = [-math.log(1 - (float(score) * 1e5) % 1) for score in scores]
            time.sleep(args.row_s * 2 * sum(waits))
        return scores

    bright.waits = scenario == "late scores"  # type: ignore[attr-defined]
    return Trainer(
        config=config(world.size, args.overrides),
        policy=Device(args.row_s, slowness),
        rewards={"bright": bright},
        prompts=prompts(world.size),
        heldout=prompts(world.size)[: world.size],
        shards=Replicated(world),
        trackers=[],
    )


def measured(trainer: Trainer) -> list[float]:
    """Of one iteration, seconds and busy seconds until the update begins, and of the update."""
    policy, marks = trainer.policy, list[tuple[float, float]]()
    assert isinstance(policy, Device)
    update = trainer.updater.update

    def mark() -> None:
        marks.append((time.perf_counter(), policy.busy_s))

    def marked(*arguments: Any) -> Any:
        mark()
        stats = update(*arguments)
        mark()
        return stats

    trainer.updater.update = marked  # type: ignore[method-assign]
    mark()
    trainer.iterate()
    trainer.updater.update = update  # type: ignore[method-assign]
    return [now - before for one, other in pairwise(marks) for now, before in zip(other, one, strict=True)]


def main() -> None:
    args = arguments()
    with joined("cpu") as world:
        results = {scenario: shares(scenario, world, args) for scenario in args.scenarios}
        if not world.is_main:
            return
    print("| scenario | iteration | idle until the update | idle in the update | idle in all, by rank |\n" + "|---" * 5 + "|")
    for scenario, own in results.items():
        by_rank = ", ".join(f"{value:.0%}" for value in own["idle_by_rank"])
        print(f"| {scenario} | {own['seconds']:.2f} s | {own['sampling']:.0%} | {own['update']:.0%} | {by_rank} |")
    if args.out:
        settings = {"row_s": args.row_s, "repeats": args.repeats, "overrides": args.overrides, "ranks": world.size}
        record = {
            "settings": settings,
            "machine": describe(torch.device("cpu")),
            "load": os.getloadavg()[0],
            "results": results,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def shares(scenario: str, world: World, args: argparse.Namespace) -> dict[str, Any]:
    """Shares of the ranks' time, over all iterations but the first."""
    trainer = build(scenario, world, args)
    rows = torch.tensor([measured(trainer) for _ in range(args.repeats + 1)][1:], dtype=torch.float64).sum(0)
    spent, busy, updating, busy_updating = world.gather(rows[None]).T
    return {
        "seconds": float((spent + updating).mean()) / args.repeats,
        "sampling": 1 - float(busy.sum() / spent.sum()),
        "update": 1 - float(busy_updating.sum() / updating.sum()),
        "idle_by_rank": (1 - (busy + busy_updating) / (spent + updating)).tolist(),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=[*SCENARIOS])
    parser.add_argument("--row-s", type=float, default=0.01, help="seconds a row of the network")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
