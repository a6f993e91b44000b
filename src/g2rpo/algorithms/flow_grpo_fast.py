"""Flow-GRPO-Fast (the repository of arXiv 2505.05470): only a short window of early steps is stochastic and trained.

Its first step is drawn in every iteration. The published recipes use Flow-CPS's step in it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from g2rpo.algorithms.grpo import GRPO, SDE, window
from g2rpo.algorithms.hyperparameters import STRICT, UpdateEvery
from g2rpo.core.plain import Count
from g2rpo.core.seeding import draw_below
from g2rpo.core.types import Plan


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FlowGRPOFast(GRPO):
    """Flow-GRPO-Fast; defaults for SD3.5 Medium and FLUX.1-dev without guidance (10 and 6 steps).

    A window of `window_size` steps is drawn within steps first .. last - 1 of `window_range` = (first, last), or of the first
    half if that is None.
    """

    name: Literal["flow_grpo_fast"] = "flow_grpo_fast"
    title: ClassVar[str] = "Flow-GRPO-Fast"
    paper: ClassVar[str] = "2505.05470"
    sde: SDE = "cps"
    eta: PositiveFloat = 0.8
    clip_range: PositiveFloat = 1e-5
    batch_std: bool = True
    population_std: bool = True
    drop_zero_advantages: bool = True
    update_every: UpdateEvery = 12
    window_size: Count = 3
    window_range: tuple[int, int] | None = None

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        first, last = self.window_range or (0, num_steps // 2)
        if not (first >= 0 and 1 <= self.window_size <= last - first and last < num_steps):
            raise ValueError(f"window_size={self.window_size} does not fit into steps {first}..{last - 1} of {num_steps}")
        choices = last - first - self.window_size + 1
        start = first + draw_below(choices, seed, "window", iteration)
        return [window(start, start + self.window_size, num_steps, self.shared_noise)]
