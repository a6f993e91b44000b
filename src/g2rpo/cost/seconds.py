"""How long a run takes: on a card, from operations and a datasheet; on this machine, from a short probe."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from g2rpo.config import Config
from g2rpo.cost.blueprint import Shapes
from g2rpo.cost.cards import Card
from g2rpo.cost.counting import Counts, call_sizes
from g2rpo.cost.flops import forward_flops, training_flops
from g2rpo.cost.judges import Judge, count_flops
from g2rpo.rollout.engine import Engine
from g2rpo.scoring import decode
from g2rpo.seeding import generator_for
from g2rpo.trainer import Trainer
from g2rpo.types import Transition
from g2rpo.update import Experience

OPTIMIZER_PASSES = 14
"""Reads and writes of every trained float32 in clipping and an AdamW step."""


@dataclass(frozen=True)
class Seconds:
    """Seconds by phase of one iteration; of encoding all prompts; of one evaluation; of the run."""

    iteration: dict[str, float]
    encoding: float
    evaluation: float
    run: float
    basis: str
    """Where the numbers come from."""


def _total(iteration: dict[str, float], encoding: float, evaluation: float, counts: Counts, basis: str) -> Seconds:
    run = counts.iterations * sum(iteration.values()) + encoding + counts.times_evaluated * evaluation
    return Seconds(iteration, encoding, evaluation, run, basis)


def on_card(
    card: Card,
    utilisation: float,
    config: Config,
    counts: Counts,
    policy: Any,
    shapes: Shapes,
    judges: Mapping[str, Judge | None],
    distinct_prompts: int,
) -> Seconds:
    """Operations / (datasheet rate * utilisation), or bytes / bandwidth where that is longer.

    Every network call reads all weights once; an optimizer step passes `OPTIMIZER_PASSES` times over what is trained. Not
    counted: work of the host (preprocessing of rewards, pictures, checkpoints, starting) and rewards elsewhere.
    """
    transformer, dtype = policy.pipeline.transformer, config.policy.dtype

    def compute(flops: float, kind: str = dtype) -> float:
        return flops / (card.tflops(kind) * 1e12 * utilisation)

    def scoring(pictures: int, names: Sequence[str]) -> float:
        known = [judge for name in names if (judge := judges[name]) is not None and judge.device.startswith("cuda")]
        return pictures * sum(compute(judge.flops, judge.dtype) for judge in known)

    reading = sum(p.nbytes for p in transformer.parameters()) / (card.bandwidth * 1e9)
    row = compute(forward_flops(transformer, shapes))
    picture = compute(count_flops(lambda: policy.decode(torch.empty(1, *shapes.latent, device="meta"))))
    training = training_flops(transformer, shapes, config.policy.gradient_checkpointing)
    trained = sum(p.nbytes for p in policy.trainable_parameters())
    step = OPTIMIZER_PASSES * trained / (card.bandwidth * 1e9)
    update = max(compute(counts.training_rows * training), counts.training_passes * 3 * reading)
    iteration = {
        "rollout": sum(max(size * row, reading) for size in call_sizes(config)),
        "decode": counts.images * picture,
        "rewards": scoring(counts.images, list(config.rewards)),
        "update": update + counts.reference_rows * row + counts.optimizer_steps * step,
    }
    names = [*config.rewards, *config.evaluation.rewards]
    evaluation = counts.heldout_evaluations * row + counts.heldout * picture + scoring(counts.heldout, names)
    encoding = compute(distinct_prompts * _encoder_flops(policy, shapes))
    basis = (
        f"{card.name}: {card.tflops(dtype):g} TFLOP/s in {dtype} (datasheet), of which {utilisation:.0%} are assumed to be used"
    )
    return _total(iteration, encoding, evaluation, counts, basis)


def _encoder_flops(policy: Any, shapes: Shapes) -> float:
    """2 * parameters * tokens of every text encoder, for one prompt (with its negative one, where guidance is on)."""
    total = 0.0
    for name, module in policy.pipeline.components.items():
        if name.startswith("text_encoder") and module is not None:
            limit = getattr(module.config, "max_position_embeddings", policy.max_sequence_length)  # CLIP's; T5 has none
            total += 2.0 * sum(p.numel() for p in module.parameters()) * limit
    return total * shapes.rows


def by_probe(trainer: Trainer, counts: Counts, distinct_prompts: int, cached: bool) -> Seconds:
    """Times a few calls of everything that `trainer` does, on its own device, and multiplies.

    A network call is timed at the smallest, a middle and the largest size of the rollout's calls, and interpolated. The
    trainer is used up: the probe of the update changes its weights. With `cached` prompts are encoded once, ahead.
    """
    config, policy = trainer.config, trainer.policy
    sizes = call_sizes(config)
    measured = sorted({min(sizes), int(np.median(sizes)), max(sizes)})
    prompts = trainer.order.batch(0, config.trainer.prompts_per_iteration)
    encoding = _timed(lambda: policy.encode(prompts[:1]), policy.device)
    cond = policy.encode(prompts)
    engine = Engine(policy, cond, trainer.sigmas, config.sampling.batch_size)

    def rows(count: int) -> Tensor:
        return policy.noise([generator_for("probe", i) for i in range(count)])

    def call(size: int) -> float:
        x, places = rows(size), [i % len(prompts) for i in range(size)]
        steps = [i % (len(trainer.sigmas) - 1) for i in range(size)]
        with torch.no_grad():
            return _timed(lambda: engine.velocity(x, steps, places), policy.device)

    calls = [call(size) for size in measured]
    batch = min(config.sampling.decode_batch_size, counts.images)
    latents = rows(batch)
    images = decode(policy, latents, batch)
    picture = _timed(lambda: decode(policy, latents, batch), policy.device) / batch
    asked = [prompts[i % len(prompts)] for i in range(batch)]
    score = {
        name: _timed(partial(reward, images, asked), policy.device) / batch
        for name, reward in {**trainer.rewards, **trainer.judges}.items()
    }
    update = _timed(_update(trainer, counts, rows, cond), policy.device)
    step = _timed(trainer.optimizer.step, policy.device)  # after an update: without gradients it would do nothing
    iteration = {
        "encode": 0.0 if cached else encoding * counts.prompts,
        "rollout": float(np.interp(sizes, measured, calls).sum()),
        "decode": counts.images * picture,
        "rewards": counts.images * sum(score[name] for name in config.rewards),
        "update": counts.training_passes * (update - step) + counts.optimizer_steps * step,
    }
    chunks = [min(config.sampling.batch_size, counts.heldout - i) for i in range(0, counts.heldout, config.sampling.batch_size)]
    evaluation = counts.heldout_steps * float(np.interp(chunks, measured, calls).sum())
    evaluation += counts.heldout * (picture + sum(score.values()) + (0.0 if cached else encoding))
    ahead = distinct_prompts * encoding if cached else 0.0
    return _total(iteration, ahead, evaluation, counts, f"probe of this machine's {policy.device}: a few calls of each kind")


def _update(trainer: Trainer, counts: Counts, rows: Callable[[int], Tensor], cond: Any) -> Callable[[], Any]:
    """One training pass and one optimizer step, on made-up transitions of the size of a real one."""
    group = trainer.algorithm.group_size
    transitions = math.ceil(len(trainer.plans) * counts.prompts / max(1, counts.training_passes))
    experience = [
        Experience(
            prompt=i % counts.prompts,
            transition=Transition(
                trainer.plans[0].branch, rows(1), rows(group), torch.zeros(group, device=trainer.policy.device)
            ),
            advantages=torch.ones(group),
        )
        for i in range(min(transitions, trainer.config.trainer.micro_batch_size))
    ]
    return lambda: trainer.updater.update(experience, cond)


def _timed(run: Callable[[], Any], device: torch.device, at_least: float = 0.4, most: int = 5) -> float:
    """The median of a few runs after one that warms up."""

    def once() -> float:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    times = [once()]
    while len(times) < most and sum(times) < at_least:
        times.append(once())
    return statistics.median(times)
