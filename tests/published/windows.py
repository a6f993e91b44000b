"""DanceGRPO's and MixGRPO's iterations on the tiny FLUX: ours, and restated."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from g2rpo.policies.anyflow import DiffusersPolicy
from tests.published import side_by_side
from tests.published.neighbours import Flux, Learner, Member, normalised, sample, window_updates
from tests.published.side_by_side import Ours, Restated, agree
from tests.support.runs import trainer

__all__ = ["Windows", "agree", "normalised"]

PROMPTS = ["a red circle", "two blue square left of a circle", "a square", "blue"]
COMMON = (
    "sampling.batch_size=1",  # a network call has one row there, and in bfloat16 the kernels differ by the batch
    "trainer.micro_batch_size=1",
    "trainer.prompts_per_iteration=2",
    "rewards={tilt: 3.0, spread: 1.0}",
    "evaluation.rewards={}",
)
IN_BFLOAT16 = (
    "sampling.step_dtype=bfloat16",
    "algorithm.clip_range=100",  # a clip at 1e-4 of a ratio that is known to 1e-5 depends on the last bit
)


def tilt(images: Tensor, prompts: list[str]) -> Tensor:
    return (images[..., :16] - images[..., 16:]).flatten(1).mean(1)


def spread(images: Tensor, prompts: list[str]) -> Tensor:
    return images.flatten(1).std(1)


REWARDS = {"tilt": tilt, "spread": spread}


@dataclass
class Windows:
    """Two iterations of one algorithm, ours at once and restated when asked for.

    `step` is the stochastic step, `accumulate` how many members make an update, and `mix` makes one advantage of a group's
    scores [2, G].
    """

    directory: Path
    overrides: tuple[str, ...]
    autocast: torch.dtype | None
    step: Callable
    accumulate: int
    mix: Callable[[Tensor], Tensor]
    ours: Ours = field(init=False)

    def __post_init__(self) -> None:
        policy = DiffusersPolicy.from_pretrained(
            self.directory,
            height=32,
            width=32,
            max_sequence_length=12,
            tuning="full",
            keep_base=False,
            truncate_timesteps=True,
            dtype=self.autocast or torch.float32,
        )
        options = (*COMMON, *self.overrides, *(IN_BFLOAT16 if self.autocast else ()))
        t = trainer(None, *options, policy=policy, rewards=REWARDS, prompts=PROMPTS)
        self.start, self.ours = side_by_side.two_iterations(t)

    @cached_property
    def restated(self) -> Restated:
        return self.restate(self.autocast)

    @property
    def share(self) -> float:
        """How much of what `measure` is apart ours may be."""
        return 4.0 if self.autocast is None else 0.5

    @cached_property
    def measure(self) -> Restated:
        """What tells how near is near: the restatement with every weight one rounding of float32 off; or, in bfloat16, what
        float32 makes of the same."""
        return self.restate() if self.autocast else self.restate(off=2**-23)

    def restate(self, autocast: torch.dtype | None = None, off: float = 0.0, updates: Callable = window_updates) -> Restated:
        """The same iterations from the formulas, computed in `autocast`; every weight is `off` by this share of itself."""
        t, low = self.ours.trainer, autocast or torch.float32
        transformer = side_by_side.nudged(self.start, off)
        network, learner = (
            Flux(transformer, [], 8, autocast),
            Learner(list(transformer.parameters()), t.config.optim.learning_rate),
        )
        result = Restated(learner)
        for iteration in range(2):
            (plan,) = t.plans(iteration)
            noisy, size = range(plan.branch, plan.merge), t.algorithm.group_size
            trained = [i for i in noisy if plan.trains(i)]
            network.text = side_by_side.texts(t, iteration, low)
            groups = []
            for prompt in range(len(network.text)):
                initial, noise = side_by_side.drawn(t, iteration, prompt, size, plan.branch, noisy, low, own=False)
                group = [
                    sample(
                        network, prompt, initial[g : g + 1], t.sigmas, {i: n[g : g + 1] for i, n in noise.items()}, self.step
                    )
                    for g in range(size)
                ]
                self._score(group)
                groups.append(group)
            clip = 1e-4 if self.autocast is None else 100.0
            updates(network, learner, groups, trained, t.sigmas, self.step, accumulate=self.accumulate, clip=clip)
            result.groups.append(groups)
            result.trained.append(trained)
        return result

    def _score(self, group: list[Member]) -> None:
        pictures = self.ours.trainer.policy.decode(torch.cat([member.final for member in group]))
        advantages = self.mix(torch.stack([reward(pictures, []) for reward in REWARDS.values()]))
        for member, advantage in zip(group, advantages, strict=True):
            member.advantage = advantage
