"""MixGRPO: Unlocking Flow-based GRPO Efficiency with Mixed ODE-SDE, arXiv 2507.21802.

Only a window of steps is stochastic and trained, and it moves from the noise towards the image during training.
MixGRPO-Flash finishes members with few steps of a second-order solver, because steps after the window are not trained.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.grpo import GRPO, window
from g2rpo.algorithms.hyperparameters import STRICT, GroupSize, UpdateEvery
from g2rpo.core.objectives import RewardMix
from g2rpo.core.plain import Count
from g2rpo.core.seeding import draw_below
from g2rpo.core.types import Plan

Schedule = Literal["progressive", "random", "decay", "exp_decay", "frozen"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class MixGRPO(GRPO):
    """MixGRPO; defaults for FLUX.1-dev (25 steps, 300 iterations).

    The window of `window_size` steps stays for `window_iterations`, then moves on by `stride` ("progressive"). "decay" shortens
    the stay linearly from 10 to 1; "exp_decay" by exp(-(start - 13) / 10) from step 13 on; "random" draws its first step in
    every iteration; "frozen" never moves it. At the end it is truncated, and then restarts. As in the published code, the last
    two steps are never stochastic.
    """

    name: Literal["mixgrpo"] = "mixgrpo"
    title: ClassVar[str] = "MixGRPO"
    paper: ClassVar[str] = "2507.21802"
    group_size: GroupSize = 12
    shared_noise: bool = True
    reward_mix: RewardMix = "advantages"
    update_every: UpdateEvery = 3
    window_size: Count = 4
    schedule: Schedule = "progressive"
    window_iterations: Count = 25
    stride: Count = 1

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        start = self.window_start(num_steps, iteration, seed)
        return [window(start, min(start + self.window_size, num_steps - 2), num_steps, self.shared_noise)]

    def window_start(self, num_steps: int, iteration: int, seed: int = 0) -> int:
        """The window's first step in an iteration, counted from 0; always below num_steps - 2."""
        end = num_steps - 2
        if end < 1:
            raise ValueError(f"the last two steps are never stochastic: num_steps must be at least 3, got {num_steps}")
        if self.schedule == "frozen":
            return 0
        if self.schedule == "random":
            return draw_below(max(1, end - self.window_size + 1), seed, "window", iteration)
        start = 0
        while iteration >= (stay := self._stay(start, end)):
            iteration -= stay
            start += self.stride
            if start >= end:
                start = 0
        return start

    def _stay(self, start: int, end: int) -> int:
        """The number of iterations with the window at `start`."""
        if self.schedule == "decay":
            gone = start / end
            return max(1, int(10 * (1 - gone) + gone))
        if self.schedule == "exp_decay":
            return math.ceil(self.window_iterations * math.exp(-0.1 * max(0, start - 13)))
        return self.window_iterations

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """With weights of rewards divided by their sum, as in the published code."""
        total = weights.abs().sum()
        return super().advantages(rewards, weights / total if total > 0 else weights)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class MixGRPOFlash(MixGRPO):
    """MixGRPO-Flash: fewer steps after the window, with DPM-Solver++(2M).

    Of the n = num_steps - (last stochastic step) points after the window, int(n * compression) remain, evenly spread and
    rounded to the sigma grid, at least the two ends. The published Flash* is schedule=frozen with compression=0.2.
    """

    name: Literal["mixgrpo_flash"] = "mixgrpo_flash"  # type: ignore[assignment]
    title: ClassVar[str] = "MixGRPO-Flash"
    paper: ClassVar[str] = "2507.21802"
    window_iterations: Count = 20
    compression: Annotated[float, Field(gt=0, le=1)] = 0.4

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        (plan,) = super().plans(num_steps, iteration, seed)
        way = num_steps - plan.merge
        jumps = max(int((way + 1) * self.compression), 2) - 1
        tail = tuple(plan.merge + round(way * jump / jumps) for jump in range(jumps + 1))
        return [dataclasses.replace(plan, tails=(tail,), solver="dpmpp2m")]
