"""Flow matching in one variable: sigma grids, the ODE step, the one SDE step, and the tails that finish a member.

    x = (1 - sigma) * image + sigma * noise        velocity v = noise - image        score = -(x + (1 - sigma) v) / sigma

sigma falls from 1 (noise) to 0 (image), so dsigma = sigma_next - sigma is negative on every step.
`g` is the diffusion coefficient of the SDE; `std = g * sqrt(|dsigma|)` is the noise that one step injects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from g2rpo.types import Diffusion

TailEnd = Literal["reference", "closed"]


def sigma_grid(num_steps: int, shift: float = 1.0) -> Tensor:
    """Sigmas of a sampler with `num_steps` steps under SD3's time shift (arXiv 2403.03206, Eq. 23).

    [num_steps + 1], float32, from exactly 1 to exactly 0; sigma = shift * u / (1 + (shift - 1) * u), u uniform.
    `shift` > 0; 1 leaves the grid uniform, above 1 spends more steps near the noise.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    if not shift > 0:
        raise ValueError(f"shift must be positive, got {shift}")
    u = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return (shift * u / (1 + (shift - 1) * u)).float()


def per_row(value: Tensor, like: Tensor) -> Tensor:
    """`value` [B] (or a scalar) shaped to broadcast against `like` [B, ...], in its dtype and on its device."""
    value = value.to(like)
    return value if value.ndim == 0 else value.reshape(-1, *[1] * (like.ndim - 1))


def precise(x: Tensor) -> Tensor:
    """x in float32 if its own dtype is narrower; steps and log-probs are never taken in bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def ode_step(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """One Euler step of dx = v dsigma. x, velocity [B, ...]; sigmas [B] or scalar.

    A step to `sigma_next` = 0 is the prediction of the image, x - sigma * v.
    """
    return x + per_row(sigma_next - sigma, x) * velocity


@dataclass(frozen=True)
class Normal:
    """The kernel of one stochastic step: independent normals around `mean` [B, ...] with `std` [B] or scalar."""

    mean: Tensor
    std: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        """mean + std * noise; `noise` [G, ...] may have more rows than a one-row mean."""
        return self.mean + per_row(self.std, self.mean) * noise

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density of x [B, ...], as the *mean* over a row's entries, [B].

        The mean (not the sum) is the convention of DDPO and its descendants: a ratio is then a geometric mean per entry,
        and a clip range of 1e-4 is a sensible one.
        """
        mean = precise(self.mean)
        std = per_row(self.std, mean)
        entries = -((precise(x) - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
        return entries.flatten(1).mean(1)


def sde_step(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, g: Tensor) -> Normal:
    """One Euler-Maruyama step of the SDE that has the ODE's marginals, for any g (Flow-GRPO, arXiv 2505.05470, Eq. 9).

    dx = (v - g^2 / 2 * score) dsigma + g dw. x, velocity [B, ...]; sigma > 0, sigma_next, g: [B] or scalar.
    Flow-GRPO's and DanceGRPO's published steps are this formula with `flow_sde` and `dance_sde`. At g = 0 the mean is the ODE
    step bit for bit, but the kernel has no density. The result is at least float32 whatever the dtype of the velocity.
    """
    x, velocity = precise(x), precise(velocity)
    s, half_g2 = per_row(sigma, x), per_row(0.5 * g**2, x)
    score = -(x + (1 - s) * velocity) / s
    mean = ode_step(x, velocity - half_g2 * score, sigma, sigma_next)
    return Normal(mean, g * (sigma - sigma_next).sqrt())


def flow_sde(sigmas: Tensor, eta: float) -> Diffusion:
    """Flow-GRPO's g(sigma) = eta * sqrt(sigma / (1 - sigma)) (arXiv 2505.05470, Eq. 12; G2RPO, Eq. 2).

    g is infinite at sigma = 1. As the published code does, the denominator takes the grid's second sigma there.
    """
    below_one = sigmas[1]

    def g(sigma: Tensor) -> Tensor:
        clamped = torch.where(sigma >= 1, below_one.to(sigma), sigma)
        return eta * (sigma / (1 - clamped)).sqrt()

    return g


def dance_sde(eta: float) -> Diffusion:
    """DanceGRPO's constant g(sigma) = eta (arXiv 2505.07818, Eq. 7)."""
    return lambda sigma: torch.full_like(sigma, eta)


def tail(start: int, num_steps: int, granularity: int, end: TailEnd = "reference") -> tuple[int, ...]:
    """The steps that finish a member from step `start` with jumps of `granularity` (G2RPO, interval sampling S_j).

    The first jump is always a fine one, so tails of every granularity share their first two velocities. `closed` walks on and
    ends with whatever is left (at most `granularity` steps). `reference` is what the published code does: it never evaluates
    the last point of the strided grid but predicts the image from the one before, so the last jump is up to
    2 * granularity - 1 steps long. Both need ceil((num_steps - start) / granularity) velocities or one more.
    """
    if not 0 <= start < num_steps:
        raise ValueError(f"a tail must start before the end: start={start}, num_steps={num_steps}")
    if granularity < 1:
        raise ValueError(f"granularity must be at least 1, got {granularity}")
    strided = list(range(start + 1, num_steps + 1, granularity))
    visited = strided[:-1] if end == "reference" else [step for step in strided if step < num_steps]
    return (start, *visited, num_steps)
