"""How long a run takes on this machine: a few calls of everything it does, timed and multiplied."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from g2rpo.cost.counting import Counts, call_sizes, rows_of
from g2rpo.cost.seconds import Seconds, summed
from g2rpo.rollout.engine import Engine
from g2rpo.scoring import decode
from g2rpo.seeding import generator_for
from g2rpo.trainer import Trainer
from g2rpo.types import Transition
from g2rpo.update import Experience


def by_probe(trainer: Trainer, counts: Counts, distinct_prompts: int, cached: bool) -> Seconds:
    """Times a few calls of everything that `trainer` does, on its own device, and multiplies.

    A network call is timed at the smallest, a middle and the largest size of the rollout's calls, and interpolated. The
    trainer is used up: the probe of the update changes its weights. With `cached` prompts are encoded once, ahead.
    """
    config, policy = trainer.config, trainer.policy
    sizes, most = call_sizes(config), config.sampling.batch_size
    chunks = [min(most, counts.heldout - start) for start in range(0, counts.heldout, most)]  # calls of an evaluation's step
    measured = sorted({min(*sizes, *chunks), int(np.median(sizes)), max(*sizes, *chunks)})
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
    asked = [prompts[i % len(prompts)] for i in range(batch)]
    drawn = cond.rows([i % len(prompts) for i in range(batch)])
    latents = Engine(policy, drawn, trainer.sigmas, most).sample(rows(batch))  # a detector takes another time on noise
    images = decode(policy, latents, batch)
    picture = _timed(lambda: decode(policy, latents, batch), policy.device) / batch
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
    evaluation = counts.heldout_steps * float(np.interp(chunks, measured, calls).sum())
    evaluation += counts.heldout * (picture + sum(score.values()) + (0.0 if cached else encoding))
    ahead = distinct_prompts * encoding if cached else 0.0
    return summed(iteration, ahead, evaluation, counts, f"probe of this machine's {policy.device}: a few calls of each kind")


def _update(trainer: Trainer, counts: Counts, rows: Callable[[int], Tensor], cond: Any) -> Callable[[], Any]:
    """One training pass and one optimizer step, on made-up transitions of the size of a real one."""
    group, device = trainer.algorithm.group_size, trainer.policy.device
    steps = [(plan, step) for plan in trainer.plans for step in range(plan.branch, plan.merge)]
    items = min(trainer.config.trainer.micro_batch_size, math.ceil(len(steps) * counts.prompts / counts.training_passes))

    def made_up(index: int) -> Experience:
        plan, step = steps[index % len(steps)]
        x = rows(rows_of(plan, step, group))
        return Experience(
            index % counts.prompts, Transition(step, x, rows(group), torch.zeros(group, device=device)), torch.ones(group)
        )

    experience = [made_up(index) for index in range(items)]
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
