"""State across iterations: rewards are measured against a moving average of those before, and not
only within their group."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from g2rpo.algorithms.g2rpo import GranularGRPO


@dataclass(frozen=True)
class Baseline(GranularGRPO):
    """G2RPO, and `weight` times how far a group's mean lies above the moving average, which forgets
    with `decay`."""

    name: str = "baseline"  # type: ignore[assignment]
    weight: float = 0.5
    decay: float = 0.8
    average: float = 0.0

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        above = (rewards.nanmean((1, 2)).nanmean(-1) - self.average)[:, None].nan_to_num()
        return (super().advantages(rewards, weights) + self.weight * above).clamp(
            -self.advantage_clip, self.advantage_clip
        )

    def memory(self) -> "Average":
        return Average(self)


@dataclass
class Average:
    """The moving average of the rewards, which a checkpoint keeps."""

    algorithm: Baseline
    state: dict[str, Any] = field(default_factory=dict)

    def at(self, iteration: int) -> Baseline:
        return replace(self.algorithm, average=self.state.get("average", 0.0))

    def observe(
        self, iteration: int, steps: Sequence[int], rewards: Tensor, weights: Tensor
    ) -> dict[str, float]:
        mean, decay = float(rewards.nanmean()), self.algorithm.decay
        self.state["average"] = decay * self.state.get("average", mean) + (1 - decay) * mean
        return {"baseline/average": self.state["average"]}
