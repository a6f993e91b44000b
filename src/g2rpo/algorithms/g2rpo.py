"""Granular-GRPO (G2RPO): Fine-Grained GRPO for Precise Preference Alignment in Flow Models, arXiv 2510.01982.

The paper's box, and where each line lives:

    for each prompt:
        walk the ODE once from shared noise: the anchor x_0, x_1, ...                           rollout.engine
        for each branch step k:                                                                 plans
            draw group_size samples x_{k+1} of ONE stochastic step from the shared x_k          flow.sde_step
            finish every sample with the ODE at every granularity, and score the images         flow.tail
            A = sum over granularities and rewards of the group-normalised rewards, clamped     advantages
        ratio = p_theta(x_{k+1} | x_k) / p_old(x_{k+1} | x_k); minimise the clipped surrogate   policy_gradient, policy_loss

Noise enters at one step only (singular stochastic sampling), so differences of rewards within a group are due to that noise
alone. Each member is scored at several step sizes (multi-granularity advantage integration), so that a direction counts as good
only if it is good at every granularity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from g2rpo.algorithms.allocation import Allocator, Auto
from g2rpo.algorithms.policy_gradient import PolicyGradient, Steps
from g2rpo.data import check_pairs
from g2rpo.flow import TailEnd, flow_sde, sde_kernel, tail
from g2rpo.objectives import RewardMix, clipped_surrogate, mix_rewards
from g2rpo.seeding import draw_below
from g2rpo.types import Kernel, Plan

StepWeight = Literal["none", "noise", "even"]
BranchSchedule = Literal["all", "turns", "random"]


@dataclass(frozen=True, kw_only=True)
class GranularGRPO(PolicyGradient):
    """G2RPO; the fields are its hyper-parameters, the defaults the paper's (16 steps, so the first half branches).

    `tail` names how a strided tail ends (`flow.tail`). `update_every` is "rollout" for the paper's objective, one averaged
    update of all branch steps (Eq. 12), or "branch" for the published scripts' update after every branch step. `reward_mix`
    combines several rewards into one advantage (`objectives.mix_rewards`).

    Not the paper's: a granularity may be a list with one for each branch step; `granularities="auto"` chooses one for each step
    as the run goes (`allocation`), within the evaluations of the finest candidate with `group_size` members, which are the
    plans of `plans`. `granularity_weights` weight the granularities' advantages. `step_weight` weights the branch steps
    (`weight_of`). `branch_schedule` spreads the branch steps over iterations: "turns" takes one per iteration, in cyclic order,
    "random" draws it. `antithetic` draws members in pairs, with noise e and -e (docs/algorithm.md says when it helps).
    """

    name: Literal["g2rpo"] = "g2rpo"
    title: ClassVar[str] = "G²RPO"
    paper: ClassVar[str] = "2510.01982"
    group_size: int = 12
    branch_steps: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    granularities: tuple[int | tuple[int, ...], ...] | Literal["auto"] = (1, 2, 3)
    granularity_weights: tuple[float, ...] | None = None
    auto: Auto = field(default_factory=Auto)
    eta: float = 0.7
    clip_range: float = 1e-4
    advantage_clip: float = 5.0
    reward_mix: RewardMix = "advantages"
    kl_weight: float = 0.0
    tail: TailEnd = "reference"
    update_every: Literal["rollout", "branch"] = "rollout"
    step_weight: StepWeight = "none"
    branch_schedule: BranchSchedule = "all"
    antithetic: bool = False

    def __post_init__(self) -> None:
        grains = self.auto.candidates if self.granularities == "auto" else self.granularities
        each = [own if isinstance(own, tuple) else (own,) * len(self.branch_steps) for own in grains]
        for wrong, message in (
            (
                self.group_size < 2,
                f"group_size must be at least 2 (a group of one has no advantage), got {self.group_size}",
            ),
            (not self.branch_steps, "branch_steps is empty: noise must enter somewhere"),
            (len(set(self.branch_steps)) < len(self.branch_steps), f"branch_steps repeats a step: {self.branch_steps}"),
            (any(step < 0 for step in self.branch_steps), f"branch_steps must be >= 0, got {self.branch_steps}"),
            (not grains, "granularities is empty: [1] finishes every sample with the full sampler"),
            (any(g < 1 for own in each for g in own), f"granularities must be >= 1, got {self.granularities}"),
            (
                any(len(own) != len(self.branch_steps) for own in each),
                f"a granularity that is a list must have one for each branch step, got {self.granularities}",
            ),
            (
                self.granularities == "auto" and self.granularity_weights is not None,
                "granularities=auto finishes a member once: granularity_weights have nothing to weigh",
            ),
            (
                self.granularities == "auto" and self.branch_schedule != "all",
                "granularities=auto measures all branch steps in one iteration: it needs branch_schedule=all",
            ),
            (
                self.granularity_weights is not None and len(self.granularity_weights) != len(self.granularities),
                f"granularity_weights must be one for each granularity, got {self.granularity_weights}",
            ),
            (not self.eta > 0, f"eta must be positive (without noise there is nothing to learn from), got {self.eta}"),
            (not self.clip_range > 0, f"clip_range must be positive, got {self.clip_range}"),
            (not self.kl_weight >= 0, f"kl_weight must not be negative, got {self.kl_weight}"),
            (not self.advantage_clip > 0, f"advantage_clip must be positive, got {self.advantage_clip}"),
        ):
            if wrong:
                raise ValueError(message)
        if self.antithetic:
            check_pairs(group_size=self.group_size)

    def kernel(self, sigmas: Tensor) -> Kernel:
        return sde_kernel(flow_sde(sigmas, self.eta))

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        if max(self.branch_steps) > num_steps - 2:
            wrong = f"branch_steps must lie in 0..{num_steps - 2} for num_steps={num_steps}, got {self.branch_steps}"
            raise ValueError(f"{wrong}: a tail needs a step")
        return [self._branch(step, num_steps) for step in self.steps_of(iteration, seed)]

    def _branch(self, step: int, num_steps: int) -> Plan:
        """Noise at `step` alone, and a tail of every granularity behind it."""
        grains = self.granularities_at(step)
        tails = tuple(tail(step + 1, num_steps, grain, self.tail) for grain in grains)
        return Plan(step, step + 1, tails, granularities=grains, antithetic=self.antithetic)

    def steps_of(self, iteration: int, seed: int) -> tuple[int, ...]:
        """The branch steps that an iteration takes."""
        if self.branch_schedule == "all":
            return self.branch_steps
        if self.branch_schedule == "turns":
            return (self.branch_steps[iteration % len(self.branch_steps)],)
        return (self.branch_steps[draw_below(len(self.branch_steps), seed, "branch step", iteration)],)

    def granularities_at(self, step: int) -> tuple[int, ...]:
        """The granularities of the tails after branch step `step`."""
        if self.granularities == "auto":
            return self.auto.candidates[:1]
        place = self.branch_steps.index(step)
        return tuple(own[place] if isinstance(own, tuple) else own for own in self.granularities)

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """A = clamp(sum over granularities and rewards of the group-normalised rewards) (Eq. 8, 11)."""
        mixed = mix_rewards(rewards, weights, self.reward_mix, grains=self.granularity_weights)
        return mixed.clamp(-self.advantage_clip, self.advantage_clip)

    def policy_loss(self, steps: Steps) -> Tensor:
        """max(-A r, -A clip(r, 1 - c, 1 + c)) (Eq. 12), times the step's weight."""
        return self.weight_of(steps) * clipped_surrogate(self.log_ratio(steps), steps.advantages, self.clip_range)

    def weight_of(self, steps: Steps) -> Tensor | float:
        """The weight of a branch step in the loss: 1, the std of its noise (TempFlow-GRPO, arXiv 2508.04324), or that over
        |dsigma|.

        d log p / d velocity is proportional to |dsigma| / std, which grows towards the image: four-fold and more over the first
        half of a shifted grid. So without a weight the last branch step dominates the update; "noise" leaves the factor
        |dsigma|, and "even" gives every step's velocity an equal weight (as GRPO-Guard does, arXiv 2510.22319).
        """
        if self.step_weight == "none":
            return 1.0
        return steps.std if self.step_weight == "noise" else steps.std / steps.dsigma

    def memory(self, num_steps: int, evaluations: Callable[[Sequence[Plan], int], int]) -> Allocator | None:
        """The measurements of `granularities="auto"`; None otherwise."""
        return Allocator(self, num_steps, evaluations) if self.granularities == "auto" else None
