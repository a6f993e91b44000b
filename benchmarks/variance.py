"""Variance of a group's gradient: antithetic pairs, coarse tails, noise of their own for granularities, the anchor's reward.

    python -m benchmarks.variance --recipe scenes-fast --prompts 48 rewards.scene_preference=1 evaluation.rewards={}
    python -m benchmarks.variance --recipe words --prompts 48 rewards.word_drawing=1 evaluation.rewards={}

At the base model, for each prompt and branch step of the recipe, G = group_size members with independent noise are finished by
granularities 1 and 2 (published tail), 2G others by 2, and G/2 antithetic pairs by 1; the anchor is finished as well. By step:

- pairs: the correlation of r(e) and r(-e), pooled without bias; docs/algorithm.md derives that pairs help above 0;
- anchor: (E r - r(anchor))^2 / var r, without bias; the anchor's reward as a baseline helps below 1 / (G - 1);
- agreement: the correlation of rewards at granularities 1 and 2; std: of rewards within groups; silent: groups of equal ones.

By variant, a prompt's gradient being the mean over steps: `noise`, the mean |g|^2 relative to {1}; `repeats`, the share of
it that another group with noise of its own off the same anchor repeats, the rest being the members' noise (by step: of {1});
alignment with other prompts' gradients at granularity 1, and efficiency, as in `benchmarks.credit`.
Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.credit import Sketch, alignment_of, gradients, instrument_parser, save
from g2rpo.commands.train import build_trainer, load_config
from g2rpo.evaluation.study import TRAINED_LATENT
from g2rpo.flow import tail
from g2rpo.objectives import group_normalize
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.planning import count_evaluations
from g2rpo.rollout.scoring import Stopwatch, decode, score, score_rollouts
from g2rpo.seeding import generator_for
from g2rpo.training.trainer import Trainer
from g2rpo.types import Plan, Rollout

FINE, COARSE, BOTH, ANCHOR, MORE, OWN, PAIRS = (
    "{1}", "{2}", "{1, 2}", "{1}, less the anchor's reward", "{2}, 2G members", "{1, 2}, noise of their own", "{1}, pairs",
)  # fmt: skip


def pair_correlation(rewards: Tensor) -> tuple[float, float]:
    """The correlation of rewards [N, 2n] of members 2j and 2j + 1 of N groups with means of their own, and its standard error.

    With u = 1 / (2n), the group's mean takes u (1 + rho) of covariance and variance; this is solved for rho. The error is a
    jackknife's over groups.
    """
    u = 1 / rewards.shape[-1]
    deviation = (rewards - rewards.mean(-1, keepdim=True)).double()
    products = (deviation[:, 0::2] * deviation[:, 1::2]).sum(1)
    squares = deviation.square().sum(1) / 2

    def solved(over: Tensor, under: Tensor) -> Tensor:
        q = over / under
        return (q * (1 - u) + u) / (1 - u + q * u)

    left_out = solved(products.sum() - products, squares.sum() - squares)
    groups = len(rewards)
    error = ((groups - 1) / groups * (left_out - left_out.mean()).square().sum()).sqrt()
    return float(solved(products.sum(), squares.sum())), float(error)


def anchor_distance(rewards: Tensor, anchor: Tensor) -> float:
    """sum over groups of (E r - r(anchor))^2 over that of var r, without bias; members' rewards [N, G], anchors' [N]."""
    variance = rewards.double().var(-1)
    return float(((rewards.double().mean(-1) - anchor).square() - variance / rewards.shape[-1]).sum() / variance.sum())


def of_one_prompt(trainer: Trainer, number: int, steps: Sequence[int], sketch: Sketch) -> Iterator[tuple[str, int, Tensor]]:
    """(what, step, values) of one prompt: by variant sketches [R, buckets], and "rewards/..." [R, ...]."""
    prompts = trainer.order.batch(number, 1)
    policy, size, num_steps = trainer.policy, trainer.algorithm.group_size, trainer.config.sampling.num_steps
    kernel = trainer.algorithm.kernel(trainer.sigmas)
    engine = Engine(policy=policy, cond=policy.encode(prompts), sigmas=trainer.sigmas, batch_size=96)

    def roll(arm: str, members: int, **how: Any) -> tuple[list[Rollout], Tensor]:
        def noise(prompt: int, purpose: str, *key: Any) -> torch.Generator:
            own = (purpose, *key) if purpose == "initial" else (arm, purpose, *key)
            return generator_for(trainer.config.trainer.seed, "variance", number, *own)

        plans = [Plan(step, step + 1, tails_of(step, num_steps, **how), antithetic=arm == "pairs") for step in steps]
        rollouts = engine.rollout(plans, members, kernel, noise)
        return rollouts, score_rollouts(policy, rollouts, trainer.rewards, prompts, 8, Stopwatch())  # [steps, R, M, members]

    initial = policy.noise([generator_for(trainer.config.trainer.seed, "variance", number, "initial")])
    anchor = score(trainer.rewards, decode(policy, engine.sample(initial), 8), prompts)[:, 0]  # [R]
    plain, pairs, coarse = (
        roll("plain", size, grains=(1, 2)),
        roll("pairs", size, grains=(1,)),
        roll("own", 2 * size, grains=(2,)),
    )
    for place, step in enumerate(steps):
        fine, both, many = plain[1][place][:, 0], plain[1][place], coarse[1][place][:, 0]
        yield "rewards/plain", step, both
        yield "rewards/pairs", step, pairs[1][place][:, 0]
        yield "rewards/anchor", step, anchor
        one, two = group_normalize(both).unbind(1)
        shifted = torch.where(
            one.any(-1, keepdim=True), one + (fine.mean(-1) - anchor)[:, None] / (fine.std(-1)[:, None] + 1e-8), 0
        )
        half = torch.cat([2 * group_normalize(many[:, :size]), torch.zeros(len(many), size)], -1)
        for (rollouts, _), wanted in (
            (plain, {FINE: one, COARSE: two, BOTH: one + two, ANCHOR: shifted}),
            (coarse, {MORE: group_normalize(many), OWN: half}),
            (pairs, {PAIRS: group_normalize(pairs[1][place][:, 0])}),
        ):
            found = gradients(policy, kernel, trainer.sigmas, rollouts[place], torch.cat([*wanted.values()]), prompts[0])
            for name, own in zip(wanted, torch.stack([sketch(g) for g in found]).split(len(fine)), strict=True):
                yield name, step, own


def tails_of(step: int, num_steps: int, grains: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The tails behind a branch step; coarse ones end as published."""
    return tuple(tail(step + 1, num_steps, grain, "reference") for grain in grains)


