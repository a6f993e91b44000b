"""A policy gradient through smaller steps: Euler sub-steps with gradient lead up to the point where
noise enters.

The stochastic step from sigma to sigma' is split in two: an ODE step to the middle, whose velocity
carries the gradient too, and the kernel from there, judged on the sample that was drawn. In the
manner of Pave-GRPO (arXiv 2606.01636), much reduced.
"""

from dataclasses import dataclass

from torch import Tensor

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.data import Batch, Loss
from g2rpo.core.flow import ode_step
from g2rpo.core.objectives import clipped_surrogate
from g2rpo.core.types import Network


@dataclass(frozen=True)
class SubSteps(GranularGRPO):
    """G2RPO with a loss over a finer walk; `share` of the step is walked before noise enters, 0 <
    share < 1."""

    name: str = "substeps"  # type: ignore[assignment]
    share: float = 0.5

    def loss(self, batch: Batch, network: Network) -> Loss:
        sigma, after = (batch.sigmas[batch.steps + ahead].to(batch.x.device) for ahead in (0, 1))
        middle = sigma + self.share * (after - sigma)
        x = ode_step(
            batch.x, network.velocity(batch.x, sigma, batch.prompts).float(), sigma, middle
        )
        landing = self.kernel(batch.sigmas)(
            x, network.velocity(x, middle, batch.prompts), middle, after
        )
        log_prob = self.log_density(
            landing.mean[batch.row_of], landing.std[batch.row_of], batch.data["x_next"]
        )
        # the walk of the rollout was another: only its sample is kept
        log_ratio = log_prob - log_prob.detach()
        values = clipped_surrogate(log_ratio, batch.advantages, self.clip_range)
        return Loss(values, {"log_ratio": log_ratio, "drift": log_ratio.abs()})

    def log_density(self, mean: Tensor, std: Tensor, x: Tensor) -> Tensor:
        scaled = (x - mean).flatten(1) / std[:, None]
        return -0.5 * scaled.square().mean(1) - std.log()
