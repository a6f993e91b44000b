"""Which part of a model computes numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from g2rpo.core.finite import not_finite, real_tensors
from g2rpo.core.flow import ode_step
from g2rpo.core.types import Policy
from g2rpo.rollout.engine import Engine


@torch.no_grad()
def fault_of(policy: Policy, prompt: str, noise: Tensor, sigmas: Tensor) -> str | None:
    """A message about the first part that is not finite when `prompt` is drawn by Euler's ODE from `noise` [1, ...]; None if
    the picture is finite. All steps are always walked, so that the ranks of a sharded model make equally many calls."""
    found = [name for name, values in _walk(policy, prompt, noise, sigmas) if not values.isfinite().all()]
    return not_finite(found[0], getattr(policy, "dtype", None)) if found else None


def _walk(policy: Policy, prompt: str, x: Tensor, sigmas: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What is computed for a picture, in order, with names."""
    cond, steps = policy.encode([prompt]), len(sigmas) - 1
    for name, values in real_tensors(cond):
        yield f"the text encoder's {name} of {prompt!r:.80}", values
    engine = Engine(policy=policy, cond=cond, sigmas=sigmas)
    for step in range(steps):
        v = engine.velocity(x, [step], [0])
        yield f"the transformer's velocity at step {step + 1} of {steps}", v
        x = ode_step(x, v, sigmas[step], sigmas[step + 1])
        yield f"the latents after step {step + 1} of {steps}", x
    yield "the VAE's picture of finite latents", policy.decode(x)
