"""The first half of an iteration: prompts -> rollouts -> rewards, in batches that fit, scoring while the next are sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from g2rpo.config.schema import SamplingConfig
from g2rpo.core.capabilities import waits
from g2rpo.core.contracts import plans_of
from g2rpo.core.data import Precision
from g2rpo.core.seeding import generator_for
from g2rpo.core.types import Algorithm, Cond, Kernel, Plan, Policy, Reward, Rollout, no_kernel
from g2rpo.rollout.engine import Engine, Noise
from g2rpo.rollout.planning import anchor_walk
from g2rpo.rollout.scoring import score_rollouts
from g2rpo.runtime.devices import same_device
from g2rpo.runtime.distributed import World
from g2rpo.runtime.memory import BatchSizes, OutOfMemory
from g2rpo.runtime.sharding import Replicated
from g2rpo.training.stopwatch import Stopwatch


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
class Groups:
    """The groups of this rank in an iteration, with the rewards [N, R, M, G] of all ranks."""

    algorithm: Algorithm
    prompts: Sequence[str]
    cond: Cond
    collected: Collected
    rewards: Tensor
    chosen_from: Sequence[Collected]
    """The samples from which the prompts were chosen, if the algorithm chooses."""
    learnt: Mapping[str, float]
    """What rewards that learn have to log."""


@dataclass(frozen=True)
class RolloutSpec:
    """The samples to draw for every prompt."""

    plans: Sequence[Plan]
    group_size: int
    kernel: Kernel
    noise: Noise
    """`noise(place, *purpose)`: the generator for a prompt by its place in the iteration."""
    first: int
    """The place of this rank's first prompt."""


