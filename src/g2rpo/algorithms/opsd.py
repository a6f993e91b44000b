"""DiffusionOPSD: the policy learns images that the reward's gradient has moved a little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms import forward_process as forward
from g2rpo.core.data import Batch, Example, Loss
from g2rpo.core.errors import UserError
from g2rpo.core.normal import per_row
from g2rpo.core.plain import STRICT, Count
from g2rpo.core.plans import Plan, Rollout
from g2rpo.core.types import Draw, Network

SMALLEST_NORM = 1e-12
"""From the published code: added to the norm of a gradient, by which it is divided."""


@dataclass(config=STRICT, frozen=True, kw_only=True)
class OPSD(forward.ForwardProcess):
    """DiffusionOPSD: On-Policy Self-Distillation in Diffusion Models, code worldbench/DiffusionOPSD
    (its paper is not out); defaults for SD3.5 Medium (10 steps of DPM-Solver++(2M) without guidance,
    48 prompts an update; Z-Image-Turbo: `query_sigma` 0.273, `group_size` 12).

        sample with the old weights, by any solver; keep the latent z nearest to query_sigma    samples_old, plans
        the image that the old weights predict there:  y = z - sigma v_old                      loss
        y+ and y-: target_steps steps from y, each of length radius norm(y) / target_steps,
        up and down the reward's gradient                                                       targets
        v+ = (1 - b) v_old + b v     v- = (1 + b) v_old - b v,  as in DiffusionNFT              implicit_pair
        minimise  c (r E(x0(v+) - y+) + (1 - r) E(x0(v-) - y-)) + kl_weight |v - v_base|^2,
        x0(v) = z - sigma v,  E(d) = |d|^2 / mean |d|,  c = advantage_clip                      loss
        old weights <- d old + (1 - d) trained                                                  old_decay

    Both terms move the policy up the reward's gradient; r in [0, 1], from the normalised reward of
    the picture, says how much each counts. The gradient goes through decoder and rewards, which
    have to be differentiable (`types.Reward`), not through the network. `mixing` is b (published:
    1; for several rewards 0.1)."""

    name: Literal["opsd"] = "opsd"
    title: ClassVar[str] = "DiffusionOPSD"
    query_sigma: Annotated[float, Field(gt=0, lt=1)] = 0.278
    radius: PositiveFloat = 0.1
    target_steps: Count = 2
    mixing: PositiveFloat = 1.0
    update_every: Literal["rollout"] | Count = "rollout"

    uses_rewards: ClassVar[bool] = True

    def samples_old(self, updates: int) -> bool:
        return True

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        walk = tuple(range(num_steps + 1))
        return [Plan(0, 0, (walk,), shared_noise=False, kept_sigma=self.query_sigma)]

    def examples(self, rollout: Rollout, advantages: Tensor, draw: Draw) -> list[Example]:
        assert rollout.kept is not None
        return [Example(rollout.prompt, *rollout.kept, advantages)]

    def loss(self, batch: Batch, network: Network) -> Loss:
        x, sigma, clip = batch.x, batch.sigma(), self.advantage_clip
        at = x, sigma, batch.prompts
        base = network.base_velocity(*at).float() if self.uses_base else None
        old = network.old_velocity(*at).float()
        image = x - per_row(sigma, x) * old
        up, down, reward = self.targets(image, lambda y: network.reward(y, batch.prompts))
        velocity = network.velocity(*at).float()
        better, worse = forward.implicit_pair(x, sigma, velocity, old, self.mixing)
        positive, negative = forward.scaled_error(better - up), forward.scaled_error(worse - down)
        r = (batch.advantages / clip / 2 + 0.5).clamp(0, 1)
        values = clip * (r * positive + (1 - r) * negative)
        log = {"predicted_reward": reward, "old_distance": forward.mean_square(velocity - old)}
        if base is not None:
            log["kl"] = forward.mean_square(velocity - base)
            values = values + self.kl_weight * log["kl"]
        return Loss(values, log)

    def targets(
        self, image: Tensor, reward: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """y+ and y- [B, ...] of images [B, ...], without gradient, and the images' rewards [B]."""
        length = self.radius * image.flatten(1).norm(dim=1) / self.target_steps
        first, scores = direction(image, reward)

        def walked(step: Tensor) -> Tensor:
            y = image + step * first
            for _ in range(self.target_steps - 1):
                y = y + step * direction(y, reward)[0]
            return y

        return walked(per_row(length, image)), walked(-per_row(length, image)), scores


def direction(y: Tensor, reward: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The unit vector [B, ...] along the reward's gradient at y, and the reward [B]; 0 and NaN
    without a score."""
    y = y.detach().requires_grad_()
    scores = reward(y)
    if not scores.requires_grad:
        raise UserError("rewards: their scores carry no gradient, although they are differentiable")
    (gradient,) = torch.autograd.grad(scores.sum(), y)
    scored = scores.detach().isfinite() & gradient.flatten(1).sum(1).isfinite()
    unit = gradient / per_row(gradient.flatten(1).norm(dim=1) + SMALLEST_NORM, y)
    return torch.where(per_row(scored, y) > 0, unit, 0), torch.where(
        scored, scores.detach(), torch.nan
    )
