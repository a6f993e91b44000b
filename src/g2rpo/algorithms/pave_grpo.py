"""Pave-GRPO: Beyond Instantaneous Guidance through Principled Average Velocity Decomposition, arXiv 2606.01636.

The paper's algorithm, and where each line is implemented:

    sample and score groups as G2RPO does: noise enters at one step sigma -> sigma' at a time           g2rpo
    for every branch step, and n = 1 and each n of `segments`:
        take n - 1 Euler steps of (sigma' - sigma) / n from the branch point, with gradient             loss
        r_n = density of the drawn x' under the stochastic step from there to sigma', over itself       taken
    minimise  sum over n of w_n (-A r_n),  w_1 = 1, the others 1 / number of segments                   loss

So one sample and its reward also train the velocities between two steps of the sampler, without further rollouts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.g2rpo import BranchSteps, GranularGRPO, Granularities
from g2rpo.algorithms.hyperparameters import STRICT, Distinct
from g2rpo.core.flow import ode_step
from g2rpo.core.types import Batch, Loss, Network


@dataclass(config=STRICT, frozen=True, kw_only=True)
class PaveGRPO(GranularGRPO):
    """Pave-GRPO; defaults of the published script for FLUX.1-dev at 512x512 (16 steps, HPSv3).

    `segments` are the numbers of parts that a branch step is cut into; without any this is G2RPO. It combines with
    all options of G2RPO except `update_every=branch`: sub-steps were not sampled, so their ratio is to the current policy.
    """

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
        parts = [self._through(batch, network, velocity, n) / len(self.segments) for n in self.segments]
        return replace(whole, values=sum(parts, whole.values))

    def _through(self, batch: Batch, network: Network, velocity: Tensor, n: int) -> Tensor:
        """The loss [B] of the step in n parts, of which the last is stochastic; `velocity` is the first part's."""
        x, here, after = batch.x, batch.sigma(), batch.sigma(ahead=1)
        stride = (after - here) / n
        for _ in range(n - 1):
            x, here = ode_step(x, velocity, here, here + stride), here + stride
            velocity = network.velocity(x, here, batch.prompts)
        return self.policy_loss(self.taken(batch, self.landing(batch, x, velocity, here), here))
