"""What every option of `sampling.tails` saves and what it costs: rewards of the same members,
finished exactly and fast.

    python -m benchmarks.fast_tails --out benchmarks/results/fast_tails.json      # the testbed

Anchors, noises and stochastic steps are the same; only tails differ. For every reward: the mean
absolute error of a member's reward, and Spearman's rank correlation within groups (mean and
standard deviation over groups; groups whose rewards are all equal have none). Seconds are those of
rollouts alone, exact and fast alternating in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from benchmarks.machine import describe
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.config.read import load_config
from g2rpo.config.schema import grid_of
from g2rpo.core.noise import generator_for
from g2rpo.core.plans import Rollout
from g2rpo.core.types import Policy
from g2rpo.data.prompts import build_prompts
from g2rpo.models.load import build_policy
from g2rpo.rewards.catalogue import build_rewards
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.memory import BatchSizes
from g2rpo.rollout.scoring import score_rollouts
from g2rpo.rollout.tails import EXACT, Tails

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
OPTIONS = {
    "exact": EXACT,
    "solver=dpmpp2m": Tails("dpmpp2m"),
    "forecast=true": Tails(forecast=True),
}

SIZES = BatchSizes(rollout=8, decode=8, micro=8)


@dataclass
class Runner:
    """Rolls out prompts with any option, on the same noise."""

    policy: Policy
    prompts: Sequence[str]
    algorithm: GranularGRPO
    sigmas: Tensor
    batch_size: int
    clock: Callable[[], float]

    def rollout(
        self, tails: Tails, algorithm: GranularGRPO | None = None, repeat: int = 0
    ) -> tuple[list[Rollout], int, float]:
        """Rollouts, network evaluations, seconds."""
        algorithm = algorithm or self.algorithm
        cond = self.policy.encode(self.prompts)
        engine = Engine(
            policy=self.policy,
            cond=cond,
            sigmas=self.sigmas,
            batch_size=self.batch_size,
            tails=tails,
        )
        began = self.clock()
        rollouts = engine.rollout(
            algorithm.plans(len(self.sigmas) - 1),
            algorithm.group_size,
            algorithm.kernel(self.sigmas),
            lambda prompt, *purpose: generator_for(repeat, self.prompts[prompt], *purpose),
        )
        return rollouts, engine.evaluations, self.clock() - began


def agreement(exact: Tensor, fast: Tensor) -> dict[str, float | int]:
    """Error and rank correlation of rewards [groups, members]; NaN scores and silent groups are
    left out."""
    ranks = []
    for ours, theirs in zip(fast.tolist(), exact.tolist(), strict=True):
        if len(set(ours)) > 1 and len(set(theirs)) > 1:
            ranks.append(float(spearmanr(ours, theirs).statistic))
    found = torch.tensor(ranks, dtype=torch.float64)
    return {
        "absolute_error": float((fast - exact).abs().nanmean()),
        "spread_in_groups": float(exact.std(-1).nanmean()),
        "spearman": float(found.mean()),
        "spearman_std": float(found.std()),
        "groups": len(ranks),
    }


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore", category=UserWarning)
    config = load_config("scenes", [f"algorithm.granularities={args.granularities}"])
    policy = build_policy(config.policy)
    rewards = {
        **build_rewards(config.rewards),
        **build_rewards(config.evaluation.rewards),
    }
    prompts = build_prompts(config.prompts.train, "prompts.train")[: args.prompts]
    sigmas = grid_of(config.sampling.shift, policy, args.num_steps)
    algorithm = config.algorithm
    assert isinstance(algorithm, GranularGRPO)
    runner = Runner(policy, prompts, algorithm, sigmas, args.batch_size, CLOCKS[args.clock])
    coarse = replace(algorithm, granularities=tuple(2 * g for g in algorithm.granularities))

    def scores(rollouts: list[Rollout]) -> Tensor:
        """[R, groups * tails, members]."""
        return (
            score_rollouts(policy, rollouts, rewards, prompts, SIZES).transpose(0, 1).flatten(1, 2)
        )

    small = Runner(
        policy,
        prompts[:1],
        GranularGRPO(branch_steps=(0,)),
        sigmas,
        args.batch_size,
        CLOCKS[args.clock],
    )
    exact, exact_evaluations, _ = runner.rollout(EXACT)
    truth = scores(exact)
    rows = []
    for name, tails, other in [
        *((name, tails, None) for name, tails in OPTIONS.items()),
        ("granularities doubled", EXACT, coarse),
    ]:
        if args.only and name not in args.only:
            continue
        small.rollout(tails)  # kernels chosen
        seconds, exact_seconds = [], []
        for _ in range(args.repeats):
            rollouts, evaluations, taken = runner.rollout(tails, other)
            seconds.append(taken)
            exact_seconds.append(runner.rollout(EXACT)[2])
        found = scores(rollouts)
        row = {
            "option": name,
            "evaluations": evaluations / exact_evaluations,
            "seconds": sum(seconds) / sum(exact_seconds),
            "latent_error": float(
                torch.stack(
                    [
                        (a.finals - b.finals).norm() / b.finals.norm()
                        for a, b in zip(rollouts, exact, strict=True)
                    ]
                ).mean()
            ),
            "rewards": {reward: agreement(truth[i], found[i]) for i, reward in enumerate(rewards)},
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    print("\n" + table(rows, list(rewards)))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result = {
            **{
                "prompts": len(prompts),
                "groups": len(truth[0]),
                "members": truth.shape[-1],
                "num_steps": args.num_steps,
            },
            **{
                "granularities": args.granularities,
                "exact_evaluations": exact_evaluations,
                "load": os.getloadavg(),
            },
            "machine": describe(policy.device),
            "options": rows,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def table(rows: Sequence[dict[str, Any]], rewards: Sequence[str]) -> str:
    """Markdown."""
    lines = [
        "| tails | evaluations | seconds | latent error | "
        + " | ".join(f"{name}: error, rank correlation" for name in rewards)
        + " |",
        "|---" * (4 + len(rewards)) + "|",
    ]
    for row in rows:
        cells = [
            f"{row['option']}",
            f"{row['evaluations']:.2f}",
            f"{row['seconds']:.2f}",
            f"{row['latent_error']:.1e}",
        ]
        for name in rewards:
            found = row["rewards"][name]
            cells.append(
                f"{found['absolute_error']:.2g}, {found['spearman']:.3f} ± {found['spearman_std']:.3f}"
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=16)
    parser.add_argument("--granularities", type=int, nargs="+", default=[1])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: processor seconds, with OMP_NUM_THREADS=1",
    )
    parser.add_argument("--repeats", type=int, default=2, help="timed runs of each")
    parser.add_argument(
        "--only", nargs="+", choices=[*OPTIONS, "granularities doubled"], metavar="OPTION"
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
