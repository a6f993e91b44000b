"""Algorithms that learn from final latents: new noise at new times, and the velocities there.
DiffusionNFT, AWM, DGPO.

for each member's final latent x0, `times` times:  examples
    draw sigma from the sampler's grid and noise; x = (1 - sigma) x0 + sigma noise
    the velocities at x: the trained one, and without gradient the old weights' and the untrained model's
loss = member_loss + kl_weight |v - v_base|^2  member_loss is each algorithm's own

No log-prob of a step is needed, so any ODE solver may make the pictures (`sampling.tails`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from g2rpo.algorithms.flow_grpo import window
from g2rpo.core.data import Batch, Example, Loss
from g2rpo.core.noise import in_float64, per_row
from g2rpo.core.objectives import RewardMix, mix_rewards
from g2rpo.core.plain import Count, GroupSize, hyper_parameters
from g2rpo.core.plans import Plan, Rollout
from g2rpo.core.types import Algorithm, Draw, Network

OldShare = Annotated[float, Field(ge=0, lt=1)]
"""The decay of old weights; with 1 they would never change."""

SMALLEST_SIZE = 1e-5
"""From DiffusionNFT's code: the lower bound of an image's mean error, by which its squared error is
divided."""
ERROR_OFFSET = 1e-10
"""From AWM's code: added to an error before it is raised to a power below 1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noised:
    """B noised latents of a training pass. All but `velocity` are without gradient; float32."""

    image: Tensor  # [B, ...], the member's final latent
    noise: Tensor  # [B, ...]
    x: Tensor  # [B, ...], (1 - sigma) image + sigma noise
    sigma: Tensor  # [B]
    advantages: Tensor  # [B]
    velocity: Tensor  # [B, ...], under the weights being trained
    old: Tensor | None  # [B, ...], under the old weights, where the algorithm uses them
    group_sum: Tensor | None = None  # [B], where the algorithm uses them


@hyper_parameters
class ForwardProcess(Algorithm):
    """The common part. The fields are hyper-parameters; class attributes define an algorithm, as in
    `flow_grpo.GRPO`.

    Advantages are those of Flow-GRPO, clamped to `advantage_clip`; `reward_mix`: see
    `objectives.mix_rewards`. `kl_weight` is that of |v - v_base|^2, a mean over entries.
    `old_schedule` is (flat, rise, most): at optimizer step t the decay of the old weights is
    min(rise * (t - flat), most), at least 0."""

    name: str = ""
    group_size: GroupSize = 24
    advantage_clip: PositiveFloat = 5.0
    reward_mix: RewardMix = "rewards"
    kl_weight: NonNegativeFloat = 0.0
    old_schedule: tuple[NonNegativeInt, NonNegativeFloat, OldShare] = (0, 0.001, 0.5)

    batch_std: ClassVar[bool] = True
    shared_noise: ClassVar[bool] = False
    """Whether the members of a group are noised alike."""

    @property
    def uses_base(self) -> bool:
        return self.kl_weight > 0

    @property
    def uses_old(self) -> bool:
        return True

    def old_decay(self, updates: int) -> float:
        flat, rise, most = self.old_schedule
        return min(max(rise * (updates - flat), 0.0), most)

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        return [window(0, 0, num_steps, shared_noise=False)]

    def draw_steps(self, num_steps: int, generator: torch.Generator) -> Tensor:
        """Grid indices [times, G] at which a group's members are noised."""
        raise NotImplementedError

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        mixed = mix_rewards(rewards, weights, self.reward_mix, self.batch_std, population_std=True)
        return mixed.clamp(-self.advantage_clip, self.advantage_clip)

    def examples(self, rollout: Rollout, advantages: Tensor, draw: Draw) -> list[Example]:
        """One example per sampled time; each member has its own time index in data['step']. Noise
        is kept on the CPU."""
        image, num_steps = rollout.finals[0], rollout.plan.tails[0][-1]
        steps = self.draw_steps(num_steps, draw("times"))
        drawn = image[:1].shape if self.shared_noise else image.shape
        noises = (torch.randn(drawn, generator=draw("noise", place)) for place in range(len(steps)))
        return [
            Example(rollout.prompt, 0, image, advantages, {"step": own, "noise": noise})
            for own, noise in zip(steps, noises, strict=True)
        ]

    def loss(self, batch: Batch, network: Network) -> Loss:
        noise, at = noised_at(batch)
        base = network.base_velocity(*at).float() if self.uses_base else None
        old = network.old_velocity(*at).float() if self.uses_old else None
        velocity, (x, sigma, _) = network.velocity(*at).float(), at
        noised = Noised(
            image=batch.x, noise=noise, x=x, sigma=sigma, advantages=batch.advantages, velocity=velocity, old=old,
            group_sum=batch.data.get("group_sum"),
        )  # fmt: skip
        values, log = (
            self.member_loss(noised),
            {"velocity_error": mean_square(velocity - (noise - batch.x))},
        )
        if old is not None:
            log["old_distance"] = mean_square(velocity - old)
        if base is not None:
            log["kl"] = mean_square(velocity - base)
            values = values + self.kl_weight * log["kl"]
        return Loss(values, log)

    def member_loss(self, noised: Noised) -> Tensor:
        """The loss [B] without the KL term."""
        raise NotImplementedError