@dataclass(kw_only=True)
class Collector:
    """Rolls out the plans of an algorithm for all prompts and scores the pictures with `rewards`.

    `sizes` are halved when memory runs out. `first` is the place of this rank's first prompt in the iteration: noise depends on
    `seed`, the iteration and a prompt's place, not on the rank. `among` are the ranks that share a prompt's plans.
    `on_evaluations(rows)` is called after each network call.
    """

    policy: Policy
    rewards: Mapping[str, Reward]
    config: SamplingConfig
    precision: Precision
    sigmas: Tensor
    sizes: BatchSizes
    shards: Replicated
    seed: int
    first: int
    among: World
    on_evaluations: Callable[[int], None]

    def collect(self, algorithm: Algorithm, iteration: int, cond: Cond, prompts: Sequence[str], watch: Stopwatch) -> Collected:
        """The rollouts of all prompts, one per row of `cond`.

        If rewards wait for answers, another thread decodes and scores some prompts' pictures while the next are rolled out.
        The last ones are scored here, after that thread has ended, so that no reward is called by two threads at once.
        """
        plans = self.among.shard(self.plans(algorithm, iteration))
        noise = partial(self.noise, iteration)
        spec = RolloutSpec(plans, algorithm.group_size, algorithm.kernel(self.sigmas), noise, self.first)
        return self._collect(spec, cond, prompts, watch)

    def plans(self, algorithm: Algorithm, iteration: int) -> list[Plan]:
        """The plans of every prompt, over all ranks."""
        return plans_of(algorithm, self.config.num_steps, iteration, self.seed)

    def anchors(self, candidates: int, iteration: int, cond: Cond, prompts: Sequence[str], watch: Stopwatch) -> Collected:
        """The ODE's picture of each prompt, `candidates` for every place, from the noise of that place's anchor."""

        def noise(place: int, *purpose: Any) -> torch.Generator:
            return self.noise(iteration, place // candidates, "initial")

        spec = RolloutSpec([anchor_walk(self.config.num_steps)], 1, no_kernel, noise, candidates * self.first)
        return self._collect(spec, cond, prompts, watch)

    def _collect(self, spec: RolloutSpec, cond: Cond, prompts: Sequence[str], watch: Stopwatch) -> Collected:
        size = self.prompts_at_once(spec, len(prompts))
        parts = [range(len(prompts))[start : start + size] for start in range(0, len(prompts), size)]
        # with sharded weights a rank takes part in the others' calls until all have sampled, and scores meanwhile
        together = "rollout" in self.shards.in_step
        rolled: list[list[Rollout]] = []
        scoring: list[Future[Tensor]] = []
        evaluations, aside = 0, Stopwatch()

        def scored(part: Sequence[Rollout], watch: Stopwatch) -> Callable[[], Tensor]:
            return partial(score_rollouts, self.policy, part, self.rewards, prompts, self.sizes, watch.lap)

        def score_aside(part: Sequence[Rollout]) -> Tensor:
            aside.restart()
            return self.sizes.fit(scored(part, aside))

        with ThreadPoolExecutor(1, "scoring", initializer=same_device(self.policy.device)) as thread:
            try:
                with self.shards.sampling():
                    for rows in parts:
                        for done in filter(Future.done, scoring):
                            done.result()  # a reward that failed ends the rest
                        rollouts, spent = self.sizes.fit(partial(self.roll_out, spec, cond, rows))
                        rolled.append(rollouts)
                        evaluations += spent
                        watch.lap("rollout")
                        if together or rows is not parts[-1]:
                            scoring.append(thread.submit(score_aside, rollouts))
                watch.lap("rollout")
                rewards = [future.result() for future in scoring]
                watch.lap("waiting")
            except BaseException:
                thread.shutdown(wait=False, cancel_futures=True)  # else leaving waits for all that was submitted
                raise
            rewards += map(self.sizes.fit, [scored(part, watch) for part in rolled[len(rewards) :]])
        return Collected([one for part in rolled for one in part], torch.cat(rewards), evaluations, sum(aside.seconds.values()))

    @property
    def scores_aside(self) -> bool:
        """Whether another thread scores during rollouts: with `sampling.prompts_at_once`, or if a reward waits for an
        answer."""
        chosen = self.config.prompts_at_once is not None
        return chosen or any(waited_for(reward, self.policy.device) for reward in self.rewards.values())

    def prompts_at_once(self, spec: RolloutSpec, every: int) -> int:
        """`sampling.prompts_at_once`; by default all, or where another thread scores as many as fill a batch."""
        chosen = self.config.prompts_at_once
        if chosen is None and self.scores_aside:
            chosen = max(1, self.sizes.rollout // (len(spec.plans) * spec.group_size))
        return min(chosen or every, every)

    def roll_out(self, spec: RolloutSpec, cond: Cond, rows: Sequence[int]) -> tuple[list[Rollout], int]:
        """The rollouts of the prompts in `rows` of `cond`, and the number of network evaluations."""
        engine = Engine(
            policy=self.policy,
            cond=cond.rows(list(rows)),
            sigmas=self.sigmas,
            batch_size=self.sizes.rollout,
            precision=self.precision,
            tails=self.config.tails,
            on_rows=self.on_evaluations,
        )
        try:
            rollouts = engine.rollout(
                spec.plans,
                spec.group_size,
                spec.kernel,
                lambda prompt, *purpose: spec.noise(spec.first + rows[prompt], *purpose),
            )
        except OutOfMemory:
            self.on_evaluations(-engine.evaluations)  # they will be repeated
            raise
        return [replace(rollout, prompt=rows[rollout.prompt]) for rollout in rollouts], engine.evaluations

    def noise(self, iteration: int, place: int, *purpose: Any) -> torch.Generator:
        """The generator of a prompt for one purpose of the engine, by the prompt's place in the iteration."""
        return generator_for(self.seed, "rollout", iteration, place, *purpose)


def waited_for(reward: Reward, device: torch.device) -> bool:
    """Whether scores come from another process (`waits`) or another device than the accelerator `device`."""
    own = reward.device
    if waits(reward) or device.type == "cpu":
        return waits(reward)
    if not isinstance(own, torch.device):  # a user's may be anything
        return True
    return own.type != device.type or (None not in (own.index, device.index) and own.index != device.index)
