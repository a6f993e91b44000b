"""DanceGRPO: Unleashing GRPO on Visual Generation, arXiv 2505.07818.

All members of a group start from one noise, every step but the last is stochastic with a constant diffusion coefficient, and a
random part of the steps is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from g2rpo.algorithms.grpo import GRPO, SDE, window
from g2rpo.objectives import RewardMix
from g2rpo.seeding import generator_for
from g2rpo.types import Plan, UpdateEvery


@dataclass(frozen=True, kw_only=True)
class DanceGRPO(GRPO):
    """DanceGRPO; defaults for FLUX.1-dev (16 steps, 16 GPUs).

    `trained_fraction` of the stochastic steps, drawn in every iteration, is trained.
    """

    name: Literal["dancegrpo"] = "dancegrpo"
    title: ClassVar[str] = "DanceGRPO"
    paper: ClassVar[str] = "2505.07818"
    group_size: int = 12
    sde: SDE = "dance"
    eta: float = 0.3
    shared_noise: bool = True
    reward_mix: RewardMix = "advantages"
    update_every: UpdateEvery = 4
    trained_fraction: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.trained_fraction <= 1:
            raise ValueError(f"trained_fraction must lie in (0, 1], got {self.trained_fraction}")

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        noisy = num_steps - 1
        shuffled = torch.randperm(noisy, generator=generator_for(seed, "trained steps", iteration)).tolist()
        trained = sorted(shuffled[: max(1, int(noisy * self.trained_fraction))])
        return [window(0, noisy, num_steps, self.shared_noise, tuple(trained), self.antithetic)]
