"""Flow matching: sigma grids, the ODE step, the SDE step, and the steps of tails.

    x = (1 - sigma) * image + sigma * noise        velocity v = noise - image        score = -(x + (1 - sigma) v) / sigma

sigma falls from 1 (noise) to 0 (image), so dsigma = sigma_next - sigma is negative on every step.
`g` is the diffusion coefficient of the SDE; `std = g * sqrt(|dsigma|)` is the noise that one step
injects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from g2rpo.core.errors import at_least_one
from g2rpo.core.noise import Normal, per_row, precise, times
from g2rpo.core.types import Kernel

Diffusion = Callable[[Tensor], Tensor]
"""The diffusion coefficient g of the SDE, as a function of sigma (elementwise)."""

TailEnd = Literal["reference", "closed"]


def sigma_grid(num_steps: int, shift: float = 1.0) -> Tensor:
    """Sigmas of a sampler with `num_steps` steps under SD3's time shift (arXiv 2403.03206, Eq. 23).

    [num_steps + 1], float32, from exactly 1 to exactly 0; sigma = shift * u / (1 + (shift - 1) *
    u), u uniform. `shift` > 0; 1 leaves the grid uniform, above 1 spends more steps near the noise.
    Computed in float32, as published code does: floor(1000 * sigma), the network's input in G2RPO's
    code, depends on the last bit.
    """
    at_least_one(num_steps=num_steps)
    if not shift > 0:
        raise ValueError(f"shift must be positive, got {shift}")
    u = torch.linspace(1, 0, num_steps + 1)
    sigmas = shift * u / (1 + (shift - 1) * u)
    sigmas[0] = 1  # rounding gives slightly less for some shifts, and g is infinite just below 1
    return sigmas


def scheduler_grid(num_steps: int, shift: float = 1.0) -> Tensor:
    """The sigmas of diffusers' FlowMatchEulerDiscreteScheduler for a number of steps and a constant
    shift.

    [num_steps + 1], float32, from exactly 1 to exactly 0. `num_steps` evenly spaced points end at
    the lowest sigma that the model was trained at, which is the shift of 1/1000, and are shifted
    once more; 0 follows. So the lower end is shifted twice (huggingface/diffusers#13243), and the
    last step is tiny: 0.0089 -> 0 at shift 3. SD3's pipelines use this grid, FLUX's do not.
    """
    at_least_one(num_steps=num_steps)
    if not shift > 0:
        raise ValueError(f"shift must be positive, got {shift}")
    lowest = shift * 0.001 / (1 + (shift - 1) * 0.001)
    u = torch.linspace(1, lowest, num_steps, dtype=torch.float64)
    sigmas = (shift * u / (1 + (shift - 1) * u)).float()
    sigmas[0] = 1
    return torch.cat([sigmas, torch.zeros(1)])


def ode_step(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """One Euler step of dx = v dsigma. x, velocity [B, ...]; sigmas [B] or scalar.

    A step to `sigma_next` = 0 is the prediction of the image, x - sigma * v. If the velocity is
    narrower than x, so is the product (`noise.times`).
    """
    dsigma = sigma_next - sigma
    narrow = dsigma.to(velocity.dtype).to(
        dsigma.dtype
    )  # published code computes sigma * v with sigma first, which torch rounds
    return x + times(torch.where(sigma_next > 0, dsigma, narrow), velocity)


def sde_step(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, g: Tensor) -> Normal:
    """One Euler-Maruyama step of the SDE that has the ODE's marginals, for any g (Flow-GRPO, arXiv
    2505.05470, Eq. 9).

    dx = (v - g^2 / 2 * score) dsigma + g dw. x, velocity [B, ...]; sigma > 0, sigma_next, g: [B] or
    scalar. Flow-GRPO's and DanceGRPO's published steps are this formula with `flow_sde` and
    `dance_sde`. At g = 0 the mean is the ODE step bit for bit, but the kernel has no density. The
    mean is at least float32; if the velocity is narrower, so are its products (`noise.times`), which
    are taken in the order of Flow-GRPO's code.
    """
    x, dsigma = precise(x), sigma_next - sigma
    of_x = 1 + g**2 / (2 * sigma) * dsigma  # score and velocity, sorted by x and v
    of_v = 1 + g**2 * (1 - sigma) / (2 * sigma)
    mean = per_row(of_x, x) * x + times(dsigma, times(of_v, velocity))
    return Normal(mean, g * (sigma - sigma_next).sqrt())


def flow_sde(sigmas: Tensor, eta: float) -> Diffusion:
    """Flow-GRPO's g(sigma) = eta * sqrt(sigma / (1 - sigma)) (arXiv 2505.05470, Eq. 12; G2RPO, Eq.
    2).

    g is infinite at sigma = 1. As the published code does, the denominator takes the grid's second
    sigma there.
    """
    below_one = sigmas[1]

    def g(sigma: Tensor) -> Tensor:
        clamped = torch.where(sigma >= 1, below_one.to(sigma), sigma)
        return eta * (sigma / (1 - clamped)).sqrt()

    return g


def dance_sde(eta: float) -> Diffusion:
    """DanceGRPO's constant g(sigma) = eta (arXiv 2505.07818, Eq. 7)."""
    return lambda sigma: torch.full_like(sigma, eta)


