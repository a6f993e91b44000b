"""Whether the gradients of a policy's trained weights are those of its velocities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from g2rpo.core.noise import generator_for, in_float64
from g2rpo.models.anyflow import DiffusersPolicy

LEAST_CHANGE, MOST_DOUBLINGS = 2**-2, 16
"""Perturbed weights change velocities by at least this, in the root mean square relative to the
spread; and how often the perturbation is doubled until they do. Rounding, which is at most 2**-4 of
the spread, is then at most a quarter of the change. On tiny models of 22 classes saved weights were
off by 2e-6 of it, and in bfloat16 by 0.11."""
INTEGRAL_NODES = (2, 4, 8, 16, 32)
"""Of the integral of gradients: more where fewer disagree with the change, for tiny random networks
bend within it."""


def perturb(policy: DiffusersPolicy) -> None:
    """Changes the trained weights visibly: an adapter, whose second factor is 0 at first, or all
    weights."""
    _move(policy, _random_changes(policy, 0.5 if policy.options.tuning == "lora" else 0.1), 1)


def _random_changes(policy: DiffusersPolicy, size: float) -> dict[str, Tensor]:
    """Random changes of the trained weights by `size` of what they are; of adapters that are 0 at
    first, of what a layer's inputs are. First factors change by half, for the part of less would
    be of second order."""
    found = {}
    for name, weight in policy.tuning.named().items():
        drawn = torch.randn(weight.shape, generator=generator_for("perturb", name)).to(weight)
        if "lora_B" in name:
            found[name] = size / policy.options.lora_rank**0.5 * drawn
        else:
            relative = 0.5 if "lora_A" in name else size
            found[name] = relative * weight.detach().square().mean().sqrt() * drawn
    return found


@torch.no_grad()
def _move(policy: DiffusersPolicy, changes: Mapping[str, Tensor], by: float) -> None:
    for name, weight in policy.tuning.named().items():
        weight.add_(changes[name], alpha=by)


def gradient_error(
    policy: DiffusersPolicy, x: Tensor, sigma: Tensor, cond: Any, limit: float
) -> tuple[str, float]:
    """What was found, in words, and the relative error: the trained weights are perturbed until
    velocities change by CHANGE, and that change, squared, is compared with the integral of its
    gradient between the weights before and after, at as many nodes as an error of at most `limit`
    takes. The change by a short step, which a slope needs, is lost in the rounding of bfloat16."""

    def velocity() -> Tensor:
        return in_float64(policy.velocity(x, sigma, cond))

    trained = policy.tuning.named()
    with torch.no_grad():
        before = velocity()
    for doubling in range(MOST_DOUBLINGS):
        changes = _random_changes(policy, 2.0 ** (doubling - 10))
        _move(policy, changes, 1)
        with torch.no_grad():
            change = velocity() - before
        relative = float(change.square().mean().sqrt() / before.std())
        if relative >= LEAST_CHANGE:
            break
        _move(policy, changes, -1)
    else:
        said = f"perturbed weights change velocities by {relative:.0e} of their spread only"
        return said, math.inf
    at, reached = 1.0, 0
    for nodes in INTEGRAL_NODES:
        integral = 0.0
        for node, weight in zip(*leggauss(nodes), strict=True):
            _move(policy, changes, (1 + float(node)) / 2 - at)
            at = (1 + float(node)) / 2
            loss = (velocity() * change).mean() / change.square().mean()
            slopes = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
            reached = sum(bool(each is not None and each.any()) for each in slopes)
            for slope, moved in zip(slopes, changes.values(), strict=True):
                if slope is not None:
                    integral += float(weight) / 2 * float(in_float64(slope * moved).sum())
        if (error := abs(integral - 1)) <= limit:
            break
    _move(policy, changes, 1 - at)
    said = f"reaches {reached} of {len(trained)} trained tensors; relative error of their integral {error:.0e}"
    return said, error


def rms(a: Tensor, b: Tensor) -> float:
    """The root mean square of a difference; nan for tensors of other shapes."""
    return float((a.cpu() - b.cpu()).square().mean().sqrt()) if a.shape == b.shape else math.nan
