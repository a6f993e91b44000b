"""The published rollout, written plainly from its description: what the engine is measured against.

One sample at a time, every velocity computed anew: an anchor of T steps; for every branch step and
member one forward for the stochastic step; for every granularity an ODE walk over sigmas[: k + 2] +
sigmas[k + 2 :: g] that ends with the image predicted from the last point it evaluates; every image
decoded and scored alone. No code of the published repository is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.data import Cond
from g2rpo.core.flow import ode_step
from g2rpo.core.rewards import Reward
from g2rpo.core.types import Policy
from g2rpo.rollout.scoring import score
from g2rpo.train.collector import Stopwatch

Noise = Callable[..., torch.Generator]


@dataclass
class PublishedLoop:
    """Rolls out one prompt after the other. `finals` [K, M, G, ...] per prompt are kept to compare
    with the engine's."""

    policy: Policy
    sigmas: Tensor
    algorithm: GranularGRPO
    rewards: Mapping[str, Reward]
    evaluations: int = 0
    watch: Stopwatch = field(default_factory=Stopwatch)

    @torch.no_grad()
    def rollout(self, prompts: Sequence[str], noise: Noise) -> list[Tensor]:
        cond = self.policy.encode(prompts)
        self.watch.lap("encode")
        return [
            self._prompt(prompt, cond.rows([row]), row, noise) for row, prompt in enumerate(prompts)
        ]

    def _velocity(self, x: Tensor, step: int, cond: Cond) -> Tensor:
        self.evaluations += 1
        return self.policy.velocity(x, self.sigmas[step : step + 1].to(x.device), cond).float()

    def _prompt(self, prompt: str, cond: Cond, row: int, noise: Noise) -> Tensor:
        x = self.policy.noise([noise(row, "initial")])
        anchor = []
        for step in range(len(self.sigmas) - 1):
            anchor.append(x)
            x = ode_step(x, self._velocity(x, step, cond), self.sigmas[step], self.sigmas[step + 1])
        return torch.stack(
            [
                self._branch(prompt, cond, anchor[k], k, row, noise)
                for k in self.algorithm.branch_steps
            ]
        )

    def _branch(self, prompt: str, cond: Cond, x: Tensor, k: int, row: int, noise: Noise) -> Tensor:
        algorithm, sigma = self.algorithm, self.sigmas[k]
        draws = torch.randn(
            algorithm.group_size, *x.shape[1:], generator=noise(row, "branch", k, k)
        ).to(x)
        finals = []
        for draw in draws:
            kernel = algorithm.kernel(self.sigmas)
            y = kernel(x, self._velocity(x, k, cond), sigma, self.sigmas[k + 1]).sample(draw[None])
            finals.append(
                torch.cat([self._finish(y, k, stride, cond) for stride in algorithm.granularities])
            )
            self.watch.lap("rollout")
            for final in finals[-1]:
                image = self.policy.decode(final[None]).cpu()
                self.watch.lap("decode")
                score(self.rewards, image, [prompt])
                self.watch.lap("rewards")
        return torch.stack(finals, 1)

    def _finish(self, x: Tensor, k: int, stride: int, cond: Cond) -> Tensor:
        steps = [*range(k + 2), *range(k + 2, len(self.sigmas), stride)]
        image = x
        for here, there in zip(steps[k + 1 : -1], steps[k + 2 :], strict=True):
            v = self._velocity(x, here, cond)
            image = ode_step(x, v, self.sigmas[here], torch.zeros(()))
            x = ode_step(x, v, self.sigmas[here], self.sigmas[there])
        return image
