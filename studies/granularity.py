"""Granularity: do members keep their rank when their tail is walked in other step sizes?

    python -m studies.granularity --prompts 24

For each prompt and branch step a group branches by one stochastic step, and every member is
finished by tails of granularity 1, 2, 3 and by one jump, strided tails with both ends
(`flow.tail`). Agreement is Spearman's rank correlation of a reward over the group between
granularity 1 and each other tail, averaged over prompts, with bootstrap intervals over prompts.
Groups in which either side gives every member the same reward have no ranks; they are left out and
counted as silent.

Writes studies/results/NAME.json and NAME.png.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from g2rpo.config.read import load_config
from g2rpo.core.flow import tail
from g2rpo.core.noise import generator_for
from g2rpo.core.plans import Plan
from g2rpo.core.statistics import interval, spearman
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.memory import BatchSizes
from g2rpo.rollout.scoring import score_rollouts
from g2rpo.train.build import Request, build
from g2rpo.train.monitor.curves import Panel, save_figure, small_multiples
from studies.credit import REWARDS, instrument_parser, lines_by, save

SIZES = BatchSizes(rollout=8, decode=8, micro=8)


def tails_of(step: int, num_steps: int) -> dict[str, tuple[int, ...]]:
    """The tails that finish a member after the stochastic step `step`, the finest first."""
    start = step + 1
    return {
        "1": tail(start, num_steps, 1),
        **{
            f"{size} {end}": tail(start, num_steps, size, end)
            for size in (2, 3)
            for end in ("closed", "reference")
        },
        "one jump": (start, num_steps),
    }


def main() -> None:
    args = arguments()
    began = time.perf_counter()
    trainer = build(
        Request(config=load_config(args.recipe, [*REWARDS[args.recipe], *args.overrides]))
    )
    num_steps, size = trainer.config.sampling.num_steps, trainer.algorithm.group_size
    steps = range(num_steps - 1) if args.steps is None else args.steps
    tails = {step: tails_of(step, num_steps) for step in steps}
    plans = [Plan(step, step + 1, tuple(own.values())) for step, own in tails.items()]
    agreements: dict[tuple[int, str, str], list[float]] = {}
    for number in range(args.prompts):
        prompts = trainer.order.batch(number, 1)
        engine = Engine(
            policy=trainer.policy,
            cond=trainer.policy.encode(prompts),
            sigmas=trainer.sigmas,
            batch_size=96,
        )

        def noise(prompt: int, *purpose: Any, number: int = number) -> Any:
            return generator_for(args.seed, "granularity", number, *purpose)

        rollouts = engine.rollout(plans, size, trainer.algorithm.kernel(trainer.sigmas), noise)
        scored = score_rollouts(trainer.policy, rollouts, trainer.rewards, prompts, SIZES).double()
        for (step, own), rewards in zip(tails.items(), scored, strict=True):
            for reward, values in zip(trainer.rewards, rewards, strict=True):
                for name, other in list(zip(own, values, strict=True))[1:]:
                    agreements.setdefault((step, reward, name), []).append(
                        float(spearman(values[0], other))
                    )
        if number % 4 == 3:
            print(f"{number + 1} prompts, {time.perf_counter() - began:.0f} s", flush=True)
    rows = [
        {
            "step": step,
            "reward": reward,
            "tail": name,
            "jumps": len(tails[step][name]) - 1,
            **asdict(interval(values)),
            "silent": float(np.isnan(values).mean()),
        }
        for (step, reward, name), values in agreements.items()
    ]
    path = save(args.name, args, began, rows)
    draw(path.with_suffix(".png"), rows)
    for reward in trainer.rewards:
        print(f"\n{reward}: rank agreement with granularity 1, by branch step")
        for name in dict.fromkeys(row["tail"] for row in rows):
            alike = [row for row in rows if (row["reward"], row["tail"]) == (reward, name)]
            print(
                f"{name:12}",
                "  ".join(
                    f"{row['step']}: {row['mean']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
                    for row in alike
                ),
            )
    print(path)


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A panel per reward, a line per tail."""
    panels = []
    for reward in dict.fromkeys(row["reward"] for row in rows):
        lines = lines_by("tail", [row for row in rows if row["reward"] == reward])
        panels.append(Panel(f"{reward}: rank agreement with granularity 1", lines, "branch step"))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(path, small_multiples([panels], legend=True))


def arguments() -> argparse.Namespace:
    parser = instrument_parser(__doc__, prompts=24)
    parser.add_argument("--name", default="granularity")
    parser.add_argument(
        "--steps", type=int, nargs="*", help="branch steps; default all but the last"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
