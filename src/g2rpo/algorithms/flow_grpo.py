"""Flow-GRPO: Training Flow Matching Models via Online RL, arXiv 2505.05470.

Every step is stochastic, all but the last are trained, each member has its own initial noise, and a KL term keeps the policy
near the base model.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.grpo import GRPO, whole_walk
from g2rpo.algorithms.hyperparameters import STRICT, UpdateEvery
from g2rpo.algorithms.policy_gradient import Steps
from g2rpo.core.types import Plan


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FlowGRPO(GRPO):
    """Flow-GRPO; defaults for SD3.5 Medium on GenEval and OCR (10 steps, 48 prompts an update).

    `kl_denominator`: "g" is the published code's |mean - mean_base|^2 / (2 g^2), with `kl_weight` 0.04 (PickScore 0.01); "std"
    is the KL of the step, the paper's Eq. 14, with std^2 = g^2 |dsigma|, for which early code took 0.004 (PickScore 0.001);
    with `sde` "cps" it is Flow-CPS's |mean - mean_base|^2. FLUX.1-dev: `kl_weight` 0. `noisy_last_step`: the published
    samplers add noise at the last step too. On SD3's deployed grid (sampling.shift=scheduler) it is negligible, on other
    grids it is visible in the pictures.
    """

    name: Literal["flow_grpo"] = "flow_grpo"
    title: ClassVar[str] = "Flow-GRPO"
    paper: ClassVar[str] = "2505.05470"
    batch_std: bool = True
    kl_weight: NonNegativeFloat = 0.04
    kl_denominator: Literal["g", "std"] = "g"
    population_std: bool = True
    drop_zero_advantages: bool = True
    update_every: UpdateEvery = 12
    noisy_last_step: bool = True

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        return [whole_walk(num_steps, self.shared_noise, self.noisy_last_step)]

    def kl_penalty(self, kl: Tensor, steps: Steps) -> Tensor:
        return kl * steps.dsigma if self.kl_denominator == "g" and self.sde != "cps" else kl
