"""Granular-GRPO (G2RPO): Fine-Grained GRPO for Precise Preference Alignment in Flow Models, arXiv
2510.01982.

The paper's algorithm, and where each line is implemented (the sampling as plain loops:
tests/support/reference.py):

    for each prompt:
        solve the ODE once from shared noise: the anchor x_0, x_1, ...                          rollout.engine
        for each branch step k:                                                                 plans
            draw group_size samples x_{k+1} of ONE stochastic step from the shared x_k          kernel
            finish every sample with the ODE at every granularity, and score the images         flow.tail
            A = weighted sum of the rewards' group-normalised scores at all granularities, clamped  advantages
        ratio = p_theta(x_{k+1} | x_k) / p_old(x_{k+1} | x_k), a geometric mean per entry;
        minimise the clipped surrogate                                                          policy_loss

Noise enters at one step only (singular stochastic sampling), so differences of rewards within a
group are due to that noise alone. Each member is scored at several step sizes (multi-granularity
advantage integration), so that a direction counts as good only if it is good at every granularity.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from g2rpo.algorithms.policy_gradient import PolicyGradient, TakenSteps
from g2rpo.core.flow import TailEnd, flow_sde, sde_kernel, tail
from g2rpo.core.noise import draw_below
from g2rpo.core.objectives import RewardMix, clipped_surrogate, mix_rewards
from g2rpo.core.plain import Count, Distinct, GroupSize, hyper_parameters
from g2rpo.core.plans import Plan
from g2rpo.core.types import Kernel

BranchSteps = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1), Distinct]
Granularities = Annotated[tuple[Count, ...], Field(min_length=1)]


@hyper_parameters
class GranularGRPO(PolicyGradient):
    """G2RPO; the fields are its hyper-parameters, the defaults the paper's (16 steps, so the first
    half branches). `PolicyGradient` has the log-probs, the ratio and the KL term.

    `tail` names how a strided tail ends (`flow.tail`): "reference" as the published code does.
    `update_every` is "rollout" for the paper's objective, one averaged update of all branch steps
    (Eq. 12); the ratio is then exactly 1 and `clip_range` has no effect. "branch" is the published
    scripts' update after every branch step. `reward_mix` combines several rewards into one
    advantage (`objectives.mix_rewards`). `branch_schedule`, not the paper's, spreads the branch
    steps over iterations: "turns" takes one per iteration, in cyclic order, "random" draws it.
    """

    name: Literal["g2rpo"] = "g2rpo"
    title: ClassVar[str] = "G²RPO"
    paper: ClassVar[str] = "2510.01982"
    group_size: GroupSize = 12
    branch_steps: BranchSteps = (0, 1, 2, 3, 4, 5, 6, 7)
    granularities: Granularities = (1, 2, 3)
    eta: PositiveFloat = 0.7
    clip_range: PositiveFloat = 1e-4
    advantage_clip: PositiveFloat = 5.0
    reward_mix: RewardMix = "advantages"
    kl_weight: NonNegativeFloat = 0.0
    tail: TailEnd = "reference"
    update_every: Literal["rollout", "branch"] = "rollout"
    branch_schedule: Literal["all", "turns", "random"] = "all"

    def kernel(self, sigmas: Tensor) -> Kernel:
        return sde_kernel(flow_sde(sigmas, self.eta))

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        """One plan per branch step: noise at this step only, then a tail of every granularity."""
        if max(self.branch_steps) > num_steps - 2:
            wrong = f"branch_steps must lie in 0..{num_steps - 2} for num_steps={num_steps}, got {self.branch_steps}"
            raise ValueError(f"{wrong}: a tail needs a step")
        plans = []
        for k in self.branch_steps:
            end = self.landing_step(k)  # k + 1, but for E-GRPO, which merges steps
            tails = tuple(tail(end, num_steps, size, self.tail) for size in self.granularities)
            plans.append(Plan(k, end, tails, merged=end > k + 1, granularities=self.granularities))
        if self.branch_schedule == "all":
            return plans
        turn = (
            iteration
            if self.branch_schedule == "turns"
            else draw_below(len(plans), seed, "branch step", iteration)
        )
        return [plans[turn % len(plans)]]

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """A = clamp(sum over granularities and rewards of the group-normalised rewards) (Eq. 8,
        11)."""
        return mix_rewards(rewards, weights, self.reward_mix).clamp(
            -self.advantage_clip, self.advantage_clip
        )

    def policy_loss(self, steps: TakenSteps) -> Tensor:
        """max(-A r, -A clip(r, 1 - c, 1 + c)) (Eq. 12)."""
        return clipped_surrogate(self.log_ratio(steps), steps.advantages, self.clip_range)
