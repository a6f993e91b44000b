"""Exact counts of a run's work, by running the engine and the updater on a policy of three
numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from g2rpo.config.schema import Config
from g2rpo.config.work import plans_in
from g2rpo.core.data import Cond
from g2rpo.core.distributed import ALONE, World
from g2rpo.core.flow import sigma_grid
from g2rpo.core.holding import holding
from g2rpo.core.noise import generator_for
from g2rpo.core.plans import Plan
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.memory import CPU_ROWS, batch_sizes
from g2rpo.train.evaluator import SPREAD_NOISES, spread_prompts
from g2rpo.train.updater import Updater

AUTO_ROWS = {"batch_size": 8, "decode_batch_size": 1}
"""The plan's value for "auto" on a GPU. The run measures a larger one that leaves a fifth of the
memory free."""


def settled(config: Config, cuda: bool) -> Config:
    """`config` with numbers for batch sizes that are "auto"."""
    sizes = (
        AUTO_ROWS
        if cuda
        else {"batch_size": CPU_ROWS["rollout"], "decode_batch_size": CPU_ROWS["decode"]}
    )
    found = {name: size for name, size in sizes.items() if getattr(config.sampling, name) == "auto"}
    return config.changed("sampling", **found)


@dataclass(frozen=True, kw_only=True)
class CountedIteration:
    """Counts of one iteration. Rows are evaluations of a velocity; with true guidance each takes
    two rows of the network."""

    plans: tuple[Plan, ...]
    calls: tuple[int, ...]
    """Rows of every call of the network in the rollout."""
    unguided: tuple[int, ...]
    """Of these the calls that are without guidance in any case."""
    passes: tuple[int, ...]
    """Rows of every training pass, forward and backward."""
    reference_rows: int
    """Rows that training passes evaluate without gradient, under the untrained or the old
    weights."""
    unguided_reference: int
    """Of these the rows that are without guidance in any case."""
    optimizer_steps: int
    images: int

    @property
    def evaluations(self) -> int:
        return sum(self.calls)

    def network_rows(self, guided: int) -> int:
        """Rows of the network in the rollout, of which an evaluation with guidance takes
        `guided`."""
        return guided * self.evaluations - (guided - 1) * sum(self.unguided)

    @property
    def training_rows(self) -> int:
        return sum(self.passes)


@dataclass(frozen=True)
class Counts:
    """The iterations of a run, grouped by equal counts, and its held-out evaluations and
    checkpoints."""

    kinds: tuple[tuple[CountedIteration, int], ...]
    """Distinct iterations with their number: iterations differ if an algorithm's window moves."""
    prompts: int
    heldout: int
    """Held-out prompts: pictures of one evaluation, scored by all rewards."""
    heldout_steps: int
    times_evaluated: int
    checkpoints: int
    spread: int = 0
    """Network evaluations, over the run, of the pictures whose diversity is measured."""

    @property
    def iterations(self) -> int:
        return sum(times for _, times in self.kinds)

    @property
    def heldout_evaluations(self) -> int:
        return self.heldout * self.heldout_steps

    @property
    def looks(self) -> float:
        """Evaluations of the run, with what takes as long as such."""
        return self.times_evaluated + self.spread / self.heldout_evaluations

    def total(self, of: Callable[[CountedIteration], float]) -> float:
        """A quantity of iterations, summed over the run."""
        return sum(times * of(iteration) for iteration, times in self.kinds)

    def mean(self, of: Callable[[CountedIteration], float]) -> float:
        """A quantity of iterations, on average over the run."""
        return self.total(of) / self.iterations

    def largest(self, of: Callable[[CountedIteration], Sequence[int]]) -> int:
        """The largest call of a kind; 0 if there is none."""
        return max((rows for iteration, _ in self.kinds for rows in of(iteration)), default=0)


def count(config: Config, heldout: int, among: World = ALONE) -> Counts:
    """Counts of a run of `config` (with settled batch sizes) with `heldout` held-out prompts, and
    of each prompt's plans the share of a rank `among` them.

    Held-out pictures are evaluated before the first iteration, every `evaluation.every` iterations
    and after the last.
    """
    trainer, prompts = config.trainer, config.trainer.prompts_per_iteration
    kinds = Counter(
        tuple(among.shard(plans_in(config, iteration))) for iteration in range(trainer.iterations)
    )
    return Counts(
        kinds=tuple((_known_iteration(config, plans), times) for plans, times in kinds.items()),
        prompts=prompts,
        heldout=heldout,
        heldout_steps=config.judged_steps,
        times_evaluated=1 + _times(trainer.iterations, config.evaluation.every),
        checkpoints=_times(trainer.iterations, trainer.checkpoint_every),
    )


