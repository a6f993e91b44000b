"""The first half of an iteration: prompts -> rollouts -> rewards, in batches that fit, scoring while the next are sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from g2rpo.algorithms.contracts import plans_of
from g2rpo.config.schema import SamplingConfig
from g2rpo.errors import UserError
from g2rpo.rollout.engine import Engine, Noise
from g2rpo.rollout.planning import anchor_walk
from g2rpo.rollout.scoring import Stopwatch, score_rollouts
from g2rpo.rollout.tails import TailNetwork
from g2rpo.runtime.devices import same_device
from g2rpo.runtime.memory import BatchSizes, OutOfMemory
from g2rpo.runtime.sharding import Replicated
from g2rpo.seeding import generator_for
from g2rpo.training.units import Queue, Result, Unit, Work, returned, works_of_all
from g2rpo.types import Algorithm, Cond, Kernel, Plan, Policy, Reward, Rollout, no_kernel

TF32_ASIDE = (
    "rewards.{}.tf32: TF32 holds for the whole process, so also for what is rolled out meanwhile; take it or "
    "sampling.prompts_at_once out"
)


@dataclass(frozen=True)
class Collected:
    """The rollouts of one iteration on this rank, with their rewards and cost."""

    rollouts: list[Rollout]
    rewards: Tensor  # [N, R, M, G]
    evaluations: int
    """Network evaluations, one latent each."""
    seconds_overlapped: float
    """Seconds of decoding and scoring during the rollouts of other prompts."""


@dataclass(frozen=True)
class Drawn:
    """What is sampled for every prompt."""

    plans: Sequence[Plan]
    group_size: int
    kernel: Kernel
    noise: Noise
    """`noise(place, *purpose)`: the generator for a prompt by its place in the iteration."""


@dataclass(kw_only=True)
class Collector:
    """Rolls out the plans of an algorithm for all prompts and scores the pictures with `rewards`.

    `sizes` are halved when memory runs out. `first` is the place of this rank's first prompt in the iteration: noise depends on
    `seed`, the iteration and a prompt's place, not on the rank. `on_evaluations(rows)` is called after each network call.
    """

    policy: Policy
    rewards: Mapping[str, Reward]
    config: SamplingConfig
    sigmas: Tensor
    sizes: BatchSizes
    shards: Replicated
    seed: int
    first: int
    tail_network: TailNetwork | None
    on_evaluations: Callable[[int], None]

    def collect(
        self,
        algorithm: Algorithm,
        iteration: int,
        cond: Cond,
        prompts: Sequence[str],
        watch: Stopwatch,
        everybody: Sequence[Sequence[str]] | None = None,
    ) -> Collected:
        """The rollouts of all prompts, one per row of `cond`.

        With `everybody`, the prompts of every rank, ranks that have finished take over units of those that have not. Where
        rewards are waited for, another thread decodes and scores a unit's pictures while the next is rolled out; the last ones
        are scored here, after that thread has ended, so that no reward is called by two threads at once.
        """
        plans = plans_of(algorithm, self.config.num_steps, iteration, self.seed)
        drawn = Drawn(plans, algorithm.group_size, algorithm.kernel(self.sigmas), partial(self.noise, iteration))
        shared = everybody is not None and self.shards.world.size > 1 and not self._together
        works = [Work(cond, prompts, self.first, self.prompts_at_once(drawn, len(prompts), shared))]
        if shared and everybody is not None:
            works = works_of_all(self.shards.world, works[0], everybody, self.policy.device)
        return self._collect(drawn, works, watch)

    def anchors(self, candidates: int, iteration: int, cond: Cond, prompts: Sequence[str], watch: Stopwatch) -> Collected:
        """The ODE's picture of each prompt, `candidates` for every place, from the noise of that place's anchor."""

        def noise(place: int, *purpose: Any) -> torch.Generator:
            return self.noise(iteration, place // candidates, "initial")

        drawn = Drawn([anchor_walk(self.config.num_steps)], 1, no_kernel, noise)
        size = self.prompts_at_once(drawn, len(prompts))
        return self._collect(drawn, [Work(cond, prompts, candidates * self.first, size)], watch)

    @property
    def _together(self) -> bool:
        """Whether ranks make every call of the network together, so that none can make another's."""
        return "rollout" in self.shards.in_step

    def _collect(self, drawn: Drawn, works: Sequence[Work], watch: Stopwatch) -> Collected:
        if self.tail_network is not None:
            self.tail_network.refresh()
        world = self.shards.world
        with ThreadPoolExecutor(1, "scoring", initializer=same_device(self.policy.device)) as thread:
            collection = Collection(self, drawn, works, Queue(world, works), thread, watch)
            with self.shards.sampling():
                collection.roll_out_all(aside=self.scores_aside, last_too=self._together)
            watch.lap("rollout")  # others may have taken all units, and every row of the log has this phase
            collection.score_all()
        done = collection.done()
        if len(works) > 1:
            done = returned(world, done, drawn.plans, self.policy.device)
            watch.lap("waiting")
        rollouts = [rollout for unit in sorted(done) for rollout in done[unit][0]]
        rewards = torch.cat([done[unit][1] for unit in sorted(done)])
        return Collected(rollouts, rewards, collection.evaluations, sum(collection.aside.seconds.values()))

    @property
    def scores_aside(self) -> bool:
        """Whether another thread scores during rollouts: with `sampling.prompts_at_once`, or where a reward is waited for.

        Raises UserError where that would change the precision of a rollout.
        """
        chosen = self.config.prompts_at_once is not None
        if exact := [name for name, reward in self.rewards.items() if getattr(reward, "tf32", False)]:
            if chosen:
                raise UserError(TF32_ASIDE.format(exact[0]))
            return False
        return chosen or any(waited_for(reward, self.policy.device) for reward in self.rewards.values())

    def prompts_at_once(self, drawn: Drawn, every: int, shared: bool = False) -> int:
        """The prompts of a unit: `sampling.prompts_at_once`; by default all, and where another thread scores, or with `shared`
        units, as many as fill a batch of the network."""
        chosen = self.config.prompts_at_once
        if chosen is None and (self.scores_aside or shared):
            chosen = max(1, self.sizes.rollout // (len(drawn.plans) * drawn.group_size))
        return min(chosen or every, every)

    def roll_out(self, drawn: Drawn, work: Work, rows: Sequence[int]) -> tuple[list[Rollout], int]:
        """The rollouts of the prompts in `rows` of `work`, and the number of network evaluations."""
        engine = Engine(
            policy=self.policy,
            cond=work.cond.rows(rows),
            sigmas=self.sigmas,
            batch_size=self.sizes.rollout,
            **self.config.dtypes,
            tails=self.config.tails,
            tail_velocity=self.tail_network.velocity if self.tail_network is not None else None,
            on_rows=self.on_evaluations,
        )
        try:
            rollouts = engine.rollout(
                drawn.plans,
                drawn.group_size,
                drawn.kernel,
                lambda prompt, *purpose: drawn.noise(work.first + rows[prompt], *purpose),
            )
        except OutOfMemory:
            self.on_evaluations(-engine.evaluations)  # they will be repeated
            raise
        return [replace(rollout, prompt=rows[rollout.prompt]) for rollout in rollouts], engine.evaluations

    def noise(self, iteration: int, place: int, *purpose: Any) -> torch.Generator:
        """The generator of a prompt for one purpose of the engine, by the prompt's place in the iteration."""
        return generator_for(self.seed, "rollout", iteration, place, *purpose)


def waited_for(reward: Reward, device: torch.device) -> bool:
    """Whether scores come from elsewhere (`waits`), or are computed on another device than the accelerator `device`."""
    if getattr(reward, "waits", False):
        return True
    if device.type == "cpu":
        return False
    own = getattr(reward, "device", None)
    if not isinstance(own, torch.device):
        return True
    return own.type != device.type or (None not in (own.index, device.index) and own.index != device.index)


@dataclass
class Collection:
    """The units of one iteration that this rank rolls out and scores."""

    collector: Collector
    drawn: Drawn
    works: Sequence[Work]
    queue: Queue
    thread: ThreadPoolExecutor
    watch: Stopwatch
    aside: Stopwatch = field(default_factory=Stopwatch)
    """The time of scoring in the other thread."""
    evaluations: int = 0
    rolled: dict[Unit, list[Rollout]] = field(default_factory=dict)
    scores: dict[Unit, Tensor] = field(default_factory=dict)
    scoring: dict[Unit, Future[Tensor]] = field(default_factory=dict)

    def roll_out_all(self, aside: bool, last_too: bool) -> None:
        """Rolls out units until none is left. With `aside` the other thread scores all but the last; with `last_too` also that.

        Shared units are scored as they come, so that a rank takes no more than it can score.
        """
        unit = self.queue.take()
        while unit is not None:
            self._roll_out(unit)
            if not aside and len(self.works) > 1:
                self.scores[unit] = self._score(unit, self.watch)
            self._keep_up()
            following = self.queue.take()
            if (aside and following is not None) or last_too:
                self.scoring[unit] = self.thread.submit(self._score_aside, unit)
            unit = following

    def score_all(self) -> None:
        """Waits for the other thread, then scores what it has not."""
        for unit, future in self.scoring.items():
            self.scores[unit] = future.result()
        self.watch.lap("waiting")
        for unit in self.rolled:
            if unit not in self.scores:
                self.scores[unit] = self._score(unit, self.watch)

    def done(self) -> dict[Unit, Result]:
        """Rollouts and rewards [N, R, M, G] of every unit."""
        return {unit: (rollouts, self.scores[unit]) for unit, rollouts in self.rolled.items()}

    def _roll_out(self, unit: Unit) -> None:
        collector, work = self.collector, self.works[unit[0]]
        self.rolled[unit], spent = collector.sizes.fit(lambda: collector.roll_out(self.drawn, work, work.rows(unit[1])))
        self.evaluations += spent
        self.watch.lap("rollout")

    def _keep_up(self) -> None:
        """With shared units, waits while two are unscored: other ranks may be faster."""
        unscored = [future for future in self.scoring.values() if not future.done()]
        if len(self.works) > 1 and len(unscored) > 1:
            unscored[-2].result()
            self.watch.lap("waiting")

    def _score_aside(self, unit: Unit) -> Tensor:
        self.aside.restart()
        return self._score(unit, self.aside)

    def _score(self, unit: Unit, watch: Stopwatch) -> Tensor:
        it, prompts = self.collector, self.works[unit[0]].prompts
        return it.sizes.fit(lambda: score_rollouts(it.policy, self.rolled[unit], it.rewards, prompts, it.sizes.decode, watch))