def noised_at(batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Sequence[int]]]:
    """The noise of a batch's members, and the arguments of their velocities: x, sigma, prompts."""
    image, noise = batch.x, batch.data["noise"].to(batch.x)
    sigma = batch.sigmas[batch.data["step"]].to(image.device)
    return noise, (
        (1 - per_row(sigma, image)) * image + per_row(sigma, image) * noise,
        sigma,
        batch.prompts,
    )


def mean_square(x: Tensor) -> Tensor:
    """[B], the mean over a row's entries of x^2."""
    return x.square().flatten(1).mean(1)


def implicit_pair(
    x: Tensor, sigma: Tensor, velocity: Tensor, old: Tensor, b: float
) -> tuple[Tensor, Tensor]:
    """The images predicted at x by DiffusionNFT's v+ and v-: by a velocity and its mirror image on the
    other side of the old one, b times as far away."""
    s = per_row(sigma, x)
    return x - s * (b * velocity + (1 - b) * old), x - s * ((1 + b) * old - b * velocity)


def scaled_error(error: Tensor) -> Tensor:
    """[B], the mean square of an error of images divided by its mean size, which has no gradient,
    so that all times weigh alike."""
    size = in_float64(error.detach()).abs().flatten(1).mean(1).clamp(min=SMALLEST_SIZE)
    return (mean_square(error) / size).to(error.dtype)


@hyper_parameters
class OffPolicy(ForwardProcess):
    """The old weights sample, and each member is noised at times of its own (DiffusionNFT, EPG).

    `share` of the grid's sigmas, rounded down, is trained on for each member. `update_every` is
    "rollout" or a number of members, after each of which the weights move."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.99
    kl_weight: NonNegativeFloat = 1e-4
    update_every: Literal["rollout"] | Count = "rollout"

    def samples_old(self, updates: int) -> bool:
        return True

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        if int(num_steps * self.share) < 1:
            raise ValueError(f"share={self.share} of num_steps={num_steps} is no time at all")
        return super().plans(num_steps, iteration, seed)

    def draw_steps(self, num_steps: int, generator: torch.Generator) -> Tensor:
        """Distinct ones for each member, from all of the grid's steps."""
        ranked = torch.rand(num_steps, self.group_size, generator=generator).argsort(0)
        return ranked[: int(num_steps * self.share)]


