"""Variants of G2RPO: Pave-GRPO, E-GRPO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from g2rpo.algorithms.g2rpo import BranchSteps, GranularGRPO, Granularities
from g2rpo.core.data import Batch, Loss
from g2rpo.core.flow import flow_sde, ode_step, sigma_grid
from g2rpo.core.plain import Count, Distinct, hyper_parameters
from g2rpo.core.plans import Plan
from g2rpo.core.types import Network


@hyper_parameters
class PaveGRPO(GranularGRPO):
    """Pave-GRPO: Beyond Instantaneous Guidance through Principled Average Velocity Decomposition,
    arXiv 2606.01636; defaults of the published script for FLUX.1-dev at 512x512 (16 steps, HPSv3).

        sample and score groups as G2RPO does: noise enters at one step sigma -> sigma' at a time     g2rpo
        for every branch step, and n = 1 and each n of `segments`:
            take n - 1 Euler steps of (sigma' - sigma) / n from the branch point, with gradient       loss
            r_n = density of the drawn x' under the stochastic step from there to sigma', over itself taken
        minimise  sum over n of w_n (-A r_n),  w_1 = 1, the others 1 / number of segments             loss

    So one sample and its reward also train the velocities between two steps of the sampler, without
    further rollouts. `segments` are the numbers of parts that a branch step is cut into; without
    any this is G2RPO. It combines with all options of G2RPO except `update_every=branch`: sub-steps
    were not sampled, so their ratio is to the current policy."""

    name: Literal["pave_grpo"] = "pave_grpo"  # type: ignore[assignment]
    title: ClassVar[str] = "Pave-GRPO"
    paper: ClassVar[str] = "2606.01636"
    branch_steps: BranchSteps = (0, 2, 4, 6)
    granularities: Granularities = (1,)
    eta: PositiveFloat = 0.8
    segments: Annotated[tuple[Annotated[int, Field(ge=2)], ...], Distinct] = (2, 3)
    update_every: Literal["rollout"] = "rollout"

    def loss(self, batch: Batch, network: Network) -> Loss:
        sigma = batch.sigma()
        base = network.base_velocity(batch.x, sigma, batch.prompts) if self.uses_base else None
        velocity = network.velocity(batch.x, sigma, batch.prompts)
        whole = self.loss_of(batch, velocity, base)
        parts = [
            self._through(batch, network, velocity, n) / len(self.segments) for n in self.segments
        ]
        return replace(whole, values=sum(parts, whole.values))

    def _through(self, batch: Batch, network: Network, velocity: Tensor, n: int) -> Tensor:
        """The loss [B] of the step in n parts, of which the last is stochastic; `velocity` is the
        first part's."""
        x, here, after = batch.x, batch.sigma(), batch.sigma(ahead=1)
        stride = (after - here) / n
        for _ in range(n - 1):
            x, here = ode_step(x, velocity, here, here + stride), here + stride
            velocity = network.velocity(x, here, batch.prompts)
        return self.policy_loss(self.taken(batch, self.landing(batch, x, velocity, here), here))


def merges(
    sigmas: Tensor, eta: float, branch_steps: Sequence[int], threshold: float = 2.2
) -> tuple[int, ...]:
    """How many grid steps each branch step must merge for its entropy to reach the threshold; at
    least one step remains after.

    The entropy h of d independent normals of standard deviation s is d/2 log(2 pi e s^2); exp(h /
    d) is compared."""
    last, found = len(sigmas) - 2, []
    for k in branch_steps:
        spread = (
            math.sqrt(2 * math.pi * math.e)
            * flow_sde(sigmas, eta)(sigmas[k])
            * (sigmas[k] - sigmas[k + 1 : last + 1]).sqrt()
        )
        high = (spread >= threshold).nonzero()
        found.append(int(high[0]) + 1 if len(high) else last - k)
    return tuple(found)


@hyper_parameters
class EGRPO(GranularGRPO):
    """E-GRPO: High Entropy Steps Drive Effective Reinforcement Learning for Flow Models, arXiv
    2601.00423; defaults of the paper for FLUX.1-dev (16 steps, shift 3, threshold 2.2).

    G2RPO whose late branch steps are longer: one stochastic step goes from x_k over l steps of the
    grid,

        x_{k+l} = x_k + drift(x_k, sigma_k) (sigma_{k+l} - sigma_k) + g(sigma_k) sqrt(sigma_k -
        sigma_{k+l}) noise

    with one velocity, so its density is a normal's; the ODE goes on from k + l. The noise of a late
    step of the grid is small and its samples differ little; l is the least for which the step's
    entropy reaches a threshold (`merges`). `merged_steps` are the lengths of the branch steps in
    steps of the grid, in the order of `branch_steps`; the defaults are `merges` of the paper's
    grid. All options of G2RPO apply.

    The variance of images of std 0.6 is 6 to 15 % too large after the merged steps, where plain ones
    would make it 1 to 3 %, and 7 and 9 % after the first two, which are plain (`pytest
    tests/published/test_e_grpo.py -k variance`)."""

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
        # a table, for a plan traces steps without their values
        ends = torch.zeros(len(batch.sigmas), dtype=torch.long)
        ends[list(self.branch_steps)] = torch.tensor(
            [self.landing_step(step) for step in self.branch_steps]
        )
        return batch.sigmas[ends[batch.steps]].to(batch.x.device)

    def fitted(self, num_steps: int) -> dict[str, Any]:
        """The branch steps that leave a tail, and their `merges` at shift 3."""
        branch_steps = tuple(k for k in self.branch_steps if k < num_steps - 1)
        if not branch_steps or max(map(self.landing_step, self.branch_steps)) < num_steps:
            return {}
        return {
            "branch_steps": branch_steps,
            "merged_steps": merges(sigma_grid(num_steps, 3.0), self.eta, branch_steps),
        }

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        if right := self.fitted(num_steps):
            end = max(map(self.landing_step, self.branch_steps))
            written = " ".join(
                f"algorithm.{key}={[*value]}" for key, value in right.items()
            ).replace(", ", ",")
            raise ValueError(
                f"merged_steps: a branch step ends at step {end} of num_steps={num_steps}; a tail needs a step. "
                f"algorithms.g2rpo_variants.merges gives, at shift 3: {written}"
            )
        return super().plans(num_steps, iteration, seed)
