"""DGPO: Reinforcing Diffusion Models by Direct Group Preference Optimization, arXiv 2510.08425.

The paper's algorithm, and where each line is implemented:

    sample by any solver; A = the normalised reward                                                  advantages
    at fresh times, one noise for a group:  e = |v - (noise - x0)|^2, e_base of the untrained model   forward_process
    s = sum over the group of strength A (e - e_base) / G                                             group_term
    minimise  sigmoid(s) A e,  without gradient where e has moved far enough from e_old               member_loss
    old weights <- d old + (1 - d) trained                                                            old_decay

DPO's gradient with groups instead of pairs: members with positive advantages are preferred to those with negative ones. The
weight sigmoid(s) is small for groups in which the policy has that preference already.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.forward_process import ForwardProcess, Noised, OldShare, mean_square, noised_at
from g2rpo.algorithms.hyperparameters import STRICT, GroupSize
from g2rpo.core.data import Batch, Plan
from g2rpo.core.plain import Count
from g2rpo.core.types import Network


@dataclass(config=STRICT, frozen=True, kw_only=True)
class DGPO(ForwardProcess):
    """DGPO; defaults for SD3.5 Medium on OCR (10 steps, 8 prompts an update; GenEval: `first_steps` 5, `batch_std` false,
    `old_after` 500; PickScore: `strength` 10, `clip_range` 0.05, `kl_weight` 0.001, `group_size` 24).

    `times` of the grid's first `first_steps` steps, drawn for each group, are trained on. `strength` is beta of the weight.
    `clip_range` bounds exp(e_old - e) in the direction of the advantage. The old weights sample once more than
    `old_after` updates are made. A group's weight is that before the first update of a rollout.
    """

    name: Literal["dgpo"] = "dgpo"
    title: ClassVar[str] = "DGPO"
    paper: ClassVar[str] = "2510.08425"
    group_size: GroupSize = 16
    kl_weight: NonNegativeFloat = 0.02
    shared_noise: bool = True
    old_flat: NonNegativeInt = 1
    old_most: OldShare = 0.3
    old_after: NonNegativeInt = 200
    times: Count = 4
    first_steps: Count = 7
    strength: NonNegativeFloat = 100.0
    clip_range: PositiveFloat = 0.01
    update_every: Literal["rollout"] = "rollout"

    def __post_init__(self) -> None:
        if self.times > self.first_steps:
            raise ValueError(f"times must be at most first_steps={self.first_steps}, got {self.times}")

    @property
    def uses_base(self) -> bool:
        return True

    def samples_old(self, updates: int) -> bool:
        return updates > self.old_after

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        if self.first_steps > num_steps:
            raise ValueError(f"first_steps must be at most num_steps={num_steps}, got {self.first_steps}")
        return super().plans(num_steps, iteration, seed)

    def draw_steps(self, num_steps: int, generator: torch.Generator) -> Tensor:
        """Different ones of the first steps, the same for all members."""
        drawn = torch.randperm(self.first_steps, generator=generator)[: self.times]
        return drawn[:, None].expand(-1, self.group_size)

    def group_term(self, batch: Batch, network: Network) -> Tensor:
        noise, at = noised_at(batch)
        target = noise - batch.x
        base, new = (mean_square(of(*at).float() - target) for of in (network.base_velocity, network.velocity))
        return self.strength * batch.advantages * (new - base) / self.group_size

    def member_loss(self, noised: Noised) -> Tensor:
        target, advantages = noised.noise - noised.image, noised.advantages
        assert noised.old is not None and noised.group_sum is not None
        error = mean_square(noised.velocity - target)
        ratio = (mean_square(noised.old - target) - error.detach()).exp()
        # the error has moved far enough in the direction of the advantage: no gradient beyond
        far = torch.where(advantages > 0, ratio > 1 + self.clip_range, ratio < 1 - self.clip_range)
        return noised.group_sum.sigmoid() * advantages * torch.where(far, error.detach(), error)
