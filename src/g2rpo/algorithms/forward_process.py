"""The common part of algorithms that learn from final latents: new noise at new times, and the velocities there.

for each member's final latent x0, `times` times:                              examples
    draw sigma from the sampler's grid and noise; x = (1 - sigma) x0 + sigma noise
    the velocities at x: the trained one, and without gradient the old weights' and the untrained model's
loss = member_loss + kl_weight |v - v_base|^2                                  member_loss is each algorithm's own

No log-prob of a step is needed, so any ODE solver may make the pictures (`sampling.tails`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from g2rpo.algorithms.grpo import window
from g2rpo.algorithms.hyperparameters import STRICT, GroupSize
from g2rpo.core.data import Batch, Example, Loss, Plan, Rollout, per_row
from g2rpo.core.objectives import RewardMix, mix_rewards
from g2rpo.core.types import Algorithm, Draw, Network

OldShare = Annotated[float, Field(ge=0, lt=1)]
"""The decay of old weights; with 1 they would never change."""


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


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ForwardProcess(Algorithm):
    """The fields are hyper-parameters.

    Advantages are those of Flow-GRPO, clamped to `advantage_clip`; `batch_std` and `reward_mix`: see
    `objectives.mix_rewards`. `kl_weight` is that of |v - v_base|^2, a mean over entries. With `shared_noise` the members of a
    group are noised alike. At optimizer step t the decay of the old weights is
    min(`old_rise` * (t - `old_flat`), `old_most`), at least 0.
    """

    name: str = ""
    group_size: GroupSize = 24
    advantage_clip: PositiveFloat = 5.0
    batch_std: bool = True
    reward_mix: RewardMix = "rewards"
    kl_weight: NonNegativeFloat = 0.0
    shared_noise: bool = False
    old_flat: NonNegativeInt = 0
    old_rise: NonNegativeFloat = 0.001
    old_most: OldShare = 0.5

    @property
    def uses_base(self) -> bool:
        return self.kl_weight > 0

    @property
    def uses_old(self) -> bool:
        return True

    def old_decay(self, updates: int) -> float:
        return min(max(self.old_rise * (updates - self.old_flat), 0.0), self.old_most)

    def samples_old(self, updates: int) -> bool:
        return False

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        return [window(0, 0, num_steps, shared_noise=False)]

    def draw_steps(self, num_steps: int, generator: torch.Generator) -> Tensor:
        """Grid indices [times, G] at which a group's members are noised."""
        raise NotImplementedError

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        mixed = mix_rewards(rewards, weights, self.reward_mix, self.batch_std, population_std=True)
        return mixed.clamp(-self.advantage_clip, self.advantage_clip)

    def examples(self, rollout: Rollout, advantages: Tensor, draw: Draw) -> list[Example]:
        """One example per sampled time; each member has its own time index in data['step']. Noise is kept on the CPU."""
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
        values, log = self.member_loss(noised), {"velocity_error": mean_square(velocity - (noise - batch.x))}
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
    return noise, ((1 - per_row(sigma, image)) * image + per_row(sigma, image) * noise, sigma, batch.prompts)


def mean_square(x: Tensor) -> Tensor:
    """[B], the mean over a row's entries of x^2."""
    return x.square().flatten(1).mean(1)
