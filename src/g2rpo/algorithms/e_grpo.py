"""E-GRPO: High Entropy Steps Drive Effective Reinforcement Learning for Flow Models, arXiv 2601.00423.

G2RPO whose late branch steps are longer: one stochastic step goes from x_k over l steps of the grid,

    x_{k+l} = x_k + drift(x_k, sigma_k) (sigma_{k+l} - sigma_k) + g(sigma_k) sqrt(sigma_k - sigma_{k+l}) noise

with one velocity, so its density is a normal's; the ODE goes on from k + l. The noise of a late step of the grid is small and
its samples differ little; l is the least for which the step's entropy reaches a threshold (`merges`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.g2rpo import GranularGRPO, Granularities
from g2rpo.algorithms.hyperparameters import STRICT
from g2rpo.core.flow import flow_sde, sigma_grid
from g2rpo.core.plain import Count
from g2rpo.core.types import Batch, Plan


def merges(sigmas: Tensor, eta: float, branch_steps: Sequence[int], threshold: float = 2.2) -> tuple[int, ...]:
    """How many grid steps each branch step must merge for its entropy to reach the threshold; at least one step remains after.

    The entropy h of d independent normals of standard deviation s is d/2 log(2 pi e s^2); exp(h / d) is compared.
    """
    last, found = len(sigmas) - 2, []
    for k in branch_steps:
        spread = (
            math.sqrt(2 * math.pi * math.e) * flow_sde(sigmas, eta)(sigmas[k]) * (sigmas[k] - sigmas[k + 1 : last + 1]).sqrt()
        )
        high = (spread >= threshold).nonzero()
        found.append(int(high[0]) + 1 if len(high) else last - k)
    return tuple(found)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class EGRPO(GranularGRPO):
    """E-GRPO; defaults of the paper for FLUX.1-dev (16 steps, shift 3, threshold 2.2).

    `merged_steps` are the lengths of the branch steps in steps of the grid, in the order of `branch_steps`; the defaults are
    `merges` of the paper's grid. All options of G2RPO apply.
    """

    name: Literal["e_grpo"] = "e_grpo"  # type: ignore[assignment]
    title: ClassVar[str] = "E-GRPO"
    paper: ClassVar[str] = "2601.00423"
    granularities: Granularities = (1,)
    merged_steps: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 1, 2, 2, 2, 3, 3, 3)

    def __post_init__(self) -> None:
        if len(self.merged_steps) != len(self.branch_steps):
            raise ValueError(
                f"merged_steps needs one number for each of branch_steps={self.branch_steps}, got {self.merged_steps}"
            )

    def landing_step(self, step: int) -> int:
        return step + self.merged_steps[self.branch_steps.index(step)]

    def sigma_after(self, batch: Batch) -> Tensor:
        ends = torch.zeros(len(batch.sigmas), dtype=torch.long)  # a table, for a plan traces steps without their values
        ends[list(self.branch_steps)] = torch.tensor([self.landing_step(step) for step in self.branch_steps])
        return batch.sigmas[ends[batch.steps]].to(batch.x.device)

    def fitted(self, num_steps: int) -> dict[str, Any]:
        """The branch steps that leave a tail, and their `merges` at shift 3."""
        branch_steps = tuple(k for k in self.branch_steps if k < num_steps - 1)
        if not branch_steps or max(map(self.landing_step, self.branch_steps)) < num_steps:
            return {}
        return {"branch_steps": branch_steps, "merged_steps": merges(sigma_grid(num_steps, 3.0), self.eta, branch_steps)}

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        if right := self.fitted(num_steps):
            end = max(map(self.landing_step, self.branch_steps))
            written = " ".join(f"algorithm.{key}={[*value]}" for key, value in right.items()).replace(", ", ",")
            raise ValueError(
                f"merged_steps: a branch step ends at step {end} of num_steps={num_steps}; a tail needs a step. "
                f"e_grpo.merges gives, at shift 3: {written}"
            )
        return super().plans(num_steps, iteration, seed)
