"""The first half of an iteration: prompts -> rollouts -> rewards, in batches that fit, scoring
while the next are sampled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from g2rpo.config.schema import Config
from g2rpo.config.work import plans_in
from g2rpo.core.contracts import plans_of
from g2rpo.core.data import Cond, Example
from g2rpo.core.devices import same_device
from g2rpo.core.events import doing
from g2rpo.core.noise import generator_for
from g2rpo.core.plans import Plan, Rollout
from g2rpo.core.rewards import Reward
from g2rpo.core.types import Algorithm, Kernel, Policy
from g2rpo.models.sharding import Replicated
from g2rpo.rollout.engine import Engine, Noise
from g2rpo.rollout.guidance import sized
from g2rpo.rollout.memory import BatchSizes, OutOfMemory
from g2rpo.rollout.scoring import decode_rollout, of_members, score_rollouts
from g2rpo.train.ranks import Division


@dataclass(frozen=True)
class Collected:
    """The rollouts of one iteration on this rank, with their rewards and cost."""

    rollouts: list[Rollout]
    scores: Tensor  # [N, R, M, G], or [N, R, M, G + 1] with a baseline (`scoring.above_baseline`)
    evaluations: int
    """Network evaluations, one latent each."""
    seconds_overlapped: float
    """Seconds of decoding and scoring during the rollouts of other prompts."""

    @property
    def pictures(self) -> int:
        """How many were decoded and scored."""
        return sum(rollout.pictures for rollout in self.rollouts)

    @property
    def rewards(self) -> Tensor:
        """Of the members, [N, R, M, G]."""
        return of_members(self.scores, self.rollouts[0].finals.shape[1])


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
    rewards: Mapping[str, Reward]
    """By which the pictures are scored."""


@dataclass(frozen=True)
class Groups:
    """The groups of this rank, one for each prompt and plan, with the scores of all ranks' groups
    (`scoring.above_baseline`)."""

    algorithm: Algorithm
    prompts: Sequence[str]
    cond: Cond
    spec: RolloutSpec
    collected: Collected
    scores: Tensor
    watch: Stopwatch
    """Of the seconds that they took."""

    @property
    def rewards(self) -> Tensor:
        """[N, R, M, G], of the members of all ranks' groups."""
        return of_members(self.scores, self.spec.group_size)

    def examples(self, advantages: Tensor) -> list[Example]:
        """What is learnt from with advantages [N, G] of this rank's groups."""
        found: list[Example] = []
        for rollout, values in zip(self.collected.rollouts, advantages, strict=True):
            place = self.spec.first + rollout.prompt
            draw = partial(self.spec.noise, place, "examples", rollout.plan.branch)
            found += self.algorithm.examples(rollout, values, draw)
        return found


