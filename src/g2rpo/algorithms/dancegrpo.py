"""DanceGRPO: Unleashing GRPO on Visual Generation, arXiv 2505.07818.

All members of a group start from one noise, every step but the last is stochastic with a constant diffusion coefficient, and a
random part of the steps is trained.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass

from g2rpo.algorithms.grpo import GRPO, SDE, window
from g2rpo.algorithms.hyperparameters import STRICT, GroupSize, UpdateEvery
from g2rpo.core.objectives import RewardMix
from g2rpo.core.seeding import generator_for
from g2rpo.core.types import Plan


@dataclass(config=STRICT, frozen=True, kw_only=True)
class DanceGRPO(GRPO):
    """DanceGRPO; defaults for FLUX.1-dev (16 steps, 16 GPUs).

    `trained_fraction` of the stochastic steps, drawn in every iteration, is trained.
    """

    name: Literal["dancegrpo"] = "dancegrpo"
    title: ClassVar[str] = "DanceGRPO"
    paper: ClassVar[str] = "2505.07818"
    group_size: GroupSize = 12
    sde: SDE = "dance"
    eta: PositiveFloat = 0.3
    shared_noise: bool = True
    reward_mix: RewardMix = "advantages"
    update_every: UpdateEvery = 4
    trained_fraction: Annotated[float, Field(gt=0, le=1)] = 0.6

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        noisy = num_steps - 1
        shuffled = torch.randperm(noisy, generator=generator_for(seed, "trained steps", iteration)).tolist()
        trained = sorted(shuffled[: max(1, int(noisy * self.trained_fraction))])
        return [window(0, noisy, num_steps, self.shared_noise, tuple(trained))]
