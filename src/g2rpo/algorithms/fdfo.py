"""FDFO: Finite Difference Flow Optimization for RL Post-Training of Text-to-Image Models, arXiv 2603.12893.

The paper's algorithm, and where each line is implemented:

    sample two pictures whose initial noises and steps differ a little: a pair                   plans, kernel
    A = half the difference of their rewards; d = half that of their final latents               advantages, examples
    at every step of both, with d divided by its mean square:
        log r = |d|^2 - |v - (v_old - d)|^2,  means over entries                                 loss
        minimise  -A r + |A| / (2 clip_range) (r - 1)^2                                          loss

The whole sampling is one action: every velocity on the way is pulled towards the better picture. A d, now a finite difference
of the reward, is on average its gradient. No log-prob of a step is needed.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.forward_process import mean_square
from g2rpo.algorithms.hyperparameters import STRICT, GroupSize, UpdateEvery
from g2rpo.core.data import Batch, Example, Loss, Plan, Rollout, per_row
from g2rpo.core.flow import cps_kernel
from g2rpo.core.objectives import weighted
from g2rpo.core.types import Algorithm, Draw, Kernel, Network

TINY = 1e-6
"""From the published code: added to the mean of d^2, by which d is divided."""


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FDFO(Algorithm):
    """FDFO; defaults for SD3.5 Medium (40 steps without guidance, 432 pairs a rollout and 4 updates of it).

    `churn` is the noise that is added before the first step and in each but the last: a latent keeps 1 / (1 + churn) of its
    noise, the rest is drawn anew (`flow.cps_kernel`). In groups of more than a pair, not published, differences are to the
    group's mean. `update_every` may be a share of a rollout's latents, which a pair's steps are dealt out to at random.
    """

    name: Literal["fdfo"] = "fdfo"
    title: ClassVar[str] = "FDFO"
    paper: ClassVar[str] = "2603.12893"
    group_size: GroupSize = 2
    churn: PositiveFloat = 0.0025
    clip_range: PositiveFloat = 0.03
    kl_weight: NonNegativeFloat = 0.0
    update_every: UpdateEvery | Annotated[float, Field(gt=0, lt=1)] = 0.25

    @property
    def uses_base(self) -> bool:
        return self.kl_weight > 0

    @property
    def kept(self) -> float:
        return 1 / (1 + self.churn)

    def kernel(self, sigmas: Tensor) -> Kernel:
        return cps_kernel(2 / math.pi * math.acos(self.kept))

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        """Every step is stochastic; the last has no noise, for its kernel ends at sigma = 0."""
        return [Plan(0, num_steps, ((num_steps,),), shared_noise=False, common=self.kept)]

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of rewards less the group's mean, in the rewards' own units; 0 without a score."""
        total = weighted(rewards.double(), weights).sum((1, 2))
        return (total - total.nanmean(1, keepdim=True)).nan_to_num().to(rewards.dtype)

    def examples(self, rollout: Rollout, advantages: Tensor, draw: Draw) -> list[Example]:
        difference = rollout.finals[0] - rollout.finals[0].mean(0)
        shuffled = sorted(rollout.transitions, key=lambda t: draw("order", t.step).initial_seed())
        return [
            Example(rollout.prompt, t.step, t.x, advantages, {"difference": difference, "old_mean": t.old_mean})
            for t in shuffled
        ]

    def loss(self, batch: Batch, network: Network) -> Loss:
        at = batch.x, batch.sigma(), batch.prompts
        base = network.base_velocity(*at).float() if self.uses_base else None
        velocity, d = network.velocity(*at).float(), batch.data["difference"]
        d = d / (per_row(mean_square(d), d) + TINY)
        old = velocity.detach() if batch.first else self.old_velocity(batch)
        ratio = (mean_square(d) - mean_square(velocity - old + d)).exp()
        values = -batch.advantages * ratio + batch.advantages.abs() / (2 * self.clip_range) * (ratio - 1).square()
        log = {"clip_fraction": ((ratio - 1).abs() > self.clip_range).float()}
        if base is not None:
            log["kl"] = mean_square(velocity - base)
            values = values + self.kl_weight * log["kl"]
        return Loss(values, log)

    def old_velocity(self, batch: Batch) -> Tensor:
        """The velocity of the rollout, from the mean of its step: (1 - s') (x - s v) + s' kept (x + (1 - s) v)."""
        x, mean = batch.x, batch.data["old_mean"]
        s, after = per_row(batch.sigma(), x), per_row(batch.sigma(ahead=1), x)
        noise = after * self.kept
        return ((1 - after + noise) * x - mean) / ((1 - after) * s - noise * (1 - s))