@dataclass(kw_only=True)
class Collector:
    """Rolls out the plans of an algorithm for all prompts and scores the pictures with `rewards`.

    `sizes` are halved when memory runs out. Noise depends on the config's seed, the iteration and a
    prompt's place in it, not on the rank, whose prompts and plans are its `division`'s.
    `on_evaluations(rows)` is called after each network call.
    """

    config: Config
    policy: Policy
    rewards: Mapping[str, Reward]
    sigmas: Tensor
    sizes: BatchSizes
    shards: Replicated
    division: Division
    on_evaluations: Callable[[int], None]

    @property
    def first(self) -> int:
        """The place of this rank's first prompt in an iteration."""
        return self.division.by_prompt.first(self.config.trainer.prompts_per_iteration)

    def spec(
        self,
        algorithm: Algorithm,
        iteration: int,
        noise: Noise | None = None,
        rewards: Mapping[str, Reward] | None = None,
    ) -> RolloutSpec:
        """All plans of an algorithm, from other noise or scored by other rewards than an
        iteration's."""
        return RolloutSpec(
            plans=self.plans(algorithm, iteration),
            group_size=algorithm.group_size,
            kernel=algorithm.kernel(self.sigmas),
            noise=noise or partial(self.noise, iteration),
            first=0,
            rewards=self.rewards if rewards is None else rewards,
        )

    def own_spec(self, algorithm: Algorithm, iteration: int) -> RolloutSpec:
        """What this rank draws in an iteration."""
        spec = self.spec(algorithm, iteration)
        return replace(spec, plans=self.division.by_plan.shard(list(spec.plans)), first=self.first)

    def plans(self, algorithm: Algorithm, iteration: int) -> list[Plan]:
        """The plans of every prompt, over all ranks."""
        return plans_of(
            algorithm, self.config.sampling.num_steps, iteration, self.config.trainer.seed
        )

    def plans_of(self, groups: Groups, iteration: int) -> list[Plan]:
        """The plan of every group of all ranks: prompt by prompt, K plans each."""
        plans = self.plans(groups.algorithm, iteration)
        return plans * (len(groups.rewards) // len(plans))

    def find_sizes(self, algorithm: Algorithm, iteration: int, cond: Cond, heldout: int) -> None:
        """Measures batch sizes that are `auto`, up to the largest that an iteration, or an
        evaluation of `heldout` prompts of this rank, can use."""
        if not self.sizes.auto:
            return
        c, policy, division = self.config, self.policy, self.division
        plans = division.by_plan.shard(plans_in(c, iteration))
        prompts = division.own(c.trainer.prompts_per_iteration)
        members = prompts * len(plans) * algorithm.group_size
        size = c.judged_size  # the larger of the two is measured
        larger = size is not None and math.prod(size) > c.policy.height * c.policy.width
        # with its own guidance, whose calls are no smaller than training's (`consistency`)
        with self.shards.sampling(), sized(policy, size if larger else None):
            noise = policy.noise([generator_for("memory")])
            self.sizes.find(policy, cond.rows([0]), noise, max(members, heldout))

    def pictures(self, groups: Groups) -> list[Tensor]:
        """The pictures [M, G, 3, H, W] in [0, 1], or clips, of each group, by tails and members."""
        return [
            self.sizes.fit(partial(decode_rollout, self.policy, one, self.sizes))
            for one in groups.collected.rollouts
        ]

    def collect(
        self, spec: RolloutSpec, cond: Cond, prompts: Sequence[str], watch: Stopwatch
    ) -> Collected:
        """The rollouts of all prompts, one per row of `cond`.

        If rewards wait for answers, another thread decodes and scores some prompts' pictures while
        the next are rolled out. The last ones are scored here, after that thread has ended, so that
        no reward is called by two threads at once.
        """
        size = self.prompts_at_once(spec, len(prompts))
        parts = [
            range(len(prompts))[start : start + size] for start in range(0, len(prompts), size)
        ]
        # with sharded weights a rank takes part in the others' calls until all have sampled, and
        # scores meanwhile
        together = "rollout" in self.shards.in_step
        rolled: list[list[Rollout]] = []
        scoring: list[Future[Tensor]] = []
        evaluations, aside = 0, Stopwatch()

        def scored(part: Sequence[Rollout], watch: Stopwatch) -> Callable[[], Tensor]:
            return partial(
                score_rollouts, self.policy, part, spec.rewards, prompts, self.sizes, watch.lap
            )

        def score_aside(part: Sequence[Rollout]) -> Tensor:
            aside.restart()
            return self.sizes.fit(scored(part, aside))

        with ThreadPoolExecutor(
            1, "scoring", initializer=same_device(self.policy.device)
        ) as thread:
            try:
                with self.shards.sampling(), doing("drawing groups"):
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
                # else leaving waits for all that was submitted
                thread.shutdown(wait=False, cancel_futures=True)
                raise
            rewards += map(self.sizes.fit, [scored(part, watch) for part in rolled[len(rewards) :]])
        return Collected(
            [one for part in rolled for one in part],
            torch.cat(rewards),
            evaluations,
            sum(aside.seconds.values()),
        )

    def prompts_at_once(self, spec: RolloutSpec, every: int) -> int:
        """How many prompts are rolled out together, of `every`: all or, if a reward waits for an
        answer or is on another device than the network, as many as fill a batch, while another
        thread decodes and scores the pictures of earlier ones."""
        if any(waited_for(reward, self.policy.device) for reward in spec.rewards.values()):
            fitting = self.sizes.rollout // (len(spec.plans) * spec.group_size)
            return min(every, max(1, fitting))
        return every

    def roll_out(
        self, spec: RolloutSpec, cond: Cond, rows: Sequence[int]
    ) -> tuple[list[Rollout], int]:
        """The rollouts of the prompts in `rows` of `cond`, and the number of network
        evaluations."""
        engine = Engine(
            policy=self.policy,
            cond=cond.rows(list(rows)),
            sigmas=self.sigmas,
            batch_size=self.sizes.rollout,
            precision=self.config.precision,
            tails=self.config.sampling.tails,
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
        return [
            replace(rollout, prompt=rows[rollout.prompt]) for rollout in rollouts
        ], engine.evaluations

    def noise(self, iteration: int, place: int, *purpose: Any) -> torch.Generator:
        """The generator of a prompt for one purpose of the engine, by the prompt's place in the
        iteration."""
        return generator_for(self.config.trainer.seed, "rollout", iteration, place, *purpose)


def waited_for(reward: Reward, device: torch.device) -> bool:
    """Whether scores come from another process (`Reward.waits`) or another device than the accelerator
    `device`."""
    own = reward.device
    if reward.waits or device.type == "cpu":
        return reward.waits
    if not isinstance(own, torch.device):  # a user's may be anything
        return True
    return own.type != device.type or (
        None not in (own.index, device.index) and own.index != device.index
    )


@dataclass
class Stopwatch:
    """Seconds by phase on `clock`."""

    seconds: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Discards the time since the last lap."""
        self._last = self.clock()

    def lap(self, phase: str) -> None:
        """Adds the time since the last lap to `phase`."""
        now = self.clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
