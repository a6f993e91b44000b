"""The time of a run on a card, from operations, bytes and a datasheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from g2rpo.assembly.blueprint import size_of
from g2rpo.config.schema import Config
from g2rpo.lab.plan.cards import Card
from g2rpo.lab.plan.counting import Counts, Iteration
from g2rpo.lab.plan.flops import Operations
from g2rpo.lab.plan.rewards import RewardCost, count_flops
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.policies.pipelines import Shapes

OPTIMIZER_PASSES = 10
"""Reads and writes of every trained float32: three in clipping, and seven in an AdamW step of one kernel."""


@dataclass(frozen=True)
class Seconds:
    """Seconds by phase of one iteration (on average); of encoding all prompts ahead; of one evaluation; of the run."""

    iteration: dict[str, float]
    encoding: float
    evaluation: float
    run: float
    basis: str
    """The source of the numbers."""


def summed(iteration: dict[str, float], encoding: float, evaluation: float, counts: Counts, basis: str) -> Seconds:
    """The run's time from the times of its phases."""
    run = counts.iterations * sum(iteration.values()) + encoding + counts.times_evaluated * evaluation
    return Seconds(iteration, encoding, evaluation, run, basis)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operations of one evaluation, training row, picture, prompt and score; bytes to move."""

    dtype: str
    evaluation: float
    training_row: float
    picture: float
    prompt: float
    score: dict[str, tuple[float, str]]
    """Operations and dtype, by reward that is computed on the device."""
    float8: float
    """Of an evaluation's operations, those in float8; of a training row's, as many in each forward pass."""
    forwards: int
    """Forward passes of a training row."""
    weights: int
    trained: int
    trained_rewards: tuple[str, ...]
    ahead: int
    """Prompts that are encoded before training and cached; 0 without a cache."""


def work_of(
    config: Config,
    policy: DiffusersPolicy,
    shapes: Shapes,
    operations: Operations,
    reward_costs: Mapping[str, RewardCost | None],
    distinct_prompts: int,
) -> Work:
    """The work of a run of `config`, whose policy on the meta device is `policy`; `operations` are those of an evaluation."""
    transformer = policy.pipeline.transformer
    here = {name: known for name, known in reward_costs.items() if known is not None and known.device.startswith("cuda")}
    return Work(
        dtype=config.policy.dtype,
        evaluation=operations.forward,
        training_row=operations.training(config.policy.gradient_checkpointing),
        float8=operations.linear if config.policy.quantize == "fp8" else 0.0,
        forwards=2 if config.policy.gradient_checkpointing else 1,
        picture=count_flops(lambda: policy.decode(torch.empty(1, *shapes.latent, device="meta"))),
        prompt=_encoder_flops(policy, shapes),
        score={name: (known.flops, known.dtype) for name, known in here.items()},
        weights=size_of(transformer),
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


def on_card(card: Card, utilisation: float, counts: Counts, work: Work) -> Seconds:
    """Operations / (datasheet rate * utilisation), or bytes / bandwidth where that is longer.

    Every network call reads all weights once; an optimizer step passes `OPTIMIZER_PASSES` times over what is trained. Not
    counted: work of the host (preprocessing of rewards, pictures, checkpoints, starting) and rewards elsewhere.
    """

    def compute(flops: float, dtype: str = work.dtype) -> float:
        return flops / (card.tflops(dtype) * 1e12 * utilisation)

    def move(size: float) -> float:
        return size / (card.bandwidth * 1e9)

    def scoring(names: Iterable[str]) -> float:
        return sum(compute(*work.score[name]) for name in names if name in work.score)

    saved = compute(work.float8) - compute(work.float8, "float8") if work.float8 else 0.0
    row, picture, reading = compute(work.evaluation) - saved, compute(work.picture), move(work.weights)
    training_row = compute(work.training_row) - work.forwards * saved
    prompt = 0.0 if work.ahead else compute(work.prompt)

    def rollout(iteration: Iteration) -> float:
        return sum(max(rows * row, reading) for rows in iteration.calls)

    def update(iteration: Iteration) -> float:
        passes = sum(max(rows * training_row, 3 * reading) for rows in iteration.passes)
        return passes + iteration.reference_rows * row + iteration.optimizer_steps * OPTIMIZER_PASSES * move(work.trained)

    iteration = {
        **({"encode": counts.prompts_drawn * prompt} if prompt else {}),
        "rollout": counts.mean(rollout),
        "decode": counts.mean(lambda it: it.images) * picture,
        "rewards": counts.mean(lambda it: it.images) * scoring(work.trained_rewards),
        "update": counts.mean(update),
    }
    evaluation = counts.heldout_evaluations * row + counts.heldout * (prompt + picture + scoring(work.score))
    rate = f"{card.tflops(work.dtype):g} TFLOP/s in {work.dtype} (datasheet)"
    basis = f"{card.name}: {rate}, of which {utilisation:.0%} are assumed to be used"
    return summed(iteration, compute(work.ahead * work.prompt), evaluation, counts, basis)
