"""An algorithm of your own: LC-GRPO, the deployed sampler's step, then one Langevin step in place.

g2rpo train scenes algorithm.name=examples/algorithms/lc_grpo.py:LCGRPO algorithm.group_size=12
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from g2rpo.algorithms.flow_grpo import FlowGRPO
from g2rpo.core.data import Batch, Loss
from g2rpo.core.flow import ode_step
from g2rpo.core.noise import Normal, per_row, precise
from g2rpo.core.plain import hyper_parameters
from g2rpo.core.plans import Plan
from g2rpo.core.types import Kernel, Network


def langevin_kernel(eta: float) -> Kernel:
    """One Langevin step at sigma_next, from x there: mean x + eps score, std sqrt(2 eps) = eta
    sigma_next.

    It keeps the distribution whose score it follows, up to eps^2; the score is the velocity's,
    -(x + (1 - sigma_next) v) / sigma_next. sigma_next > 0."""

    def kernel(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Normal:
        x, velocity, std = precise(x), precise(velocity), eta * sigma_next
        s = per_row(sigma_next, x)
        score = -(x + (1 - s) * velocity) / s
        return Normal(x + per_row(std**2 / 2, x) * score, std)

    return kernel


@hyper_parameters
class LCGRPO(FlowGRPO):
    """LC-GRPO: Bridging Train-Inference Gap for Flow-Based GRPO with Langevin Correction, arXiv
    2608.05600. The formulas are the paper's as a detailed summary gives them; no code was found.

        x' = x + (sigma' - sigma) v(x, sigma), as the deployed sampler              Plan.corrected
        p_theta(x_next | x) = N(x' + eps score(x', sigma'), 2 eps),
            sqrt(2 eps) = eta sigma', score(x', sigma') = -(x' + (1 - sigma') v(x', sigma')) / sigma'
            with v without classifier-free guidance                                 langevin_kernel
        the last step is the ODE's                                                  plans
        advantages, ratio, clip and KL of Flow-GRPO; gradients of both velocities   loss

    So a rollout is the deployed sampler with noise that its score corrects, while Flow-GRPO's SDE
    is another sampler, with errors of its own. A step takes two evaluations, in the rollout and
    in the loss.

    The summary has 10 steps for SD3.5 Medium, and no eta, clip range, group size or KL weight. All
    defaults are Flow-GRPO's: of `eta`, in units of another noise, and of the KL term, the KL of the
    two steps times |sigma' - sigma|."""

    noisy_last_step: ClassVar[bool] = False

    def kernel(self, sigmas: Tensor) -> Kernel:
        return langevin_kernel(self.eta)

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        return [replace(plan, corrected=True) for plan in super().plans(num_steps, iteration, seed)]

    def loss(self, batch: Batch, network: Network) -> Loss:
        base = self.corrected(batch, network, network.base_velocity) if self.uses_base else None
        return self.loss_between(batch, self.corrected(batch, network, network.velocity), base)

    def corrected(
        self,
        batch: Batch,
        network: Network,
        velocity: Callable[[Tensor, Tensor, Sequence[int]], Tensor],
    ) -> Normal:
        """The distribution of the batch's steps under one of the network's velocities."""
        sigma, after = batch.sigma(), self.sigma_after(batch)
        x = ode_step(batch.x, velocity(batch.x, sigma, batch.prompts), sigma, after)
        with network.unguided():
            return self.landing(batch, x, velocity(x, after, batch.prompts), sigma)

    def drift_limit(
        self, sigmas: Tensor, steps: Sequence[int], entries: int, rounding: float
    ) -> float:
        """With the first velocity's share: it moves a mean by |sigma' - sigma|, the second by
        eps (1 - sigma') / sigma'."""
        limits = []
        for step in steps:
            after = sigmas[step + 1]
            share = 1 + 2 * (sigmas[step] - after) / (self.eta**2 * after * (1 - after))
            limits.append(super().drift_limit(sigmas, [step], entries, rounding * float(share)))
        return max(limits)
