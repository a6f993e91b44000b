"""Self-OPD: a regression of a step's mean onto samples, by what they gain over the ODE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn.functional import normalize

from g2rpo.algorithms.policy_gradient import PolicyGradient, TakenSteps
from g2rpo.core.data import Batch, Example, Loss
from g2rpo.core.flow import flow_sde, sde_kernel
from g2rpo.core.noise import generator_for
from g2rpo.core.objectives import weighted
from g2rpo.core.plain import Count, GroupSize, hyper_parameters
from g2rpo.core.plans import Plan, Rollout
from g2rpo.core.statistics import group_std
from g2rpo.core.types import Draw, Kernel

StepWeights = Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)]
SMALLEST_STD, SMALLEST_SCALE = 1e-4, 1e-6
"""From the published code: lower bounds of the std of rewards, and of a step's 2 std^2."""


@hyper_parameters
class SelfOPD(PolicyGradient):
    """Self-OPD: On-Policy Distillation for Flow Matching Models without Teacher, arXiv 2608.26872;
    defaults for SD3.5 Medium on OCR (10 steps, guidance 4.5).

        draw two steps of the ODE's trajectory, early ones more often                       plans
        at each x, draw samples x' of one stochastic step, and finish them by the ODE
        R = the weighted sum of their rewards, R_ode that of the ODE's own picture          Plan.baseline
        A = (R - R_ode) / std of R in the group; advantages() is given R - R_ode            scoring.compared
        d = the direction of x' from the step's mean, d_best that of the highest A
        w = A, or A (1 - cos(d, d_best)) / 2 where A < 0; clamped to +-weight_clip          branch_weights
        minimise  w |mean_theta - x'|^2 / max(2 std^2, 1e-6)                                policy_loss

    So the mean is pulled towards samples that are better than the ODE's picture, and pushed away
    from worse ones, least in the direction of the best. There is no ratio and no clip; with one
    update per rollout, where G2RPO's ratio is 1, the gradient is G2RPO's with w in A's place.

    `step_weights` are how often steps 0, 1, ... are drawn. [1, 0, 1] with `steps_drawn` 2 trains on
    the samples of G2RPO with branch_steps [0, 2], granularity 1 and this group size."""

    name: Literal["self_opd"] = "self_opd"
    title: ClassVar[str] = "Self-OPD"
    paper: ClassVar[str] = "2608.26872"
    group_size: GroupSize = 8
    step_weights: StepWeights = (10, 9, 8, 7, 6, 4, 2, 1, 0)
    steps_drawn: Count = 2
    eta: PositiveFloat = 0.7
    update_every: Literal["rollout", "branch"] = "rollout"
    weight_clip: ClassVar[float] = 1.0
    clip_range: ClassVar[float] = 1e-4  # type: ignore[misc]
    """Not in the loss: of the log's clip_fraction and the alarm `drift`."""
    kl_weight: ClassVar[float] = 0.0  # type: ignore[misc]

    def kernel(self, sigmas: Tensor) -> Kernel:
        return sde_kernel(flow_sde(sigmas, self.eta))

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        """One plan per drawn step, in order. Weights of steps that leave no tail do not count."""
        often = torch.tensor(self.step_weights[: num_steps - 1], dtype=torch.float32)
        if (possible := int((often > 0).sum())) < self.steps_drawn:
            raise ValueError(
                f"steps_drawn must be at most {possible}, the steps before the last of num_steps="
                f"{num_steps} with a weight in step_weights, got {self.steps_drawn}"
            )
        own = generator_for(seed, "self-opd steps", iteration)
        drawn = often.multinomial(self.steps_drawn, generator=own).sort().values
        tails = [tuple(range(step + 1, num_steps + 1)) for step in drawn.tolist()]
        return [Plan(tail[0] - 1, tail[0], (tail,), baseline=True) for tail in tails]

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """(R - R_ode) / std of `rewards` less the ODE's; 0 where fewer than two have a score."""
        gains = weighted(rewards.double(), weights).sum((1, 2))
        std = group_std(gains).clamp(min=SMALLEST_STD)
        return (gains / std[:, None]).nan_to_num(0).to(rewards.dtype)

    def branch_weights(self, advantages: Tensor, x_next: Tensor, mean: Tensor) -> Tensor:
        """The weights w [G] of samples x_next [G, ...] of a step with this mean [1, ...]; one that
        is not finite, whose advantage is 0, is not the best."""
        directions = normalize((x_next - mean).flatten(1), dim=1)
        whole = directions.isfinite().all(1).to(advantages.device)
        best = advantages.where(whole, -math.inf).argmax()
        cosines = (directions @ directions[best]).to(advantages)
        attenuated = torch.where(advantages < 0, advantages * (1 - cosines) / 2, advantages)
        return attenuated.clamp(-self.weight_clip, self.weight_clip)

    def examples(self, rollout: Rollout, advantages: Tensor, draw: Draw) -> list[Example]:
        """With w in the place of advantages."""
        (taken,) = rollout.transitions
        w = self.branch_weights(advantages, taken.x_next, taken.old_mean)
        return super().examples(rollout, w, draw)

    def policy_loss(self, steps: TakenSteps) -> Tensor:
        """|mean - x'|^2 / (2 std^2) is minus the log-prob but for a normal's constants."""
        scale = 2 * steps.std.square()
        error = -steps.log_prob - 0.5 * (math.pi * scale).log()
        return steps.advantages * error * scale / scale.clamp(min=SMALLEST_SCALE)

    def loss_of(self, batch: Batch, velocity: Tensor, base: Tensor | None) -> Loss:
        loss = super().loss_of(batch, velocity, base)
        return replace(loss, log={**loss.log, "weight": batch.advantages})

    def metrics(self, log: Mapping[str, Tensor]) -> dict[str, float]:
        own = {"pulled": (log["weight"] > 0).float(), "weight_size": log["weight"].abs()}
        return {**super().metrics(log), **{name: float(own[name].mean()) for name in own}}
