"""Flow-DPPO: Divergence Proximal Policy Optimization for Diffusion Models, arXiv 2606.11025.

Flow-GRPO without the clip. The kernels of a step are normals, so the divergence between the policy and the one that sampled is
known exactly, and not only at the sample that was drawn as the ratio is. A member is left out of an update where the divergence
has reached a limit and its advantage increases it; members that decrease it are kept.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.grpo import GRPO, whole_walk
from g2rpo.algorithms.hyperparameters import STRICT, UpdateEvery
from g2rpo.algorithms.policy_gradient import Steps
from g2rpo.core.types import Plan


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FlowDPPO(GRPO):
    """Flow-DPPO; defaults are Flow-GRPO's for SD3.5 Medium, without its KL term.

    `divergence_limit` bounds |mean - mean_old|^2 / (2 std^2), a mean over entries (published: 1e-5). `clip_range` has no
    effect on the loss; it only sets the log's clip_fraction and the limit of the alarm `drift`. `noisy_last_step`
    and `kl_denominator`: see `flow_grpo.FlowGRPO`.
    """

    name: Literal["flow_dppo"] = "flow_dppo"
    title: ClassVar[str] = "Flow-DPPO"
    paper: ClassVar[str] = "2606.11025"
    batch_std: bool = True
    population_std: bool = True
    drop_zero_advantages: bool = True
    update_every: UpdateEvery = 12
    kl_denominator: Literal["g", "std"] = "g"
    noisy_last_step: bool = True
    divergence_limit: PositiveFloat = 1e-5

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        return [whole_walk(num_steps, self.shared_noise, self.noisy_last_step)]

    def kl_penalty(self, kl: Tensor, steps: Steps) -> Tensor:
        return kl * steps.dsigma if self.kl_denominator == "g" else kl

    def policy_loss(self, steps: Steps) -> Tensor:
        """-A r; 0 where the limit is reached and r has moved in the direction of A."""
        ratio, advantages = self.log_ratio(steps).exp(), steps.advantages
        away = ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))
        return torch.where(away & (steps.old_kl >= self.divergence_limit), 0.0, -advantages * ratio)