def price(steps: Sequence[int], num_steps: int, size: int, name: str) -> int:
    """Network evaluations of one prompt, training included; what branches off one latent is trained in one pass."""
    grains = (2,) if name in (COARSE, MORE) else (1, 2) if name in (BOTH, OWN) else (1,)
    plans = [Plan(step, step + 1, tails_of(step, num_steps, grains)) for step in steps]
    cost = count_evaluations(plans, 2 * size if name == MORE else size)
    if name == OWN:
        cost = sum(count_evaluations([Plan(s, s + 1, tails_of(s, num_steps, (g,))) for s in steps], size) for g in grains)
        cost -= max(steps) + 1
    return cost + TRAINED_LATENT * len(steps) + (num_steps - max(steps) - 1 if name == ANCHOR else 0)


def repeated(group: Tensor, other: Tensor) -> tuple[float, float]:
    """sum <g, h> / sum |g|^2 over prompts, for independent groups g, h [N, buckets], and its standard error (jackknife)."""
    products, squares = (group * other).sum(1).double(), group.square().sum(1).double()
    left_out = (products.sum() - products) / (squares.sum() - squares)
    count = len(products)
    error = ((count - 1) / count * (left_out - left_out.mean()).square().sum()).sqrt()
    return float(products.sum() / squares.sum()), float(error)


def step_rows(found: Mapping[tuple[str, int], Tensor], steps: Sequence[int], rewards: Sequence[str]) -> list[dict[str, Any]]:
    """What rewards alone say, by reward and branch step, and of all steps together (None)."""
    rows = []
    for place, reward in enumerate(rewards):
        for own in [*([step] for step in steps), list(steps)]:
            plain = torch.cat([found["rewards/plain", step][:, place] for step in own])  # [N, 2, G]
            pairs = torch.cat([found["rewards/pairs", step][:, place] for step in own])
            anchor = torch.cat([found["rewards/anchor", step][:, place] for step in own])
            correlation, error = pair_correlation(pairs)
            vectors = [torch.stack([found[name, step][:, place] for step in own]).flatten(0, 1) for name in (FINE, PAIRS)]
            again, again_error = repeated(*vectors)
            fine, coarse = (plain - plain.mean(-1, keepdim=True)).double().unbind(1)
            rows.append(
                {
                    "reward": reward,
                    "step": own[0] if len(own) == 1 else None,
                    "std": float(fine.square().sum(-1).mean().div(fine.shape[-1] - 1).sqrt()),
                    "silent": float((fine == 0).all(-1).double().mean()),
                    "pairs": correlation,
                    "pairs_error": error,
                    "repeats": again,
                    "repeats_error": again_error,
                    "anchor": anchor_distance(plain[:, 0], anchor),
                    "agreement": float((fine * coarse).sum() / (fine.square().sum() * coarse.square().sum()).sqrt()),
                }
            )
    return rows


