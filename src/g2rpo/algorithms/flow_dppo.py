"""Flow-DPPO: Divergence Proximal Policy Optimization for Diffusion Models, arXiv 2606.11025.

Flow-GRPO without the clip. The kernels of a step are normals, so the divergence between the policy and the one that sampled is
known exactly, and not only at the sample that was drawn as the ratio is. A member is left out of an update where the divergence
has reached a limit and its advantage increases it; members that decrease it are kept.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.flow_grpo import FlowGRPO
from g2rpo.algorithms.hyperparameters import STRICT
from g2rpo.algorithms.policy_gradient import Steps


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FlowDPPO(FlowGRPO):
    """Flow-DPPO; defaults are Flow-GRPO's for SD3.5 Medium, without its KL term.

    `divergence_limit` bounds |mean - mean_old|^2 / (2 std^2), a mean over entries (published: 1e-5). `clip_range` has no
    effect on the loss; it only sets the log's clip_fraction and the limit of the alarm `drift`.
    """

    name: Literal["flow_dppo"] = "flow_dppo"  # type: ignore[assignment]
    title: ClassVar[str] = "Flow-DPPO"
    paper: ClassVar[str] = "2606.11025"
    kl_weight: NonNegativeFloat = 0.0
    divergence_limit: PositiveFloat = 1e-5

    def policy_loss(self, steps: Steps) -> Tensor:
        """-A r; 0 where the limit is reached and r has moved in the direction of A."""
        ratio, advantages = self.log_ratio(steps).exp(), steps.advantages
        away = ((ratio > 1) & (advantages > 0)) | ((ratio < 1) & (advantages < 0))
        return torch.where(away & (steps.old_kl >= self.divergence_limit), 0.0, -advantages * ratio)
