"""The time of a run on this machine, from a few timed calls of each kind."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from g2rpo.core.seeding import generator_for
from g2rpo.core.types import Cond, Example
from g2rpo.lab.plan.counting import Counts
from g2rpo.lab.plan.seconds import Seconds, summed
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.guidance import sized
from g2rpo.rollout.planning import dry_rollout
from g2rpo.rollout.scoring import decode, score, weighted_scores
from g2rpo.runtime.devices import accelerator
from g2rpo.training.trainer import Trainer

Rows = Callable[[int], Tensor]
"""`count` initial latents."""
Clock = Callable[[], float]


def by_probe(
    trainer: Trainer, counts: Counts, distinct_prompts: int, cached: bool, clock: Clock = time.perf_counter
) -> Seconds:
    """Times a few calls of each kind of `trainer` on its device, and multiplies by their number.

    A network call is timed at the smallest, a middle and the largest size of a run's calls, and interpolated. The trainer must
    not be used afterwards: the probe of the update changes its weights. With `cached` prompts are encoded once. `clock` may be
    time.process_time, which other processes do not affect.
    """
    timed = partial(_timed, device=trainer.policy.device, clock=clock)
    config, policy, most = trainer.config, trainer.policy, trainer.sizes.rollout
    prompts = trainer.order.batch(0, config.trainer.prompts_per_iteration)
    encoding = timed(lambda: policy.encode(prompts[:1]))
    cond = policy.encode(prompts)
    engine = Engine(policy=policy, cond=cond, sigmas=trainer.sigmas, batch_size=most)

    def rows(count: int) -> Tensor:
        return policy.noise([generator_for("probe", i) for i in range(count)])

    def measured(sizes: Sequence[int]) -> Callable[[Sequence[int]], float]:
        """A function from a list of row counts to the seconds of these calls."""

        def call(size: int) -> float:
            x, places = rows(size), [i % len(prompts) for i in range(size)]
            steps = [i % (len(trainer.sigmas) - 1) for i in range(size)]
            with torch.no_grad():
                return timed(lambda: engine.velocity(x, steps, places))

        chosen = sorted({min(sizes), int(np.median(sizes)), max(sizes)})
        times = [call(size) for size in chosen]
        return lambda asked: float(np.interp(asked, chosen, times).sum())

    chunks = [min(most, counts.heldout - start) for start in range(0, counts.heldout, most)]  # calls of an evaluation's step
    own_calls = measured([*chunks, *(size for iteration, _ in counts.kinds for size in iteration.calls)])
    picture, images, asked = _pictures(trainer, cond, prompts, rows, timed)
    heldout, judged = own_calls(chunks), picture
    if config.judged_size is not None:
        with sized(policy, config.judged_size):
            heldout, judged = measured(chunks)(chunks), _pictures(trainer, cond, prompts, rows, timed)[0]
    scoring = {
        name: timed(partial(score, {name: reward}, images, asked, images)) / len(images)
        for name, reward in {**trainer.rewards, **trainer.judges}.items()
    }
    once = _examples(trainer, rows, counts.largest(lambda it: it.passes))
    passed = sum(item.rows for item in once)
    trainer.updater.reward = partial(weighted_scores, trainer.policy, trainer.rewards, trainer.weights, prompts)
    update = timed(lambda: trainer.updater.update(once, cond))
    step = timed(trainer.learner.optimizer.step)  # after an update: without gradients it would be a no-op
    iteration = {
        "encode": 0.0 if cached else encoding * counts.prompts,
        "rollout": counts.mean(lambda it: own_calls(it.calls)),
        "decode": counts.mean(lambda it: it.images) * picture,
        "rewards": counts.mean(lambda it: it.images) * sum(scoring[name] for name in config.rewards),
        "update": counts.mean(lambda it: it.training_rows / passed * (update - step) + it.optimizer_steps * step),
    }
    evaluation = counts.heldout_steps * heldout
    evaluation += counts.heldout * (judged + sum(scoring.values()) + (0.0 if cached else encoding))
    ahead = distinct_prompts * encoding if cached else 0.0
    return summed(iteration, ahead, evaluation, counts, f"probe of this machine's {policy.device}: a few calls of each kind")


def _pictures(
    trainer: Trainer, cond: Cond, prompts: Sequence[str], rows: Rows, timed: Callable[..., float]
) -> tuple[float, Tensor, list[str]]:
    """Seconds to decode a picture, and pictures with their prompts; sampled ones, because a detector is slow on noise."""
    batch = trainer.sizes.decode
    places = [i % len(prompts) for i in range(batch)]
    latents = Engine(
        policy=trainer.policy, cond=cond.rows(places), sigmas=trainer.sigmas, batch_size=trainer.sizes.rollout
    ).sample(rows(batch))
    seconds = timed(lambda: decode(trainer.policy, latents, batch)) / batch
    return seconds, decode(trainer.policy, latents, batch), [prompts[place] for place in places]


def _examples(trainer: Trainer, rows: Rows, width: int) -> list[Example]:
    """Made-up examples for one training pass of about `width` latents, of the plans' own shape."""
    algorithm, (plan, *_) = trainer.algorithm, trainer.plans()
    latent, device = rows(1).shape[1:], trainer.policy.device
    made: list[Example] = []
    while sum(item.rows for item in made) < width:
        prompt = len(made) % trainer.config.trainer.prompts_per_iteration
        rollout = dry_rollout(plan, algorithm.group_size, latent, prompt)
        example, *_ = algorithm.examples(rollout, torch.ones(algorithm.group_size), generator_for)
        data = {name: value.to(device) for name, value in example.data.items()}
        made.append(replace(example, x=rows(example.rows), data=data))
    return made


def _timed(run: Callable[[], Any], device: torch.device, clock: Clock, at_least: float = 0.4, most: int = 5) -> float:
    """The median time of a few runs after a warm-up."""

    def once() -> float:
        began = clock()
        run()
        if (module := accelerator(device)) is not None:
            module.synchronize(device)
        return clock() - began

    once()
    times = [once()]
    while len(times) < most and sum(times) < at_least:
        times.append(once())
    return statistics.median(times)