@hyper_parameters
class DiffusionNFT(OffPolicy):
    """DiffusionNFT: Online Diffusion Reinforcement with Forward Process, arXiv 2509.16117; defaults
    for SD3.5 Medium (10 steps of DPM-Solver++(2M) without guidance, 48 prompts an update).

        sample with the old weights, by any solver; r in [0, 1] from the normalised reward            samples_old, member_loss
        at fresh noise and time, v and v_old:   v+ = (1 - b) v_old + b v      v- = (1 + b) v_old - b v
        minimise  r |x0(v+) - x0|^2 + (1 - r) |x0(v-) - x0|^2,  x0(v) = x - sigma v                   member_loss
        old weights <- d old + (1 - d) trained                                                        old_decay

    A picture that is better than its group attracts v+, one that is worse attracts v-, the mirror
    image of v+ on the other side of the old velocity.

    `mixing` is b: how far beyond the old velocity the positive one reaches (published: 1; for OCR
    and several rewards 0.1). The published schedules of the old weights: (0, 0.001, 0.5) (GenEval
    and the like), or (75, 0.0075, 0.999) (OCR)."""

    name: Literal["diffusion_nft"] = "diffusion_nft"
    title: ClassVar[str] = "DiffusionNFT"
    paper: ClassVar[str] = "2509.16117"
    mixing: PositiveFloat = 1.0

    def member_loss(self, noised: Noised) -> Tensor:
        clip, b = self.advantage_clip, self.mixing
        assert noised.old is not None
        r = (noised.advantages / clip / 2 + 0.5).clamp(0, 1)
        pair = implicit_pair(noised.x, noised.sigma, noised.velocity, noised.old, b)
        positive, negative = (scaled_error(image - noised.image) for image in pair)
        return clip * (r * positive + (1 - r) * negative) / b


@hyper_parameters
class AWM(ForwardProcess):
    """AWM: Advantage Weighted Matching, Aligning RL with Pretraining in Diffusion Models, arXiv
    2509.25050; defaults for SD3.5 Medium on OCR (14 steps without guidance, 72 prompts an update;
    GenEval: `kl_weight` 0.001; PickScore: `kl_weight` 1e-4, 24 prompts).

        sample by any solver; A = the normalised reward                                  advantages
        at fresh noise and time:  log p := -w(sigma) error(v - (noise - x0))             member_loss
        minimise  -A exp(log p - its own value) + kl |v - v_base|^2 + old |v - v_old|^2  member_loss
        old weights <- d old + (1 - d) trained                                           old_decay

    It is flow matching's own loss, weighted by advantages: what pretraining minimises for all
    images is minimised for good ones and maximised for bad ones.

    `times` of the grid's sigmas are trained on, one from each of as many even parts of its first
    nine tenths without pure noise. `power` p makes the error sigma (mean |.|^2)^p / p (published:
    0.25; 1 is the plain squared error). `old_weight` penalises the distance to the old weights,
    which follow the policy closely. The weights move once a rollout, as in the published configs,
    so the ratio is 1 and their clip never acts: there is none here."""

    name: Literal["awm"] = "awm"
    title: ClassVar[str] = "AWM"
    paper: ClassVar[str] = "2509.25050"
    kl_weight: NonNegativeFloat = 0.003
    old_schedule: tuple[NonNegativeInt, NonNegativeFloat, OldShare] = (0, 0.001, 0.3)
    power: Annotated[float, Field(gt=0, le=1)] = 0.25
    times: Count = 6
    update_every: Literal["rollout"] = "rollout"

    old_weight: ClassVar[float] = 1.0

    @property
    def uses_old(self) -> bool:
        return self.old_weight > 0

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        if self.times > (most := int(0.9 * num_steps) - 1):
            raise ValueError(
                f"times must be at most {most} for num_steps={num_steps}, got {self.times}"
            )
        return super().plans(num_steps, iteration, seed)

    def draw_steps(self, num_steps: int, generator: torch.Generator) -> Tensor:
        """One from each of `times` even parts of steps 1 .. 0.9 num_steps - 1, the same for all
        members."""
        edges = torch.linspace(1, int(0.9 * num_steps), self.times + 1).long()
        drawn = (
            edges[:-1]
            + (torch.rand(self.times, generator=generator) * (edges[1:] - edges[:-1])).long()
        )
        return drawn[:, None].expand(-1, self.group_size)

    def member_loss(self, noised: Noised) -> Tensor:
        error = mean_square(in_float64(noised.velocity) - in_float64(noised.noise - noised.image))
        log_prob = (
            -((error + ERROR_OFFSET) ** self.power - ERROR_OFFSET**self.power)
            / self.power
            * noised.sigma
        )
        policy = -noised.advantages / self.advantage_clip * (log_prob - log_prob.detach()).exp()
        if noised.old is not None:
            policy = policy + self.old_weight * mean_square(noised.velocity - noised.old)
        return policy.to(noised.velocity.dtype)


