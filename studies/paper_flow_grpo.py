"""Flow-GRPO as its paper has it, where the published code differs:
`algorithm.name=studies/paper_flow_grpo.py:PaperFlowGRPO`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.flow_grpo import FlowGRPO
from g2rpo.algorithms.policy_gradient import TakenSteps
from g2rpo.core.plain import STRICT


@dataclass(config=STRICT, frozen=True, kw_only=True)
class PaperFlowGRPO(FlowGRPO):
    """The KL term is Eq. 14, all members count, and the last step is the ODE's."""

    kl_weight: NonNegativeFloat = 0.004

    population_std: ClassVar[bool] = False
    drop_zero_advantages: ClassVar[bool] = False
    noisy_last_step: ClassVar[bool] = False

    def kl_penalty(self, kl: Tensor, steps: TakenSteps) -> Tensor:
        return kl