def _times(iterations: int, every: int) -> int:
    """The number of events that occur every `every` iterations and after the last."""
    return iterations // every + bool(iterations % every)


class _Recorder(GaussianPolicy):
    """A policy of three numbers that records the rows of every call."""

    def __init__(self) -> None:
        super().__init__(size=1)
        self.calls: dict[str, list[int]] = {"rollout": [], "training": [], "reference": []}
        self.without: dict[str, list[int]] = {kind: [] for kind in self.calls}
        """Of these, those that are without guidance."""
        self._guided = True

    def unguided(self) -> AbstractContextManager[None]:
        """As of a policy that has guidance."""
        return holding(self, _guided=False)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        kind = (
            "training" if torch.is_grad_enabled() else "reference" if self._in_base else "rollout"
        )
        self.calls[kind].append(len(x))
        if not self._guided:
            self.without[kind].append(len(x))
        return super().velocity(x, sigma, cond)


_KNOWN: dict[Any, CountedIteration] = {}
"""Iterations, by what they depend on."""


def spread_evaluations(config: Config, heldout: int, times_evaluated: int) -> int:
    """`Counts.spread` of a run of `config` on `heldout` prompts."""
    steps = config.judged_steps
    return spread_prompts(config, steps, heldout) * SPREAD_NOISES * steps * times_evaluated


def _known_iteration(config: Config, plans: tuple[Plan, ...]) -> CountedIteration:
    """`_dry`, once for configs that differ in other options."""
    size = config.trainer.prompts_per_iteration, config.trainer.micro_batch_size
    key = (algorithm_key(config), config.sampling, size, plans)
    if key not in _KNOWN:
        _KNOWN[key] = _dry(config, plans)
    return _KNOWN[key]


def algorithm_key(config: Config) -> tuple[type, str]:
    """What tells its algorithm from others: a user's class may have no hash."""
    return type(config.algorithm), config.model_dump_json(include={"algorithm"})


def _dry(config: Config, plans: tuple[Plan, ...]) -> CountedIteration:
    """One iteration of the real engine and updater on a minimal policy."""
    algorithm, sampling, trainer = config.algorithm, config.sampling, config.trainer
    policy, sigmas = _Recorder(), sigma_grid(sampling.num_steps)
    cond = policy.encode(["0"] * trainer.prompts_per_iteration)
    rows = int(sampling.batch_size)
    engine = Engine(policy=policy, cond=cond, sigmas=sigmas, batch_size=rows, tails=sampling.tails)
    kernel = algorithm.kernel(sigmas)
    rollouts = engine.rollout(plans, algorithm.group_size, kernel, generator_for)
    calls, without = (tuple(of["rollout"]) for of in (policy.calls, policy.without))
    silent = torch.zeros(algorithm.group_size)
    examples = [
        example
        for rollout in rollouts
        for example in algorithm.examples(rollout, silent, generator_for)
    ]
    sizes = batch_sizes(
        rows, int(sampling.decode_batch_size), trainer.micro_batch_size, policy.device, print
    )
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.0)
    updates = Updater(
        policy=policy,
        algorithm=algorithm,
        optimizer=optimizer,
        sigmas=sigmas,
        sizes=sizes,
        max_grad_norm=1.0,
        old=policy.base,
        reward=lambda x, rows: x.flatten(1).sum(1),
    ).update(examples, cond)
    return CountedIteration(
        plans=plans,
        calls=calls,
        unguided=without,
        passes=tuple(policy.calls["training"]),
        reference_rows=_beside(policy.calls, calls),
        unguided_reference=_beside(policy.without, without),
        optimizer_steps=len(updates.grad_norms) + updates.skipped,
        images=sum(rollout.pictures for rollout in rollouts),
    )


def _beside(calls: Mapping[str, Sequence[int]], rollout: Sequence[int]) -> int:
    """Rows without gradient beside those of the rollout."""
    return sum(calls["reference"]) + sum(calls["rollout"][len(rollout) :])