def variant_rows(
    found: Mapping[tuple[str, int], Tensor], steps: Sequence[int], rewards: Sequence[str], num_steps: int, size: int
) -> list[dict[str, Any]]:
    """Noise, alignment and efficiency of every variant, by reward; gradients are means over the branch steps."""
    rows = []
    for place, reward in enumerate(rewards):
        mean = {name: torch.stack([found[name, step][:, place] for step in steps]).mean(0).double() for name in VARIANTS}
        mean[OWN] = mean[OWN] + mean[FINE]
        unit = mean[FINE].square().sum(1).mean()
        for name, own in mean.items():
            cost = price(steps, num_steps, size, name)
            again, again_error = repeated(own, mean[PAIRS if name in (FINE, ANCHOR, COARSE, BOTH) else FINE])
            alignment, error = alignment_of(own, mean[FINE] + mean[PAIRS])
            rows.append(
                {
                    "variant": name,
                    "reward": reward,
                    "evaluations_per_prompt": cost,
                    "noise": float(own.square().sum(1).mean() / unit),
                    "repeats": math.nan if name == OWN else again,
                    "repeats_error": math.nan if name == OWN else again_error,
                    "alignment": alignment,
                    "alignment_error": error,
                    "efficiency": max(0.0, alignment) ** 2 / cost * 1e6,
                    "efficiency_error": 2 * max(0.0, alignment) * error / cost * 1e6,
                }
            )
    return rows


VARIANTS = (FINE, PAIRS, ANCHOR, COARSE, MORE, BOTH, OWN)


def main() -> None:
    args = arguments()
    began = time.perf_counter()
    trainer = build_trainer(load_config(args.recipe, [*args.overrides, f"trainer.seed={args.seed}"]), None)
    steps, num_steps = getattr(trainer.algorithm, "branch_steps"), trainer.config.sampling.num_steps  # noqa: B009
    sketch = Sketch(sum(p.numel() for p in trainer.learner.parameters), args.buckets)
    lists: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    for number in range(args.prompts):
        for what, step, values in of_one_prompt(trainer, number, steps, sketch):
            lists[what, step].append(values)
        if number % 8 == 7:
            print(f"{number + 1} prompts, {time.perf_counter() - began:.0f} s", flush=True)
    found = {key: torch.stack(own) for key, own in lists.items()}
    names = list(trainer.rewards)
    by_step = step_rows(found, steps, names)
    by_variant = variant_rows(found, steps, names, num_steps, trainer.algorithm.group_size)
    path = save(args.name or f"variance_{args.recipe}", args, began, [*by_step, *by_variant])
    for row in by_step:
        print(
            f"{row['reward']:17} step {'all' if row['step'] is None else row['step']!s:3}  std {row['std']:.3f}  "
            f"silent {row['silent']:.2f}  pairs {row['pairs']:+.2f} ± {row['pairs_error']:.2f}  anchor {row['anchor']:.2f}  "
            f"agreement {row['agreement']:.2f}  repeats {row['repeats']:+.3f} ± {row['repeats_error']:.3f}"
        )
    for row in by_variant:
        print(
            f"{row['reward']:17} {row['variant']:30} cost {row['evaluations_per_prompt']:5}  noise {row['noise']:.2f}  "
            f"repeats {row['repeats']:+.3f} ± {row['repeats_error']:.3f}  "
            f"alignment {row['alignment']:+.3f} ± {row['alignment_error']:.3f}  "
            f"efficiency {row['efficiency']:6.2f} ± {row['efficiency_error']:.2f}"
        )
    print(path)


def arguments() -> argparse.Namespace:
    parser = instrument_parser(__doc__, prompts=48)
    parser.add_argument("--name", help="of the results; default variance_RECIPE")
    parser.add_argument("--buckets", type=int, default=32768)
    return parser.parse_args()


if __name__ == "__main__":
    main()
