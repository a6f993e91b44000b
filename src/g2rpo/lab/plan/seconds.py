"""The time of a run on a card, from the rooflines of its calls and a datasheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from g2rpo.config.schema import Config
from g2rpo.lab.plan.cards import Card
from g2rpo.lab.plan.counting import CountedIteration, Counts
from g2rpo.lab.plan.rates import RATES, Rates
from g2rpo.lab.plan.rewards import RewardCost
from g2rpo.lab.plan.trace import Calls, TracedCall
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.policies.pipelines import Shapes

OPTIMIZER_PASSES = 10
"""Reads and writes of every trained float32: three in clipping, and seven in an AdamW step of one kernel."""


@dataclass(frozen=True)
class PlannedSeconds:
    """Seconds by phase of one iteration (on average); of encoding all prompts ahead; of one evaluation; of the run."""

    iteration: dict[str, float]
    encoding: float
    evaluation: float
    run: float
    basis: str
    """The source of the numbers."""


def summed(iteration: dict[str, float], encoding: float, evaluation: float, counts: Counts, basis: str) -> PlannedSeconds:
    """The run's time from the times of its phases."""
    run = counts.iterations * sum(iteration.values()) + encoding + counts.looks * evaluation
    return PlannedSeconds(iteration, encoding, evaluation, run, basis)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Calls of a run, whose kernels are traced; operations of what is not traced; bytes to move."""

    calls: Calls
    dtype: str
    prompt: float
    score: dict[str, tuple[float, str]]
    """Operations and dtype, by reward that is computed on the device."""
    trained: int
    trained_rewards: tuple[str, ...]
    ahead: int
    """Prompts that are encoded before training and cached; 0 without a cache."""


def work_of(
    config: Config,
    policy: DiffusersPolicy,
    shapes: Shapes,
    calls: Calls,
    reward_costs: Mapping[str, RewardCost | None],
    distinct_prompts: int,
) -> Work:
    """The work of a run of `config`, whose policy on the meta device is `policy`."""
    here = {name: known for name, known in reward_costs.items() if known is not None and known.device.startswith("cuda")}
    return Work(
        calls=calls,
        dtype=config.policy.dtype,
        prompt=_encoder_flops(policy, shapes),
        score={name: (known.flops, known.dtype) for name, known in here.items()},
        trained=sum(p.nbytes for p in policy.trainable_parameters()),
        trained_rewards=tuple(config.rewards),
        ahead=distinct_prompts if config.prompts.cache != "off" else 0,
    )


def _encoder_flops(policy: DiffusersPolicy, shapes: Shapes) -> float:
    """2 * parameters * tokens of every text encoder, for one prompt (with its negative one, where guidance is on)."""
    total = 0.0
    for name, module in policy.pipeline.components.items():
        if name.startswith("text_encoder") and module is not None:
            longest = getattr(module.config, "max_position_embeddings", math.inf)  # CLIP's is 77, T5 has none
            limit = min(longest, policy.max_sequence_length)
            total += 2.0 * sum(p.numel() for p in module.parameters()) * limit
    return total * shapes.rows


def on_card(card: Card, counts: Counts, work: Work, rates: Rates = RATES) -> PlannedSeconds:
    """The rooflines of all calls, each for its rows.

    Not counted: work of the host (preprocessing of rewards, pictures, checkpoints, starting), compiling, rewards elsewhere.
    """

    def compute(flops: float, dtype: str = work.dtype) -> float:
        return flops / (rates.products(card, dtype) * rates.models)

    def scoring(names: Iterable[str]) -> float:
        return sum(compute(*work.score[name]) for name in names if name in work.score)

    @cache
    def velocity(rows: int) -> float:
        return work.calls.velocity.roofline.call(card, rates, rows / work.calls.velocity.rows)

    def a_row(call: TracedCall) -> float:
        return call.roofline.call(card, rates) / call.rows

    training_row, picture = a_row(work.calls.training), a_row(work.calls.decode)
    prompt = 0.0 if work.ahead else compute(work.prompt)
    step = OPTIMIZER_PASSES * work.trained / rates.moved(card)

    def update(iteration: CountedIteration) -> float:
        reference = iteration.reference_rows * a_row(work.calls.velocity)
        return iteration.training_rows * training_row + reference + iteration.optimizer_steps * step

    iteration = {
        **({"encode": counts.prompts_drawn * prompt} if prompt else {}),
        "rollout": counts.mean(lambda it: sum(map(velocity, it.calls))),
        "decode": counts.mean(lambda it: it.images) * picture,
        "rewards": counts.mean(lambda it: it.images) * scoring(work.trained_rewards),
        "update": counts.mean(update),
    }
    evaluation = counts.heldout_evaluations * a_row(work.calls.heldout)
    evaluation += counts.heldout * (prompt + a_row(work.calls.judged) + scoring(work.score))
    reached = rates.products(card, work.dtype) / 1e12
    rate = f"{reached:.0f} of {card.tflops(work.dtype):g} TFLOP/s in {work.dtype}, {card.bandwidth:g} GB/s"
    basis = f"{card.name} by roofline: {rate}"
    return summed(iteration, compute(work.ahead * work.prompt), evaluation, counts, basis)
