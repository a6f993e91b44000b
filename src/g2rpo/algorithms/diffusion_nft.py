"""DiffusionNFT: Online Diffusion Reinforcement with Forward Process, arXiv 2509.16117.

The paper's algorithm, and where each line is implemented:

    sample with the old weights, by any solver; r in [0, 1] from the normalised reward                samples_old, member_loss
    at fresh noise and time, v and v_old:   v+ = (1 - b) v_old + b v      v- = (1 + b) v_old - b v    forward_process
    minimise  r |x0(v+) - x0|^2 + (1 - r) |x0(v-) - x0|^2,  x0(v) = x - sigma v                       member_loss
    old weights <- d old + (1 - d) trained                                                            old_decay

A picture that is better than its group attracts v+, one that is worse attracts v-, the mirror image of v+ on the other side of
the old velocity.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.forward_process import ForwardProcess, Noised, mean_square
from g2rpo.algorithms.hyperparameters import STRICT
from g2rpo.core.data import Plan, per_row
from g2rpo.core.plain import Count

SMALLEST_WEIGHT = 1e-5
"""From the published code: the lower bound of an image's mean error, by which its squared error is divided."""


@dataclass(config=STRICT, frozen=True, kw_only=True)
class DiffusionNFT(ForwardProcess):
    """DiffusionNFT; defaults for SD3.5 Medium (10 steps of DPM-Solver++(2M) without guidance, 48 prompts an update).

    `share` of the grid's sigmas, rounded down, is trained on for each member. `mixing` is b: how far beyond the old velocity
    the positive one reaches (published: 1; for OCR and several rewards 0.1). `update_every` is "rollout" or a number of
    members, after each of which the weights move. The published schedules of the old weights: `old_most=0.5` (GenEval and the
    like), or `old_flat=75 old_rise=0.0075 old_most=0.999` (OCR).
    """

    name: Literal["diffusion_nft"] = "diffusion_nft"
    title: ClassVar[str] = "DiffusionNFT"
    paper: ClassVar[str] = "2509.16117"
    share: Annotated[float, Field(gt=0, le=1)] = 0.99
    mixing: PositiveFloat = 1.0
    kl_weight: NonNegativeFloat = 1e-4
    update_every: Literal["rollout"] | Count = "rollout"

    def samples_old(self, updates: int) -> bool:
        return True

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        if int(num_steps * self.share) < 1:
            raise ValueError(f"share={self.share} of num_steps={num_steps} is no time at all")
        return super().plans(num_steps, iteration, seed)

    def draw_steps(self, num_steps: int, generator: torch.Generator) -> Tensor:
        """Distinct ones for each member, from all of the grid's steps."""
        ranked = torch.rand(num_steps, self.group_size, generator=generator).argsort(0)
        return ranked[: int(num_steps * self.share)]

    def member_loss(self, noised: Noised) -> Tensor:
        clip, b = self.advantage_clip, self.mixing
        assert noised.old is not None
        r = (noised.advantages / clip / 2 + 0.5).clamp(0, 1)
        positive = self._error(noised, b * noised.velocity + (1 - b) * noised.old)
        negative = self._error(noised, (1 + b) * noised.old - b * noised.velocity)
        return clip * (r * positive + (1 - r) * negative) / b

    def _error(self, noised: Noised, velocity: Tensor) -> Tensor:
        """Squared error [B] of the image predicted by a velocity, divided by its mean error, so that all times weigh alike."""
        error = noised.x - per_row(noised.sigma, noised.x) * velocity - noised.image
        size = error.detach().double().abs().flatten(1).mean(1).clamp(min=SMALLEST_WEIGHT)
        return (mean_square(error) / size).to(error.dtype)
