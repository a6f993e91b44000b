"""The cost of plans, computed before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from g2rpo.core.data import Batch
from g2rpo.core.flow import sigma_grid
from g2rpo.core.noise import generator_for
from g2rpo.core.objectives import updates_of
from g2rpo.core.plans import Plan, Rollout, Transition
from g2rpo.core.types import Algorithm, Draw
from g2rpo.rollout.tails import EXACT, Tails

DRAWS = 100
"""Draws of an algorithm's examples among which every sigma that it may train on is found: AWM's
and DGPO's take each with a probability of a half or more, and one of a dozen is missed by all once
in ten thousand runs."""


def count_evaluations(plans: Sequence[Plan], group_size: int, tails: Tails = EXACT) -> int:
    """Network evaluations (rows) that `Engine.rollout` needs for one prompt.

    For G2RPO's plans this is (last branch step + 1) + group_size * (evaluations of the tails,
    shared beginnings once): with 16 steps, 12 members and branch steps 0..7 it is 1112 for
    granularities {1}, 1496 for {1, 2}, 1700 for {1, 2, 3}.
    """
    anchor = max((plan.branch + 1 for plan in plans if plan.shared_noise), default=0)
    if any(plan.baseline for plan in plans):
        anchor += tails.tree(baseline_walk(anchor - 1, plans[0].tails[0][-1])).evaluations()
    return anchor + sum(_evaluations(plan, group_size, tails) for plan in plans)


def baseline_walk(last: int, num_steps: int) -> tuple[range]:
    """The tail that takes the anchor from its `last` branch step, whose velocity is known, to the
    picture."""
    return (range(last + 1, num_steps + 1),)


def _evaluations(plan: Plan, group_size: int, tails: Tails) -> int:
    stochastic = len(plan.stochastic)
    own_walk = plan.branch + stochastic if not plan.shared_noise else stochastic - 1
    second = (1 if plan.shared_noise else group_size) + (stochastic - 1) * group_size
    walk = group_size * (own_walk + tails.tree(plan.tails).evaluations())
    return walk + second * plan.corrected


def dry_rollout(
    plan: Plan, group_size: int, sigmas: Tensor, latent: Sequence[int] = (1,)
) -> Rollout:
    """A rollout of zeros with the shapes that `Engine.rollout` returns for one group on the grid
    `sigmas`, with latents of the shape `latent`."""
    steps = [step for step in plan.stochastic if plan.trains(step)]
    group = torch.zeros(group_size, *latent)

    def transition(step: int) -> Transition:
        x = group[:1] if step == plan.branch and plan.shared_noise else group
        return Transition(step, x, group, x, torch.zeros(group_size))

    ends = torch.zeros(len(plan.walks(sigmas)), *group.shape)
    ode = group[0] if plan.baseline else None
    return Rollout.of(0, plan, [transition(step) for step in steps], ends, sigmas, ode)


def count_trained(algorithm: Algorithm, plans: Sequence[Plan], num_steps: int) -> tuple[int, int]:
    """Latents that training passes evaluate for one prompt: (with gradient, without).

    Counted by the algorithm's own loss on examples of zeros, in the updates of a run: where a group
    branches from a shared latent, that is one in every update that has some of its members.
    """
    network = _trained(algorithm, plans, sigma_grid(num_steps))
    return network.rows, network.without_gradient


def trained_sigmas(algorithm: Algorithm, plans: Sequence[Plan], sigmas: Tensor) -> list[float]:
    """The sigmas of the same latents with gradient on a grid, falling. Where examples are drawn,
    those of `DRAWS` draws."""
    found: set[float] = set()
    for number in range(DRAWS):
        draw = _Draws(number)
        found |= _trained(algorithm, plans, sigmas, draw).sigmas
        if not draw.used or len(found) == len(sigmas) - 1:
            break
    return sorted(found, reverse=True)


def _trained(
    algorithm: Algorithm, plans: Sequence[Plan], sigmas: Tensor, draw: Draw = generator_for
) -> _CountingNetwork:
    network = _CountingNetwork()
    examples = [
        example
        for plan in plans
        for example in algorithm.examples(
            dry_rollout(plan, algorithm.group_size, sigmas),
            torch.zeros(algorithm.group_size),
            draw,
        )
    ]
    if algorithm.sums_groups:
        for example in examples:
            with torch.no_grad():
                algorithm.group_term(Batch.of([example], sigmas, first=True), network)
        examples = [example.with_group_sum(torch.tensor(0.0)) for example in examples]
    for update in updates_of(algorithm, examples):
        for example in update:
            algorithm.loss(Batch.of([example], sigmas, first=True), network)
    return network


@dataclass
class _Draws:
    """The `types.Draw` of this number."""

    number: int
    used: bool = False

    def __call__(self, *purpose: int | str) -> torch.Generator:
        self.used = True
        return generator_for(self.number, *purpose)


@dataclass
class _CountingNetwork:
    rows: int = 0
    without_gradient: int = 0
    sigmas: set[float] = field(default_factory=set)

    def velocity(self, x: Tensor, sigma: Tensor, prompts: Sequence[int]) -> Tensor:
        if not torch.is_grad_enabled():
            return self.base_velocity(x, sigma, prompts)
        self.rows += len(x)
        self.sigmas.update(sigma.tolist())
        return torch.zeros_like(x)

    def base_velocity(self, x: Tensor, sigma: Tensor, prompts: Sequence[int]) -> Tensor:
        self.without_gradient += len(x)
        return torch.zeros_like(x)

    old_velocity = base_velocity

    def unguided(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reward(self, x: Tensor, prompts: Sequence[int]) -> Tensor:
        return x.flatten(1).sum(1)
