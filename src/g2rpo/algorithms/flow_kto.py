"""Diffusion-KTO, for flows: learning from pictures with a mark each."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.flow_dpo import FromJudged, logged
from g2rpo.core.data import Batch, Loss
from g2rpo.core.plain import STRICT
from g2rpo.core.types import Network


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FlowKTO(FromJudged):
    """Diffusion-KTO: Aligning Diffusion Models by Optimizing Human Utility, arXiv 2404.04465, on
    velocities; defaults of its code for SD1.5.

        z = max(0, mean of the gains of an update), without gradient       group_term
        h = sigmoid(beta (gain - z)) of a good picture,
            sigmoid(-beta (gain - z)) of a bad one                         loss
        minimise  weight (1 - h)                                           loss

    A picture far from the reference point z has hardly any gradient: what is known well, and what
    may be a wrong mark. `good_weight` and `bad_weight` are the weights."""

    name: Literal["flow_kto"] = "flow_kto"
    title: ClassVar[str] = "Flow-KTO"
    paper: ClassVar[str] = "2404.04465"
    group_size: Literal[1] = 1
    beta: PositiveFloat = 1000.0
    good_weight: NonNegativeFloat = 1.0
    bad_weight: NonNegativeFloat = 1.0

    judged: ClassVar[Literal["marks"]] = "marks"
    averages_updates: ClassVar[bool] = True

    def group_term(self, batch: Batch, network: Network) -> Tensor:
        return self.gains(batch, network)[0]

    def loss(self, batch: Batch, network: Network) -> Loss:
        gains, errors = self.gains(batch, network)
        reference = batch.data["group_sum"].to(gains).clamp(min=0)
        mark = batch.advantages.to(gains)
        utility = (self.beta * mark * (gains - reference)).sigmoid()
        weight = torch.where(mark > 0, self.good_weight, self.bad_weight)
        log = logged(gains, errors, mark, mark * (gains - reference))
        log["implicit"] = gains.detach()
        return Loss((weight * (1 - utility)).to(batch.x.dtype), log)
