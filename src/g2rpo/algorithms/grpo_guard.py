"""GRPO-Guard (arXiv 2510.22319): Flow-GRPO with a ratio that is normalised step by step.

For x' sampled by the old policy, log p_theta(x') - log p_old(x') is normal with mean -b and a variance that both depend on the
step, b = |mean_theta - mean_old|^2 / (2 std^2). So ratios lie below 1 and the upper clip is rarely active. Guard adds b and
multiplies by std; then it divides the loss by |dsigma|, to equalise the steps' gradients.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.grpo import GRPO, whole_walk
from g2rpo.algorithms.hyperparameters import STRICT, UpdateEvery
from g2rpo.algorithms.policy_gradient import Steps
from g2rpo.core.types import Plan


@dataclass(config=STRICT, frozen=True, kw_only=True)
class GRPOGuard(GRPO):
    """GRPO-Guard; defaults for SD3.5 Medium (10 steps, 48 prompts an update). The clip range is that of the normalised ratio.
    `noisy_last_step`: see `flow_grpo.FlowGRPO`. `correction`: "member" adds each member's own b back, as in the paper (Eq. 8);
    "batch" the mean of b over the members of a training pass at the same step, as the published code does. Only with "batch"
    does an update depend on `trainer.micro_batch_size`.
    """

    name: Literal["grpo_guard"] = "grpo_guard"
    title: ClassVar[str] = "GRPO-Guard"
    paper: ClassVar[str] = "2510.22319"
    sde: Literal["flow", "dance"] = "flow"  # cps has no density
    clip_range: PositiveFloat = 2e-6
    population_std: bool = True
    drop_zero_advantages: bool = True
    update_every: UpdateEvery = 12
    noisy_last_step: bool = True
    correction: Literal["member", "batch"] = "member"

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        return [whole_walk(num_steps, self.shared_noise, self.noisy_last_step)]

    def log_ratio(self, steps: Steps) -> Tensor:
        bias = steps.old_kl if self.correction == "member" else mean_of_each_step(steps.old_kl, steps.step)
        return steps.std * (super().log_ratio(steps) + bias)

    def policy_loss(self, steps: Steps) -> Tensor:
        return super().policy_loss(steps) / steps.dsigma


def mean_of_each_step(values: Tensor, step: Tensor) -> Tensor:
    """For each entry of values [B] the mean over all entries of its step; step [B]."""
    same = (step[:, None] == step).to(values)
    return same @ values / same.sum(1)
