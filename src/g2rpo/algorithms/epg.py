"""EPG and PEPG: policy gradients on a bound of the final picture's likelihood.

Rethinking the Design Space of Reinforcement Learning for Diffusion Models, arXiv 2602.04663: which
likelihood is estimated matters more than the form of the loss.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from g2rpo.algorithms.forward_process import SMALLEST_SIZE, Noised, OffPolicy, mean_square
from g2rpo.core.noise import in_float64
from g2rpo.core.objectives import mix_rewards, weighted, without_rounding
from g2rpo.core.plain import hyper_parameters

SMALLEST_TIME = 1e-3
"""From the published code: added to sigma in the denominator of "exact"."""


@hyper_parameters
class EPG(OffPolicy):
    """EPG, arXiv 2602.04663; defaults for SD3.5 Medium on GenEval (10 steps of DPM-Solver++(2M)
    without guidance, 48 prompts an update; published: GenEval from 0.24 to 0.96).

        sample with the old weights, by any solver                                          samples_old
        A = clamp(scale (R - mean of the group)), R the weighted sum of rewards             advantages
        at fresh noise and time:  L = -w |v - (noise - x0)|^2, and L_old by v_old           elbo
        D = L - L_old;  minimise  -exp(D) A L  for "epg",  -exp(D) (A - D) L  for "pepg",
        where all but the last L is without gradient; and kl_weight |v - v_base|^2          member_loss
        old weights <- d old + (1 - d) trained                                              old_decay

    L estimates the evidence lower bound (ELBO) of log p(x0) at one time, so exp(D) estimates the
    ratio of likelihoods, and no log-prob of a step is needed. "pepg" also keeps the policy near the
    old one: its gradient is that of E[A] - KL(p, p_old). The paper's PAR, 1/2 exp(D) (A - D)^2 with
    the same ratio, has exactly that gradient in its code, so it is no choice of its own.

    `likelihood` is w, with the published names: "adaptive" is sigma / mean |v - (noise - x0)|, so
    that all times and pictures weigh alike; "t" is sigma^2, the error of the predicted image;
    "uniform" is 1; "exact" is (1 - sigma) / (sigma + 0.001). `advantage_scale` multiplies
    advantages; its best value depends on the rewards' scale unless they are `normalized`, that is
    divided by the batch's std (published for 4 steps: with `advantage_scale` 1, "pepg" and
    `kl_weight` 0). Advantages are then clamped to `advantage_clip`, which the published code does
    not do; with scores from 0 to 1 they do not reach it."""

    name: Literal["epg"] = "epg"
    title: ClassVar[str] = "EPG"
    paper: ClassVar[str] = "2602.04663"
    reward_mix: Literal["rewards"] = "rewards"
    objective: Literal["epg", "pepg"] = "epg"
    likelihood: Literal["adaptive", "t", "uniform", "exact"] = "adaptive"
    advantage_scale: PositiveFloat = 0.1
    normalized: bool = False

    ratio: ClassVar[bool] = True
    """Whether a member's loss is multiplied by exp(D); not in the published "_noratio"."""

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        if self.normalized:
            centred = mix_rewards(rewards, weights, "rewards", self.batch_std, population_std=True)
        else:
            centred = from_the_mean(weighted(without_rounding(rewards), weights).sum((-3, -2)))
        return (self.advantage_scale * centred).clamp(-self.advantage_clip, self.advantage_clip)

    def elbo(self, noised: Noised, velocity: Tensor) -> Tensor:
        """L [B] of a velocity, up to a constant; in float64, since D is a small difference."""
        residual = in_float64(velocity) - in_float64(noised.noise - noised.image)
        sigma, error = in_float64(noised.sigma), mean_square(residual)
        match self.likelihood:
            case "adaptive":
                size = sigma * residual.detach().abs().flatten(1).mean(1)
                return -error * sigma**2 / size.clamp(min=SMALLEST_SIZE)
            case "t":
                return -error * sigma**2
            case "uniform":
                return -error
            case "exact":
                return -error * (1 - sigma) / (sigma + SMALLEST_TIME)

    def member_loss(self, noised: Noised) -> Tensor:
        assert noised.old is not None
        elbo = self.elbo(noised, noised.velocity)
        difference = elbo.detach() - self.elbo(noised, noised.old)
        weight = noised.advantages - difference if self.objective == "pepg" else noised.advantages
        if self.ratio:
            weight = difference.exp() * weight
        return (-weight * elbo).to(noised.velocity.dtype)


def from_the_mean(rewards: Tensor) -> Tensor:
    """Rewards [N, G] minus their group's mean, 0 where there is no score (NaN). Float64 inside, so
    that equal rewards are exactly 0."""
    precise = without_rounding(rewards).double()
    centred = precise - precise.nanmean(-1, keepdim=True)
    return torch.where(centred.isnan(), 0, centred).to(rewards.dtype)