def sde_kernel(g: Diffusion) -> Kernel:
    """The kernel of `sde_step` with g(sigma)."""
    return lambda x, velocity, sigma, sigma_next: sde_step(x, velocity, sigma, sigma_next, g(sigma))


class SquaredDistance(Normal):
    """A normal whose `log_prob` is the bare -(x - mean)^2, as a mean over entries: no 1 / (2 std^2)
    and no constants.

    Up to a constant it is the log-prob of a normal with variance 1/2; its KL is |mean - mean'|^2,
    as in Flow-CPS's code.
    """

    @property
    def unit(self) -> Tensor:
        return torch.full_like(self.std, math.sqrt(0.5))

    def log_prob(self, x: Tensor) -> Tensor:
        return -((precise(x) - precise(self.mean)) ** 2).flatten(1).mean(1)


def cps_kernel(eta: float) -> Kernel:
    """Coefficients-preserving sampling (Flow-CPS, arXiv 2509.05952): the coefficients of image and
    noise are kept.

    mean = (1 - sigma') image + sqrt(sigma'^2 - std^2) noise, std = sigma' sin(eta pi / 2), with the
    predictions image = x - sigma v and noise = x + (1 - sigma) v at x. So x' = (1 - sigma') image +
    sigma' (unit noise), whatever the step. `sde_step` is of the same form with sigma' - std^2 / (2
    sigma) before the noise, which is this to first order: its squares add up to more than sigma'^2.
    0 < eta <= 1; at 1 all noise is new. A step to sigma' = 0 is the ODE's. Marginals are kept for a
    known image only. As the published code does, the log-prob leaves out 1 / (2 std^2)
    (`SquaredDistance`), so a clip range has another scale.
    """
    share = math.sin(eta * math.pi / 2)

    def kernel(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Normal:
        x, velocity = precise(x), precise(velocity)
        s, s_next = per_row(sigma, x), per_row(sigma_next, x)
        image, noise = x - s * velocity, x + (1 - s) * velocity
        mean = (1 - s_next) * image + s_next * math.sqrt(1 - share**2) * noise
        return SquaredDistance(mean, share * sigma_next)

    return kernel


def tail(
    start: int, num_steps: int, granularity: int, end: TailEnd = "reference"
) -> tuple[int, ...]:
    """The steps that finish a member from step `start` with jumps of `granularity` (G2RPO, interval
    sampling S_j).

    The first jump is always a fine one, so tails of every granularity share their first two
    velocities. `closed` continues and ends with the remaining steps (at most `granularity`).
    `reference` is what the published code does: it never evaluates the last point of the strided
    grid but predicts the image from the one before, so the last jump is up to 2 * granularity - 1
    steps long. Both need ceil((num_steps - start) / granularity) velocities or one more.
    """
    if not 0 <= start < num_steps:
        raise ValueError(f"a tail must start before the end: start={start}, num_steps={num_steps}")
    at_least_one(granularity=granularity)
    strided = list(range(start + 1, num_steps + 1, granularity))
    visited = strided[:-1] if end == "reference" else [step for step in strided if step < num_steps]
    return (start, *visited, num_steps)
