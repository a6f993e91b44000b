"""TempFlow-GRPO: When Timing Matters for GRPO in Flow Models, arXiv 2508.04324.

Like G2RPO it branches off the ODE by one stochastic step at a time, here at every step but the last, with granularity 1. It
adds a weight for each step, proportional to its noise.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.grpo import GRPO, window
from g2rpo.algorithms.hyperparameters import STRICT, GroupSize, UpdateEvery
from g2rpo.algorithms.policy_gradient import Steps
from g2rpo.core.types import Plan


@dataclass(config=STRICT, frozen=True, kw_only=True)
class TempFlowGRPO(GRPO):
    """TempFlow-GRPO; defaults for SD3.5 Medium (10 steps). FLUX.1-dev: `eta` 0.9 and `noise_weight` 1.73.

    `noise_weight` is one over the mean noise of the trained steps, so that steps weigh 1 on average: 2.25 for SD3.5's grid
    and eta 0.7, 1.73 for FLUX.1-dev's at 1024x1024 and eta 0.9. With another, KL is stronger or weaker against the reward.
    The published runs take four initial noises of each prompt, each with a group of six of its own. Here a prompt has one
    initial noise an iteration: four times the prompts are as many groups.
    """

    name: Literal["tempflow_grpo"] = "tempflow_grpo"
    title: ClassVar[str] = "TempFlow-GRPO"
    paper: ClassVar[str] = "2508.04324"
    group_size: GroupSize = 6
    shared_noise: bool = True
    kl_weight: NonNegativeFloat = 0.004
    noise_weight: PositiveFloat = 2.25
    population_std: bool = True
    drop_zero_advantages: bool = True
    update_every: UpdateEvery = 3

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        return [window(step, step + 1, num_steps, self.shared_noise) for step in range(num_steps - 1)]

    def policy_loss(self, steps: Steps) -> Tensor:
        return self.noise_weight * steps.std * super().policy_loss(steps)
