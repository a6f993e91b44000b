"""Flow-CPS: Coefficients-Preserving Sampling for Reinforcement Learning with Flow Matching, arXiv 2509.05952.

Flow-GRPO with another stochastic step (`flow.cps_kernel`): it removes as much predicted noise as it adds, so the noise in the
latents matches their sigma, and the images that rewards score have no residual noise.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from g2rpo.algorithms.grpo import GRPO, SDE, window
from g2rpo.algorithms.hyperparameters import STRICT, UpdateEvery
from g2rpo.core.types import Plan


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FlowCPS(GRPO):
    """Flow-CPS at every step but the last, where it is the ODE; defaults for SD3.5 Medium on GenEval and OCR (10 steps).

    Its log-prob is a squared distance: log-ratios are 2 std^2 times those of a density, so `clip_range` has another scale, and
    so has `kl_weight`, which multiplies |mean - mean_base|^2. PickScore: `kl_weight` 0.01. FLUX.1-dev: 0 and `eta` 0.9.
    """

    name: Literal["flow_cps"] = "flow_cps"
    title: ClassVar[str] = "Flow-CPS"
    paper: ClassVar[str] = "2509.05952"
    sde: SDE = "cps"
    batch_std: bool = True
    kl_weight: NonNegativeFloat = 0.04
    population_std: bool = True
    drop_zero_advantages: bool = True
    update_every: UpdateEvery = 12

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        return [window(0, num_steps - 1, num_steps, self.shared_noise)]
