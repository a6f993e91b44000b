"""The second half of an iteration, ours beside a restatement: losses, gradients and weights from
the same latents and scores.

What a rollout leaves is taken from the trainer; advantages, losses, gradients and AdamW's steps are
computed twice. An `objective` is a restatement's, or a published function's.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from g2rpo.core.data import Cond, Example
from g2rpo.core.plans import Rollout
from g2rpo.train.trainer import Trainer
from tests.published.neighbours import Flux, Learner
from tests.published.windows import tilt
from tests.support import policies
from tests.support.runs import smooth, trainer
from tests.support.tolerances import UNIT, network
from tests.support.watched import Watched, flat

PROMPTS = [
    "a red circle",
    "two blue square left of a circle",
    "a square",
    "blue",
    "a blue circle",
    "red square",
]
TINY = (
    "sampling.num_steps=8",
    "trainer.prompts_per_iteration=2",
    "trainer.micro_batch_size=1",
    "rewards={tilt: 1.0}",
    "evaluation.rewards={}",
    "optim.learning_rate=3e-4",
)


@dataclass(frozen=True)
class Seen:
    """What an iteration left before its weights moved."""

    rollouts: Sequence[Rollout]
    rewards: Tensor  # [N, R, M, G]
    scores: Tensor  # [N, R, M, G + 1] with the ODE's picture, if there is a baseline
    examples: Sequence[Example]
    cond: Cond
    prompts: Sequence[str]


@dataclass
class Models:
    """Three transformers: `trained`, which moves, the untrained `base`, and `old`, which an
    objective may move."""

    trained: torch.nn.Module
    base: torch.nn.Module
    old: torch.nn.Module
    text: list[dict[str, Tensor]] = field(default_factory=list)

    def velocity(self, which, x, sigma, prompt):
        """Of one row x [1, tokens, channels] at a sigma."""
        return Flux(getattr(self, which), self.text, side=8, truncate=False)(
            x, torch.as_tensor(sigma), prompt
        )


Objective = Callable[[Models, Seen], list[Callable[[], Tensor]]]
"""The terms of an update's loss, to be added up."""


def tiny(folder, *overrides, rewards=(tilt,), options=(), prompts=PROMPTS, **more):
    """A trainer of all weights of a tiny model; `options` are the policy's."""
    size = {"height": 32, "width": 32, "max_sequence_length": 12}
    policy = policies.load(folder, **size, tuning="full", keep_base=True, **dict(options))
    named = {reward.__name__: reward for reward in rewards}
    return trainer(None, *TINY, *overrides, policy=policy, rewards=named, prompts=prompts, **more)


@dataclass
class Beside:
    """So many iterations of `trainer`, and the same second halves by `objective`; `after(models,
    steps)` ends an iteration."""

    trainer: Trainer
    objective: Objective
    after: Callable[[Models, int], None] = lambda models, steps: None
    iterations: int = 3
    losses: list[tuple[float, float]] = field(default_factory=list)
    gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self):
        t = self.trainer
        watched, start = Watched(t), copy.deepcopy(t.policy.pipeline.transformer)
        self.models = Models(start, copy.deepcopy(start), copy.deepcopy(start))
        self.learner = Learner.of(t, start.parameters())
        self.start = flat(t.learner.parameters)
        for _ in range(self.iterations):
            loss = t.iterate()["loss"]
            made = self._restate(_seen(watched))
            self.losses.append((loss, made.loss))
            self.gradients.append((flat(watched.gradients[-1]), made.flat))
            self.after(self.models, len(self.learner.updates))

    def _restate(self, seen):
        tensors = seen.cond.tensors
        self.models.text = [
            {name: value[i : i + 1] for name, value in tensors.items()}
            for i in range(len(seen.cond))
        ]
        self.learner.update(self.objective(self.models, seen))
        return self.learner.updates[-1]

    def differences(self):
        """The largest difference of a loss, and the relative ones of a gradient and of how far all
        weights have come."""
        ours, theirs = flat(self.trainer.learner.parameters), flat(self.learner.parameters)
        apart = [float((one - other).norm() / other.norm()) for one, other in self.gradients]
        return {
            "loss": max(abs(one - other) for one, other in self.losses),
            "gradient": max(apart),
            "weights": float((ours - theirs).norm() / (theirs - self.start).norm()),
        }


def of_members(term, models, seen):
    """The mean over rollouts and members of term(models, rollout, rewards, member)."""
    members = seen.rewards.shape[-1]
    share = 1 / (len(seen.rollouts) * members)
    return [
        lambda given=(rollout, rewards, g): share * term(models, *given)
        for rollout, rewards in zip(seen.rollouts, seen.rewards, strict=True)
        for g in range(members)
    ]


def agree(t, objective, *after, iterations=3):
    """The trainer `t` and `objective` agree; returns the `Beside`, and by what share of the way
    that they came weights may be apart.

    Gradients may be so by as much as a network call, the loss and the way back are rounded. Weights
    are `smooth`, and each step rounds them, on either side.
    """
    beside = Beside(smooth(t), objective, *after, iterations=iterations)
    apart, share = beside.differences(), network(1.0, passes=3)["atol"]
    ends = flat(beside.learner.parameters)
    rounded = 2 * iterations * UNIT * float(ends.norm() / (ends - beside.start).norm())
    most = max(1.0, *(abs(loss) for pair in beside.losses for loss in pair))
    assert apart["loss"] < network(most)["atol"] and apart["gradient"] < share, apart
    assert apart["weights"] < share + rounded < 1e-2, (apart, rounded)
    return beside, share + rounded


def _seen(watched):
    """Of the last iteration."""
    (*_, prompts, _), sampled = watched.collected[-1]
    (examples, cond), _ = watched.updated[-1]
    scored = sampled.rewards, sampled.scores
    return Seen(sampled.rollouts, *scored, examples, cond, prompts)
