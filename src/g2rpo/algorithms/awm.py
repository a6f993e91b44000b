"""AWM: Advantage Weighted Matching, Aligning RL with Pretraining in Diffusion Models, arXiv 2509.25050.

The paper's algorithm, and where each line is implemented:

    sample by any solver; A = the normalised reward                                                   advantages
    at fresh noise and time:  log p := -w(sigma) error(v - (noise - x0))                              member_loss
    minimise  -A exp(log p - its own value) + kl |v - v_base|^2 + old |v - v_old|^2                   member_loss
    old weights <- d old + (1 - d) trained                                                            old_decay

It is flow matching's own loss, weighted by advantages: what pretraining minimises for all images is minimised for good ones and
maximised for bad ones.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.forward_process import ForwardProcess, Noised, OldShare, mean_square
from g2rpo.algorithms.hyperparameters import STRICT
from g2rpo.core.data import Plan
from g2rpo.core.plain import Count

TINY = 1e-10
"""From the published code: added to an error before it is raised to a power below 1."""


@dataclass(config=STRICT, frozen=True, kw_only=True)
class AWM(ForwardProcess):
    """AWM; defaults for SD3.5 Medium on OCR (14 steps without guidance, 72 prompts an update; GenEval: `kl_weight`
    0.001; PickScore: `kl_weight` 1e-4, 24 prompts).

    `times` of the grid's sigmas are trained on, one from each of as many even parts of its first nine tenths without pure
    noise. `power` p makes the error sigma (mean |.|^2)^p / p (published: 0.25; 1 is the plain squared error). `old_weight`
    penalises the distance to the old weights, which follow the policy closely. The weights move once a rollout, as in the
    published configs, so the ratio is 1 and their clip never acts: there is none here.
    """

    name: Literal["awm"] = "awm"
    title: ClassVar[str] = "AWM"
    paper: ClassVar[str] = "2509.25050"
    kl_weight: NonNegativeFloat = 0.003
    old_weight: NonNegativeFloat = 1.0
    old_most: OldShare = 0.3
    power: Annotated[float, Field(gt=0, le=1)] = 0.25
    times: Count = 6
    update_every: Literal["rollout"] = "rollout"

    @property
    def uses_old(self) -> bool:
        return self.old_weight > 0

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        if self.times > (most := int(0.9 * num_steps) - 1):
            raise ValueError(f"times must be at most {most} for num_steps={num_steps}, got {self.times}")
        return super().plans(num_steps, iteration, seed)

    def draw_steps(self, num_steps: int, generator: torch.Generator) -> Tensor:
        """One from each of `times` even parts of steps 1 .. 0.9 num_steps - 1, the same for all members."""
        edges = torch.linspace(1, int(0.9 * num_steps), self.times + 1).long()
        drawn = edges[:-1] + (torch.rand(self.times, generator=generator) * (edges[1:] - edges[:-1])).long()
        return drawn[:, None].expand(-1, self.group_size)

    def member_loss(self, noised: Noised) -> Tensor:
        error = mean_square(noised.velocity.double() - (noised.noise - noised.image).double())
        log_prob = -((error + TINY) ** self.power - TINY**self.power) / self.power * noised.sigma
        policy = -noised.advantages / self.advantage_clip * (log_prob - log_prob.detach()).exp()
        if noised.old is not None:
            policy = policy + self.old_weight * mean_square(noised.velocity - noised.old)
        return policy.to(noised.velocity.dtype)
