"""Allocation: what a tail tells of the finest one's gradient, and what that is worth per evaluation and per second.

    python -m benchmarks.allocation --prompts 16 --members 128

At the base model, for each prompt and branch step, the same members are finished by the recipe's tail of granularity 1 and by
cheaper ones: longer Euler jumps (granularity 2, 3) and the fast tails of docs/performance.md. Per tail:

- rho, rank agreement with the finest tail within a prompt's members, pooled as in `algorithms.allocation`;
- signal: the expected gradient's component along the finest tail's, relative to it. In the space of the injected noise e a
  gradient is the mean of A e, so inner products of expected gradients are means of A_i B_j <e_i, e_j> over members i != j,
  without bias; ratios are of sums over prompts, with 95 % bootstrap intervals over them. Theory says that it is rho;
- cosine: of the two expected gradients; where it is below 1, a coarse tail leads elsewhere, however many its members;
- worth: rho^2 per evaluation of a member, and per second of processor time (tail, decoding and scoring), relative to the finest
  tail; `measured` has signal in the place of rho.

Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.credit import instrument_parser, save
from g2rpo.algorithms.allocation import best_ratio
from g2rpo.commands.train import build_trainer, load_config
from g2rpo.flow import tail
from g2rpo.objectives import group_normalize, mix_rewards
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.planning import count_evaluations
from g2rpo.rollout.scoring import Stopwatch, score_rollouts
from g2rpo.rollout.tails import Tails
from g2rpo.seeding import generator_for
from g2rpo.statistics import ranks
from g2rpo.training.trainer import Trainer
from g2rpo.types import Plan

TAILS = {
    "1": (1, Tails()),
    "2": (2, Tails()),
    "3": (3, Tails()),
    "1, forecast": (1, Tails(forecast=True)),
    "1, dpmpp2m stride 2": (1, Tails(solver="dpmpp2m", stride=2)),
}
FINEST = next(iter(TAILS))


@dataclass
class Told:
    """What one tail told after one branch step: a number per prompt of each."""

    xy: list[float] = field(default_factory=list)
    xx: list[float] = field(default_factory=list)
    yy: list[float] = field(default_factory=list)
    along: list[float] = field(default_factory=list)
    """<expected gradient, the finest's>."""
    own: list[float] = field(default_factory=list)
    """|expected gradient|^2."""


def inner(a: Tensor, b: Tensor, noise: Tensor) -> float:
    """<E a e, E b e> from members' advantages a, b [G] and noises e [G, D], without bias: pairs of different members only."""
    whole = (a @ noise) @ (b @ noise) - (a * b * noise.square().sum(1)).sum()
    return float(whole / (len(a) * (len(a) - 1)))


def measure(trainer: Trainer, args: argparse.Namespace) -> tuple[dict[tuple[int, str], Told], dict[str, float]]:
    """What tails told by (branch step, tail), and seconds of processor time by tail and, of all pictures, by "picture"."""
    num_steps, config = trainer.config.sampling.num_steps, trainer.config
    told: dict[tuple[int, str], Told] = defaultdict(Told)
    seconds: dict[str, float] = defaultdict(float)
    end, mix = getattr(trainer.algorithm, "tail"), getattr(trainer.algorithm, "reward_mix")  # noqa: B009
    for number in range(args.prompts):
        prompts = trainer.order.batch(number, 1)
        cond = trainer.policy.encode(prompts)

        def noise(prompt: int, *purpose: Any, number: int = number) -> torch.Generator:
            return generator_for(args.seed, "allocation", number, *purpose)

        scores, steps = {}, args.steps
        for name, (grain, tails) in TAILS.items():
            plans = [Plan(step, step + 1, (tail(step + 1, num_steps, grain, end),)) for step in steps]
            engine = Engine(
                policy=trainer.policy, cond=cond, sigmas=trainer.sigmas, batch_size=int(config.sampling.batch_size), tails=tails
            )
            began = time.process_time()
            rollouts = engine.rollout(plans, args.members, trainer.algorithm.kernel(trainer.sigmas), noise)
            seconds[name] += time.process_time() - began
            began = time.process_time()
            rewards = score_rollouts(trainer.policy, rollouts, trainer.rewards, prompts, trainer.sizes.decode, Stopwatch())
            seconds["picture"] += time.process_time() - began
            scores[name] = mix_rewards(rewards, trainer.weights, mix)  # [steps, members]
        for place, step in enumerate(steps):
            (transition,) = rollouts[place].transitions
            kick = (transition.x_next - transition.old_mean).flatten(1)
            kick = kick / kick.square().mean().sqrt()
            y = group_normalize(ranks(scores[FINEST][place])).float()
            for name, score in scores.items():
                x, own = group_normalize(ranks(score[place])).float(), told[step, name]
                for into, a, b in ((own.xy, x, y), (own.xx, x, x), (own.yy, y, y)):
                    into.append(float(a @ b))
                own.along.append(inner(score[place], scores[FINEST][place], kick))
                own.own.append(inner(score[place], score[place], kick))
        print(f"{number + 1} prompts, {sum(seconds.values()):.0f} s", flush=True)
    return told, seconds


def ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """sum(over) / sum(under) with a 95 % bootstrap interval over their entries; sums that are not positive divide nothing."""
    pairs = np.array([over, under])
    draws = np.random.default_rng(0).integers(0, len(over), (2000, len(over)))
    tops, bottoms = pairs[:, draws].sum(-1)
    values = tops / np.where(bottoms > 0, bottoms, np.nan)
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(pairs[0].sum() / pairs[1].sum()), float(low), float(high)


def summarise(
    told: Mapping[tuple[int, str], Told], cost: Mapping[tuple[int, str], float], steps: Sequence[int]
) -> Iterator[dict]:
    """A row for each tail at each branch step, and for all steps together (step None)."""
    for name in TAILS:
        for group in [*([step] for step in steps), list(steps)]:
            here, fine = ([told[step, which] for step in group] for which in (name, FINEST))

            def over_prompts(many: Sequence[Told], what: str) -> list[float]:
                return np.array([getattr(one, what) for one in many]).sum(0).tolist()

            xx, yy = sum(over_prompts(here, "xx")), sum(over_prompts(here, "yy"))
            rho = sum(over_prompts(here, "xy")) / (xx * yy) ** 0.5
            signal, low, high = ratio(over_prompts(here, "along"), over_prompts(fine, "own"))
            sizes = [sum(over_prompts(many, "own")) for many in (here, fine)]
            along = sum(over_prompts(here, "along"))
            paid, paid_fine = (sum(cost[step, which] for step in group) for which in (name, FINEST))
            yield {
                "step": group[0] if len(group) == 1 else None,
                "tail": name,
                "evaluations": paid,
                "rho": rho,
                "signal": signal,
                "low": low,
                "high": high,
                "cosine": along / (sizes[0] * sizes[1]) ** 0.5 if min(sizes) > 0 else None,
                "worth": rho**2 * paid_fine / paid,
                "measured": signal**2 * paid_fine / paid,
            }


def main() -> None:
    args = arguments()
    began = time.perf_counter()
    trainer = build_trainer(load_config(args.recipe, args.overrides), None)
    args.steps = list(getattr(trainer.algorithm, "branch_steps"))  # noqa: B009
    num_steps, end = trainer.config.sampling.num_steps, getattr(trainer.algorithm, "tail")  # noqa: B009
    cost = {}
    for name, (grain, tails) in TAILS.items():
        for step in args.steps:
            plan = [Plan(step, step + 1, (tail(step + 1, num_steps, grain, end),))]
            cost[step, name] = float(count_evaluations(plan, 2, tails) - count_evaluations(plan, 1, tails))
    told, seconds = measure(trainer, args)
    rows = list(summarise(told, cost, args.steps))
    members = args.prompts * len(args.steps) * args.members
    picture = seconds["picture"] / members / len(TAILS)
    for row in rows:
        row["seconds"] = seconds[row["tail"]] / members + picture if row["step"] is None else None
    fine = next(row for row in rows if row["step"] is None)
    for row in rows:
        if row["step"] is None:
            row["worth_per_second"] = row["rho"] ** 2 * fine["seconds"] / row["seconds"]
    path = save(args.name, args, began, rows)
    for row in rows:
        step, cosine = (
            ("all" if row["step"] is None else row["step"]),
            ("–" if row["cosine"] is None else f"{row['cosine']:.2f}"),
        )
        print(
            f"{step:>4} {row['tail']:20} {row['evaluations']:4.0f}  rho {row['rho']:.2f}  cosine {cosine:>5}"
            f"  signal {row['signal']:5.2f} [{row['low']:.2f}, {row['high']:.2f}]"
            f"  worth {row['worth']:.2f} (measured {row['measured']:.2f})"
            + (f"  per second {row['worth_per_second']:.2f}, {1e3 * row['seconds']:.1f} ms" if row["step"] is None else "")
        )
    print(f"a picture takes {1e3 * picture:.1f} ms of that")
    table = {(row["step"], row["tail"]): row for row in rows if row["step"] is not None}
    for names in (["1", "2", "3"], list(TAILS)):
        worths, costs = ([[table[step, n][of] for n in names] for step in args.steps] for of in ("rho", "evaluations"))
        worths = [[rho**2 for rho in row] for row in worths]
        places = best_ratio(worths, costs)
        gained = sum(w[p] for w, p in zip(worths, places, strict=True)) / sum(c[p] for c, p in zip(costs, places, strict=True))
        gained *= fine["evaluations"] / len(args.steps)
        print(f"best of {', '.join(names)}: {[names[p] for p in places]}, {gained:.2f} times the finest everywhere")
    print(path)


def arguments() -> argparse.Namespace:
    parser = instrument_parser(__doc__, prompts=16)
    parser.add_argument("--name", default="allocation")
    parser.add_argument("--members", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    main()
