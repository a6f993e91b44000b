"""The common part of Flow-GRPO and its descendants; each file has the differences.

for each prompt:
    sample group_size members; in a window of steps by an SDE, elsewhere by the ODE   kernel, plans
    score the images; A = the group-normalised reward, the same for all steps of a member   advantages
    ratio = p_theta(x_next | x) / p_old(x_next | x); minimise the clipped surrogate         policy_gradient, policy_loss
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.hyperparameters import STRICT, GroupSize, UpdateEvery
from g2rpo.algorithms.policy_gradient import PolicyGradient, Steps
from g2rpo.core.flow import cps_kernel, dance_sde, flow_sde, sde_kernel
from g2rpo.core.objectives import RewardMix, clipped_surrogate, mix_rewards
from g2rpo.core.types import Kernel, Plan

SDE = Literal["flow", "dance", "cps"]


def window(start: int, stop: int, num_steps: int, shared_noise: bool, trained: tuple[int, ...] | None = None) -> Plan:
    """A plan with stochastic steps start .. stop - 1 and the ODE before and after."""
    tails = (tuple(range(stop, num_steps + 1)),)
    return Plan(start, stop, tails, shared_noise=shared_noise, trained=trained)


def whole_walk(num_steps: int, shared_noise: bool, noisy_last_step: bool) -> Plan:
    """Every step but the last is stochastic and trained. With `noisy_last_step` the last is stochastic as well, else the ODE's;
    its noise stays in the image, and its density is too narrow to train on."""
    last = num_steps - 1
    if noisy_last_step:
        return window(0, num_steps, num_steps, shared_noise, tuple(range(last)))
    return window(0, last, num_steps, shared_noise)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    """The fields are hyper-parameters.

    `sde` is the stochastic step (`flow.flow_sde`, `dance_sde`, `cps_kernel`), `eta` its noise level. `shared_noise` starts a
    group from one initial noise. `batch_std`, `population_std` and `reward_mix`: see `objectives.mix_rewards`.
    `drop_zero_advantages` leaves members without any advantage out of an update's mean, so that the KL term is not strengthened
    by groups of equal rewards. `update_every` is "rollout" for one averaged update, "branch" for one after every step index, or
    a number of members: the group is split into parts of that size, with an update after each. With one update per rollout the
    clip is never active.
    """

    name: str = ""
    group_size: GroupSize = 24
    sde: SDE = "flow"
    eta: PositiveFloat = 0.7
    shared_noise: bool = False
    clip_range: PositiveFloat = 1e-4
    advantage_clip: PositiveFloat = 5.0
    batch_std: bool = False
    population_std: bool = False
    reward_mix: RewardMix = "rewards"
    kl_weight: NonNegativeFloat = 0.0
    drop_zero_advantages: bool = False
    update_every: UpdateEvery = "rollout"

    def __post_init__(self) -> None:
        if self.sde == "cps" and self.eta >= 1:
            raise ValueError(f"eta must be below 1 with sde=cps (at 1 a step keeps nothing of its latent), got {self.eta}")

    def kernel(self, sigmas: Tensor) -> Kernel:
        if self.sde == "cps":
            return cps_kernel(self.eta)
        return sde_kernel(flow_sde(sigmas, self.eta) if self.sde == "flow" else dance_sde(self.eta))

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        mixed = mix_rewards(rewards, weights, self.reward_mix, self.batch_std, population_std=self.population_std)
        return mixed.clamp(-self.advantage_clip, self.advantage_clip)

    def policy_loss(self, steps: Steps) -> Tensor:
        return clipped_surrogate(self.log_ratio(steps), steps.advantages, self.clip_range)
