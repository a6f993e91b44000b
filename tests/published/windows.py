"""DanceGRPO's and MixGRPO's iterations on the tiny FLUX: ours, and restated in a dtype of choice."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from g2rpo.policies.flux import FluxPolicy
from tests.published import side_by_side
from tests.published.neighbours import Flux, Learner, Member, normalised, sample, window_updates
from tests.published.side_by_side import Ours
from tests.runs import trainer

PROMPTS = ["a red circle", "two blue square left of a circle", "a square", "blue"]
COMMON = (
    "sampling.batch_size=1",  # a network call has one row there, and in bfloat16 the kernels differ by the batch
    "trainer.micro_batch_size=1",
    "trainer.prompts_per_iteration=2",
    "trainer.iterations=2",
    "policy.truncate_timesteps=true",
    "rewards={tilt: 3.0, spread: 1.0}",
    "evaluation.rewards={}",
)


def tilt(images: Tensor, prompts: list[str]) -> Tensor:
    return (images[..., :16] - images[..., 16:]).flatten(1).mean(1)


def spread(images: Tensor, prompts: list[str]) -> Tensor:
    return images.flatten(1).std(1)


REWARDS = {"tilt": tilt, "spread": spread}


@dataclass
class Restated:
    """What a restatement computed."""

    groups: list[list[list[Member]]]  # by iteration
    trained: list[list[int]]
    learner: Learner
    before: list[Tensor]

    def members(self, iteration: int) -> list[list[dict]]:
        return side_by_side.theirs(self.groups[iteration], self.trained[iteration])

    @property
    def moved(self) -> Tensor:
        return side_by_side.moved(self.learner, self.before)


@dataclass
class Windows:
    """`iterations` of one algorithm, ours at once and restated when asked for.

    `accumulate` members an update, `step(eta)` is the stochastic step, `noisy` the stochastic steps of a plan and `mix` makes
    one advantage of a group's scores [2, G].
    """

    directory: Path
    overrides: tuple[str, ...]
    autocast: torch.dtype | None
    step: Callable
    accumulate: int
    noisy: Callable
    mix: Callable[[Tensor], Tensor]
    iterations: int = 2
    ours: Ours = field(init=False)

    def __post_init__(self) -> None:
        low = self.autocast is not None
        options = ("sampling.step_dtype=bfloat16",) if low else ()
        policy = FluxPolicy.from_pretrained(
            self.directory,
            height=32,
            width=32,
            max_sequence_length=12,
            tuning="full",
            keep_base=False,
            truncate_timesteps=True,
            dtype=self.autocast or torch.float32,
        )
        t = trainer(None, *COMMON, *options, *self.overrides, policy=policy, rewards=REWARDS, prompts=PROMPTS)
        self.start = {dtype: side_by_side.copied(t, dtype) for dtype in (torch.float32, torch.float64)}
        self.ours = Ours(t)
        for _ in range(self.iterations):
            self.ours.iterate()
        self.moved = torch.cat([(p.detach() - q).double().flatten() for p, q in self._pairs(t)])

    def _pairs(self, t):
        return zip(t.learner.parameters, self.start[torch.float32][1], strict=True)

    def restate(self, dtype: torch.dtype = torch.float32, autocast: torch.dtype | None = None) -> Restated:
        """The same iterations from the formulas; weights in `dtype`, computed in `autocast`."""
        t, (transformer, parameters) = self.ours.trainer, self.start[dtype]
        sigmas, low = t.sigmas.to(dtype), autocast or dtype
        network = Flux(transformer, [], 8, autocast)
        result = Restated([], [], Learner(parameters, t.config.optim.learning_rate), [p.detach().clone() for p in parameters])
        for iteration in range(self.iterations):
            (plan,) = t.plans(iteration)
            noisy, size = self.noisy(plan), t.algorithm.group_size
            trained = [i for i in noisy if plan.trains(i)]
            network.text = side_by_side.texts(t, iteration, low)
            groups = []
            for prompt, words in enumerate(t.prompts_of(iteration)):
                initial, noise = side_by_side.drawn(t, iteration, prompt, size, plan.branch, noisy, low, own=False)
                group = [
                    sample(network, prompt, initial[g : g + 1], sigmas, {i: n[g : g + 1] for i, n in noise.items()}, self.step)
                    for g in range(size)
                ]
                pictures = t.policy.decode(torch.cat([member.final for member in group]).float())
                scores = torch.stack([reward(pictures, [words] * size) for reward in REWARDS.values()]).to(dtype)
                for member, advantage in zip(group, self.mix(scores), strict=True):
                    member.advantage = advantage
                groups.append(group)
            window_updates(network, result.learner, groups, trained, sigmas, self.step, accumulate=self.accumulate)
            result.groups.append(groups)
            result.trained.append(trained)
        return result


def summed(scores: Tensor) -> Tensor:
    """DanceGRPO's several rewards: their advantages, weighted 3 and 1, added and clipped at 5."""
    return (3 * normalised(scores[0]) + normalised(scores[1])).clamp(-5, 5)


def shared(scores: Tensor) -> Tensor:
    """MixGRPO's: weights are divided by their sum."""
    return (0.75 * normalised(scores[0]) + 0.25 * normalised(scores[1])).clamp(-5, 5)
