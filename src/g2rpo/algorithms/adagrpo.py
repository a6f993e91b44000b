"""AdaGRPO: A Capability-Aware Adaptive Enhancement for Flow-based GRPO, arXiv 2606.06828.

The paper's algorithm, and where each line is implemented:

    draw several prompts, solve the ODE of each, score the pictures R                            training.collector
    m, v = moving averages of the mean and the variance of R                                     Level.choose
    take the prompt whose R is nearest m, and sample and score its groups as G2RPO does          Level.choose, g2rpo
    z = (r - m) / sqrt(v) of the group's rewards, its positive part scaled to add up to 1
        and its negative part to -1                                                              balanced
    A = the advantage within the group + z                                                       advantages

So the policy trains on prompts of average difficulty for it, and an advantage includes a comparison with all its prompts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.g2rpo import BranchSteps, GranularGRPO, Granularities
from g2rpo.algorithms.hyperparameters import STRICT

SMALLEST_VARIANCE, SMALLEST_SUM = 1e-8, 1e-6
"""From the published code: lower bounds of a variance, and of the sum of z-scores of one sign, below which the sign is
missing."""


Known = Annotated[float, Field(allow_inf_nan=True)]
"""NaN: of a reward that has had no score."""


@dataclass(config=STRICT, frozen=True, kw_only=True)
class AdaGRPO(GranularGRPO):
    """AdaGRPO; defaults of the published script for FLUX.1-dev at 512x512 (16 steps, HPSv3).

    Of `candidates` prompts one is chosen for each place of an iteration; `forget` is the weight of the old value in the
    moving averages. `level` is (mean, std) of the ODE pictures' scores by each reward; the run fills it in, and without it an
    advantage is the group's alone. With several rewards the nearest prompt is the one with the least weighted sum of
    |R - mean| / std, and z is summed as G2RPO's advantages are.
    """

    name: Literal["adagrpo"] = "adagrpo"  # type: ignore[assignment]
    title: ClassVar[str] = "AdaGRPO"
    paper: ClassVar[str] = "2606.06828"
    branch_steps: BranchSteps = (0, 2, 4, 6)
    granularities: Granularities = (1,)
    candidates: Annotated[int, Field(ge=2)] = 10
    forget: Annotated[float, Field(ge=0, lt=1)] = 0.8
    level: tuple[tuple[Known, Known], ...] = ()

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        within = super().advantages(rewards, weights)
        if not self.level:
            return within
        mean, std = torch.tensor(self.level, dtype=torch.float64).T[:, :, None, None]
        z = balanced((rewards.double() - mean) / (std + 1e-8)).to(rewards.dtype)
        across = (weights[:, None, None] * z).sum((1, 2))
        return within + across.clamp(-self.advantage_clip, self.advantage_clip)

    def memory(self) -> Level:
        return Level(self)


def balanced(z: Tensor) -> Tensor:
    """z [..., G] of a group with its positive entries scaled to add up to 1 and its negative ones to -1.

    Where a sign is missing, z less its mean. NaN means "no score": such a member gets 0 and does not count.
    """
    known = ~z.isnan()
    z = torch.where(known, z, 0)
    up, down = z.clamp(min=0), z.clamp(max=0)
    more, less = up.sum(-1, keepdim=True), -down.sum(-1, keepdim=True)
    scaled = up / more.clamp(min=SMALLEST_SUM) + down / less.clamp(min=SMALLEST_SUM)
    centred = z - z.sum(-1, keepdim=True) / known.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(known, torch.where(torch.minimum(more, less) < SMALLEST_SUM, centred, scaled), 0)


@dataclasses.dataclass
class Level:
    """Moving averages of the mean and the variance of the ODE pictures' scores, by reward."""

    algorithm: AdaGRPO
    state: dict[str, Any] = field(default_factory=dict)

    def at(self, iteration: int) -> AdaGRPO:
        stds = (math.sqrt(max(variance, SMALLEST_VARIANCE)) for variance in self.state.get("variance", ()))
        return replace(self.algorithm, level=tuple(zip(self.state.get("mean", ()), stds, strict=True)))

    def choose(self, iteration: int, rewards: Tensor, weights: Tensor) -> list[int]:
        """Updates the averages by rewards [P, candidates, R], then chooses the candidate nearest to them; NaN is farthest."""
        for name, new in zip(("mean", "variance"), _moments(rewards.double().flatten(0, 1)), strict=True):
            known, now = (torch.tensor(values, dtype=torch.float64) for values in (self.state.get(name, new), new))
            moved = self.algorithm.forget * known + (1 - self.algorithm.forget) * now
            # a reward without scores keeps its averages, which are NaN until its first ones
            self.state[name] = torch.where(known.isnan(), now, torch.where(now.isnan(), known, moved)).tolist()
        mean, std = torch.tensor(self.at(iteration).level, dtype=torch.float64).T
        counts = (weights != 0) & ~mean.isnan()
        away = torch.where(counts, weights.abs() * (rewards.double() - mean).abs() / std, 0)
        return away.sum(-1).nan_to_num(nan=math.inf).argmin(1).tolist()

    def observe(self, iteration: int, steps: Sequence[int], rewards: Tensor, weights: Tensor) -> dict[str, float]:
        level = [(r, own) for r, own in enumerate(self.at(iteration).level) if not math.isnan(own[0])]
        return {f"level/{r}/{name}": value for r, own in level for name, value in zip(("mean", "std"), own, strict=True)}


def _moments(scores: Tensor) -> tuple[list[float], list[float]]:
    """Mean and population variance of scores [N, R] by reward; NaN where a reward has no score at all."""
    mean = scores.nanmean(0)
    return mean.tolist(), (scores - mean).square().nanmean(0).tolist()
