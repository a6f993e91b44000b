"""Algorithms that follow the gradient of the reward: ReFL its own, FDFO a finite difference, and
DiffusionOPSD learns images that it has moved a little."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from g2rpo.algorithms import forward_process as forward
from g2rpo.algorithms.forward_process import mean_square
from g2rpo.core.data import Batch, Example, Loss
from g2rpo.core.errors import UserError
from g2rpo.core.flow import cps_kernel, ode_step
from g2rpo.core.noise import Normal, draw_below, per_row
from g2rpo.core.objectives import weighted
from g2rpo.core.plain import Count, GroupSize, UpdateEverySetting, hyper_parameters
from g2rpo.core.plans import Plan, Rollout
from g2rpo.core.types import Algorithm, Draw, Kernel, Network

DIFFERENCE_OFFSET = 1e-6
"""From FDFO's code: added to the mean of d^2, by which d is divided."""


@hyper_parameters
class ReFL(Algorithm):
    """ReFL: reward feedback learning, ImageReward, arXiv 2304.05977; defaults of FlowBP's code
    (arXiv 2606.11075) for FLUX.1-dev and SD3.5 Medium with HPSv2.1 (25 steps).

        draw one of the late steps, and solve the ODE up to it, without gradient                      plans
        predict the image from there in one jump, x0 = x - sigma v, with gradient                     loss
        minimise  relu(ceiling - r(decode(x0))) by the reward's own gradient                          loss, Network.reward

    The rewards have to be differentiable (`types.Reward`). No step is stochastic and members are
    not compared: the pictures of the rollout are scored for the log, and to leave out those without
    a score. `ceiling` is the weighted sum of scores above which the loss is 0. `group_size`
    pictures of each prompt are trained on. ImageReward's own, for Stable Diffusion 1.4 (40 steps):
    `ceiling` 2 and a class with `late` 1/4; its factor 1e-3 of the loss has no effect on AdamW but
    through clipping."""

    name: Literal["refl"] = "refl"
    title: ClassVar[str] = "ReFL"
    paper: ClassVar[str] = "2304.05977"
    group_size: Annotated[int, Field(ge=1, le=10_000)] = 4
    ceiling: float = 0.55

    late: ClassVar[Fraction] = Fraction(11, 25)
    """The share of the steps of which one has a gradient."""
    uses_rewards: ClassVar[bool] = True
    drop_zero_advantages: ClassVar[bool] = True

    def kernel(self, sigmas: Tensor) -> Kernel:
        return lambda x, v, sigma, sigma_next: Dirac(
            ode_step(x, v, sigma, sigma_next), torch.zeros((), device=x.device)
        )

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        late = max(1, int(self.late * num_steps))
        step = num_steps - 1 - draw_below(late, seed, "refl", iteration)
        return [Plan(step, step + 1, (tuple(range(step + 1, num_steps + 1)),), shared_noise=False)]

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """1 for a member with all scores that count, else 0."""
        return (~rewards.isnan() | (weights == 0)[:, None, None]).all(2).all(1).float()

    def examples(self, rollout: Rollout, advantages: Tensor, draw: Draw) -> list[Example]:
        return [Example(rollout.prompt, t.step, t.x, advantages) for t in rollout.transitions]

    def loss(self, batch: Batch, network: Network) -> Loss:
        sigma, scored = batch.sigma(), batch.advantages > 0
        image = (
            batch.x
            - per_row(sigma, batch.x) * network.velocity(batch.x, sigma, batch.prompts).float()
        )
        image = torch.where(per_row(scored, image) > 0, image, image.detach())
        reward = network.reward(image, batch.prompts)
        scored = scored & reward.isfinite()
        values = torch.relu(self.ceiling - reward)
        return Loss(
            torch.where(scored, values, 0),
            {"predicted_reward": torch.where(scored, reward.detach(), torch.nan)},
        )


class Dirac(Normal):
    """A step of the ODE: no noise; log-probs are unused and 0."""

    def log_prob(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), device=x.device)


