"""Learning from finished images: fresh noise is added to each, and the velocity there is pulled to
it or pushed from it.

loss = A |v(x, sigma) - (noise - image)|^2 at x = (1 - sigma) image + sigma noise, with A the
group-normalised reward: a minimal forward-process objective, in the manner of AWM (arXiv
2509.25050) without its ratio. Any sampler will do for the rollout.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from g2rpo.core.data import Batch, Example, Loss
from g2rpo.core.noise import per_row
from g2rpo.core.objectives import mix_rewards
from g2rpo.core.plans import Plan, Rollout
from g2rpo.core.types import Algorithm, Draw, Network


@dataclass(frozen=True)
class Forward(Algorithm):
    """`times` of the grid's inner steps, evenly spread, are learnt from; `advantage_clip` bounds
    how far an image counts."""

    group_size: int = 8
    times: int = 3
    advantage_clip: float = 2.0

    def plans(self, num_steps: int, iteration: int = 0, seed: int = 0) -> list[Plan]:
        return [Plan(0, 0, (tuple(range(num_steps + 1)),), shared_noise=False)]

    def advantages(self, rewards: Tensor, weights: Tensor) -> Tensor:
        return mix_rewards(rewards, weights).clamp(-self.advantage_clip, self.advantage_clip)

    def examples(self, rollout: Rollout, advantages: Tensor, draw: Draw) -> list[Example]:
        image, last = rollout.finals[0], rollout.plan.tails[0][-1]
        steps = [last * (place + 1) // (self.times + 1) for place in range(self.times)]
        noises = [
            torch.randn(image.shape, generator=draw("noise", step)).to(image) for step in steps
        ]
        return [
            Example(rollout.prompt, step, image, advantages, {"noise": noise})
            for step, noise in zip(steps, noises, strict=True)
        ]

    def loss(self, batch: Batch, network: Network) -> Loss:
        image, noise = batch.x, batch.data["noise"]
        sigma = batch.sigmas[batch.steps].to(image.device)
        x = image + per_row(sigma, image) * (noise - image)
        error = (
            (network.velocity(x, sigma, batch.prompts) - (noise - image))
            .square()
            .flatten(1)
            .mean(1)
        )
        return Loss(batch.advantages * error, {"velocity_error": error.detach()})
