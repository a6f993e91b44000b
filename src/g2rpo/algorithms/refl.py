"""ReFL: reward feedback learning, ImageReward, arXiv 2304.05977.

The paper's algorithm, and where each line is implemented:

    draw one of the last steps, and solve the ODE up to it, without gradient       plans
    predict the image from there in one jump, x0 = x - sigma v, with gradient      loss
    minimise  scale * relu(ceiling - r(decode(x0))) by the reward's own gradient   loss, Network.reward

The rewards have to be differentiable (`types.Reward`). No step is stochastic and members are not compared: the pictures
of the rollout are scored for the log, and to leave out those without a score.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.hyperparameters import STRICT
from g2rpo.core.data import Batch, Example, Loss, Normal, Plan, Rollout, per_row
from g2rpo.core.flow import ode_step
from g2rpo.core.plain import Count
from g2rpo.core.seeding import draw_below
from g2rpo.core.types import Algorithm, Draw, Kernel, Network


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ReFL(Algorithm):
    """ReFL; defaults of FlowBP's code (arXiv 2606.11075) for FLUX.1-dev and SD3.5 Medium with HPSv2.1 (25 steps). ImageReward's
    own, for Stable Diffusion 1.4 (40 steps): `last_steps` 10, `ceiling` 2, `scale` 1e-3.

    The step with gradient is one of the `last_steps`, drawn for each iteration. `ceiling` is the weighted sum of scores
    above which the loss is 0. `group_size` pictures of each prompt are trained on.
    """

    name: Literal["refl"] = "refl"
    title: ClassVar[str] = "ReFL"
    paper: ClassVar[str] = "2304.05977"
    group_size: Annotated[int, Field(ge=1, le=10_000)] = 4
    last_steps: Count = 11
    ceiling: float = 0.55
    scale: PositiveFloat = 1.0

    @property
    def uses_rewards(self) -> bool:
        return True

    @property
    def drop_zero_advantages(self) -> bool:
        return True

    def kernel(self, sigmas: Tensor) -> Kernel:
        return lambda x, v, sigma, sigma_next: Dirac(ode_step(x, v, sigma, sigma_next), torch.zeros((), device=x.device))

    def fitted(self, num_steps: int) -> dict[str, int]:
        """The published share of the steps, 11 of 25."""
        return {"last_steps": max(1, 11 * num_steps // 25)} if self.last_steps > num_steps else {}

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        if self.last_steps > num_steps:
            raise ValueError(f"last_steps must be at most num_steps={num_steps}, got {self.last_steps}")
        step = num_steps - 1 - draw_below(self.last_steps, seed, "refl", iteration)
        return [Plan(step, step + 1, (tuple(range(step + 1, num_steps + 1)),), shared_noise=False)]

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """1 for a member with all scores that count, else 0."""
        return (~rewards.isnan() | (weights == 0)[:, None, None]).all(2).all(1).float()

    def examples(self, rollout: Rollout, advantages: Tensor, draw: Draw) -> list[Example]:
        return [Example(rollout.prompt, t.step, t.x, advantages) for t in rollout.transitions]

    def loss(self, batch: Batch, network: Network) -> Loss:
        sigma, scored = batch.sigma(), batch.advantages > 0
        image = batch.x - per_row(sigma, batch.x) * network.velocity(batch.x, sigma, batch.prompts).float()
        image = torch.where(per_row(scored, image) > 0, image, image.detach())
        reward = network.reward(image, batch.prompts)
        scored = scored & reward.isfinite()
        values = self.scale * torch.relu(self.ceiling - reward)
        return Loss(torch.where(scored, values, 0), {"predicted_reward": torch.where(scored, reward.detach(), 0)})


class Dirac(Normal):
    """A step of the ODE: no noise; log-probs are unused and 0."""

    def log_prob(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), device=x.device)