@hyper_parameters
class FDFO(Algorithm):
    """FDFO: Finite Difference Flow Optimization for RL Post-Training of Text-to-Image Models, arXiv
    2603.12893; defaults for SD3.5 Medium (40 steps without guidance, 432 pairs a rollout and 4
    updates of it).

        sample two pictures whose initial noises and steps differ a little: a pair                    plans, kernel
        A = half the difference of their rewards; d = half that of their final latents                advantages, examples
        at every step of both, with d divided by its mean square:
            log r = |d|^2 - |v - (v_old - d)|^2,  means over entries                                  loss
            minimise  -A r + |A| / (2 clip_range) (r - 1)^2                                           loss

    The whole sampling is one action: every velocity on the way is pulled towards the better
    picture. A d, now a finite difference of the reward, is on average its gradient. No log-prob of
    a step is needed.

    `churn` is the noise that is added before the first step and in each but the last: a latent
    keeps 1 / (1 + churn) of its noise, the rest is drawn anew (`flow.cps_kernel`). In groups of
    more than a pair, not published, differences are to the group's mean. `update_every` may be a
    share of a rollout's latents, which a pair's steps are dealt out to at random."""

    name: Literal["fdfo"] = "fdfo"
    title: ClassVar[str] = "FDFO"
    paper: ClassVar[str] = "2603.12893"
    group_size: GroupSize = 2
    churn: PositiveFloat = 0.0025
    clip_range: PositiveFloat = 0.03
    kl_weight: NonNegativeFloat = 0.0
    update_every: UpdateEverySetting | Annotated[float, Field(gt=0, lt=1)] = 0.25

    @property
    def uses_base(self) -> bool:
        return self.kl_weight > 0

    @property
    def kept(self) -> float:
        return 1 / (1 + self.churn)

    def kernel(self, sigmas: Tensor) -> Kernel:
        return cps_kernel(2 / math.pi * math.acos(self.kept))

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        """Every step is stochastic; the last has no noise, for its kernel ends at sigma = 0."""
        return [Plan(0, num_steps, ((num_steps,),), shared_noise=False, common=self.kept)]

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of rewards less the group's mean, in the rewards' own units; 0 without a
        score."""
        total = weighted(rewards.double(), weights).sum((1, 2))
        return (total - total.nanmean(1, keepdim=True)).nan_to_num().to(rewards.dtype)

    def examples(self, rollout: Rollout, advantages: Tensor, draw: Draw) -> list[Example]:
        difference = rollout.finals[0] - rollout.finals[0].mean(0)
        shuffled = sorted(rollout.transitions, key=lambda t: draw("order", t.step).initial_seed())
        return [
            Example(
                rollout.prompt,
                t.step,
                t.x,
                advantages,
                {"difference": difference, "old_mean": t.old_mean},
            )
            for t in shuffled
        ]

    def loss(self, batch: Batch, network: Network) -> Loss:
        at = batch.x, batch.sigma(), batch.prompts
        base = network.base_velocity(*at).float() if self.uses_base else None
        velocity, d = network.velocity(*at).float(), batch.data["difference"]
        d = d / (per_row(mean_square(d), d) + DIFFERENCE_OFFSET)
        old = velocity.detach() if batch.first else self.old_velocity(batch)
        ratio = (mean_square(d) - mean_square(velocity - old + d)).exp()
        values = (
            -batch.advantages * ratio
            + batch.advantages.abs() / (2 * self.clip_range) * (ratio - 1).square()
        )
        log = {"clip_fraction": ((ratio - 1).abs() > self.clip_range).float()}
        if base is not None:
            log["kl"] = mean_square(velocity - base)
            values = values + self.kl_weight * log["kl"]
        return Loss(values, log)

    def old_velocity(self, batch: Batch) -> Tensor:
        """The velocity of the rollout, from the mean of its step: (1 - s') (x - s v) + s' kept (x +
        (1 - s) v)."""
        x, mean = batch.x, batch.data["old_mean"]
        s, after = per_row(batch.sigma(), x), per_row(batch.sigma(ahead=1), x)
        noise = after * self.kept
        return ((1 - after + noise) * x - mean) / ((1 - after) * s - noise * (1 - s))


SMALLEST_NORM = 1e-12
"""From the published code: added to the norm of a gradient, by which it is divided."""


@hyper_parameters
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
