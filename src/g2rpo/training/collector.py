"""The first half of an iteration: prompts -> rollouts -> rewards, in batches that fit, scoring while the next are sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
    """`noise(row, *purpose)`: the generator for a prompt's row."""


@dataclass(kw_only=True)
class Collector:
    """Rolls out the plans of an algorithm for all prompts and scores the pictures with `rewards`.

    `sizes` are halved when memory runs out. `first` is the index of this rank's first prompt in the iteration: noise depends on
    `seed`, the iteration and a prompt's index, not on the rank. `on_evaluations(rows)` is called after each network call.
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

    def collect(self, algorithm: Algorithm, iteration: int, cond: Cond, prompts: Sequence[str], watch: Stopwatch) -> Collected:
        """The rollouts of all prompts, one per row of `cond`.

        `prompts_at_once` prompts are rolled out together while another thread decodes and scores the pictures of
        earlier ones. The last ones are scored here, after that thread has ended, so that no reward is called by two threads at
        once.
        """
        plans = plans_of(algorithm, self.config.num_steps, iteration, self.seed)
        drawn = Drawn(plans, algorithm.group_size, algorithm.kernel(self.sigmas), partial(self.noise, iteration))
        return self._collect(drawn, cond, prompts, watch)

    def anchors(self, candidates: int, iteration: int, cond: Cond, prompts: Sequence[str], watch: Stopwatch) -> Collected:
        """The ODE's picture of each prompt, `candidates` for every place, from the noise of that place's anchor."""

        def noise(row: int, *purpose: Any) -> torch.Generator:
            return self.noise(iteration, row // candidates, "initial")

        return self._collect(Drawn([anchor_walk(self.config.num_steps)], 1, no_kernel, noise), cond, prompts, watch)

    def _collect(self, drawn: Drawn, cond: Cond, prompts: Sequence[str], watch: Stopwatch) -> Collected:
        rollouts, evaluations, aside = list[Rollout](), 0, Stopwatch()

        def roll_out(rows: list[int]) -> list[Rollout]:
            nonlocal evaluations
            with self.shards.sampling():
                new, spent = self.sizes.fit(lambda: self.roll_out(drawn, cond, rows))
            rollouts.extend(new)
            evaluations += spent
            watch.lap("rollout")
            return new

        def score(new: Sequence[Rollout], watch: Stopwatch) -> Tensor:
            return self.sizes.fit(lambda: score_rollouts(self.policy, new, self.rewards, prompts, self.sizes.decode, watch))

        def score_aside(new: Sequence[Rollout]) -> Tensor:
            aside.restart()
            return score(new, aside)

        if self.tail_network is not None:
            self.tail_network.refresh()
        *before, last = torch.arange(len(prompts)).split(self.prompts_at_once(drawn, len(prompts)))
        with ThreadPoolExecutor(1, "scoring", initializer=same_device(self.policy.device)) as thread:
            futures = [thread.submit(score_aside, roll_out(rows.tolist())) for rows in before]
            new = roll_out(last.tolist())
            rewards = [future.result() for future in futures]
            if before:
                watch.lap("waiting")
            rewards.append(score(new, watch))
        return Collected(rollouts, torch.cat(rewards), evaluations, sum(aside.seconds.values()))

    def prompts_at_once(self, drawn: Drawn, every: int) -> int:
        """`sampling.prompts_at_once`, or by default all, and where a reward waits as many as fill a batch of the network.

        Raises UserError where scoring aside would change the precision of a rollout.
        """
        chosen = self.config.prompts_at_once
        exact = [name for name, reward in self.rewards.items() if getattr(reward, "tf32", False)]
        if exact and chosen is not None:
            raise UserError(TF32_ASIDE.format(exact[0]))
        waiting = any(getattr(reward, "waits", False) for reward in self.rewards.values())
        if chosen is None and waiting and not exact:
            chosen = max(1, self.sizes.rollout // (len(drawn.plans) * drawn.group_size))
        return min(chosen or every, every)

    def roll_out(self, drawn: Drawn, cond: Cond, rows: Sequence[int]) -> tuple[list[Rollout], int]:
        """The rollouts of the prompts in `rows` of `cond`, and the number of network evaluations."""
        engine = Engine(
            policy=self.policy,
            cond=cond.rows(rows),
            sigmas=self.sigmas,
            batch_size=self.sizes.rollout,
            anchor_dtype=getattr(torch, self.config.anchor_dtype),
            sample_dtype=getattr(torch, self.config.sample_dtype),
            step_dtype=getattr(torch, self.config.step_dtype),
            tails=self.config.tails,
            tail_velocity=self.tail_network.velocity if self.tail_network is not None else None,
            on_rows=self.on_evaluations,
        )
        try:
            rollouts = engine.rollout(
                drawn.plans,
                drawn.group_size,
                drawn.kernel,
                lambda prompt, *purpose: drawn.noise(rows[prompt], *purpose),
            )
        except OutOfMemory:
            self.on_evaluations(-engine.evaluations)  # they will be repeated
            raise
        return [replace(rollout, prompt=rows[rollout.prompt]) for rollout in rollouts], engine.evaluations

    def noise(self, iteration: int, row: int, *purpose: Any) -> torch.Generator:
        """The generator of this rank's prompt `row` for one purpose of the engine."""
        return generator_for(self.seed, "rollout", iteration, self.first + row, *purpose)