@hyper_parameters
class DGPO(ForwardProcess):
    """DGPO: Reinforcing Diffusion Models by Direct Group Preference Optimization, arXiv 2510.08425;
    defaults for SD3.5 Medium on OCR (10 steps, 8 prompts an update; PickScore: `strength` 10,
    `clip_range` 0.05, `kl_weight` 0.001, `group_size` 24; GenEval: a class with `early` 1/2,
    `batch_std` False and `old_after` 500).

        sample by any solver; A = the normalised reward                                               advantages
        at fresh times, one noise for a group:  e = |v - (noise - x0)|^2, e_base of the untrained model
        s = sum over the group of strength A (e - e_base) / G                                         group_term
        minimise  sigmoid(s) A e,  without gradient where e has moved far enough from e_old           member_loss
        old weights <- d old + (1 - d) trained                                                        old_decay

    DPO's gradient with groups instead of pairs: members with positive advantages are preferred to
    those with negative ones. The weight sigmoid(s) is small for groups in which the policy has that
    preference already; it is that before the first update of a rollout. `times` of the grid's early
    steps, drawn for each group, are trained on. `strength` is beta of the weight. `clip_range`
    bounds exp(e_old - e) in the direction of the advantage."""

    name: Literal["dgpo"] = "dgpo"
    title: ClassVar[str] = "DGPO"
    paper: ClassVar[str] = "2510.08425"
    group_size: GroupSize = 16
    kl_weight: NonNegativeFloat = 0.02
    old_schedule: tuple[NonNegativeInt, NonNegativeFloat, OldShare] = (1, 0.001, 0.3)
    times: Count = 4
    strength: NonNegativeFloat = 100.0
    clip_range: PositiveFloat = 0.01
    update_every: Literal["rollout"] = "rollout"

    shared_noise: ClassVar[bool] = True
    sums_groups: ClassVar[bool] = True
    early: ClassVar[Fraction] = Fraction(7, 10)
    """The share of the grid's steps that are trained on."""
    old_after: ClassVar[int] = 200
    """The updates after which the old weights sample."""

    @property
    def uses_base(self) -> bool:
        return True

    def samples_old(self, updates: int) -> bool:
        return updates > self.old_after

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        if self.times > (most := int(self.early * num_steps)):
            raise ValueError(
                f"times must be at most {most} for num_steps={num_steps}, got {self.times}"
            )
        return super().plans(num_steps, iteration, seed)

    def draw_steps(self, num_steps: int, generator: torch.Generator) -> Tensor:
        """Different ones of the early steps, the same for all members."""
        drawn = torch.randperm(int(self.early * num_steps), generator=generator)[: self.times]
        return drawn[:, None].expand(-1, self.group_size)

    def group_term(self, batch: Batch, network: Network) -> Tensor:
        noise, at = noised_at(batch)
        target = noise - batch.x
        base, new = (
            mean_square(of(*at).float() - target)
            for of in (network.base_velocity, network.velocity)
        )
        return self.strength * batch.advantages * (new - base) / self.group_size

    def member_loss(self, noised: Noised) -> Tensor:
        target, advantages = noised.noise - noised.image, noised.advantages
        assert noised.old is not None and noised.group_sum is not None
        error = mean_square(noised.velocity - target)
        ratio = (mean_square(noised.old - target) - error.detach()).exp()
        # the error has moved far enough in the direction of the advantage: no gradient beyond
        far = torch.where(advantages > 0, ratio > 1 + self.clip_range, ratio < 1 - self.clip_range)
        return noised.group_sum.sigmoid() * advantages * torch.where(far, error.detach(), error)
