"""An iteration of training: prompts -> rollout -> rewards -> advantages -> loss -> step.

`Trainer.iterate` calls `sample_groups`, `advantages` and `learn_from` in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from g2rpo.config.schema import Config
from g2rpo.core.contracts import advantages_of
from g2rpo.core.data import Cond, Row
from g2rpo.core.distributed import World
from g2rpo.core.types import Algorithm, AlgorithmState, Policy, Reward
from g2rpo.data.prompts import PromptOrder
from g2rpo.rollout.guidance import guided_by
from g2rpo.rollout.memory import BatchSizes
from g2rpo.rollout.scoring import compared, weighted_scores
from g2rpo.train.collector import Collector, Groups, RolloutSpec
from g2rpo.train.learner import Learner
from g2rpo.train.ranks import Division
from g2rpo.train.rows import of_cost, of_groups
from g2rpo.train.stopwatch import Stopwatch
from g2rpo.train.updater import Updater, UpdateStats


@dataclass(repr=False, kw_only=True)
class Loop:
    """Iterations of `algorithm` (or of its state) on `rewards` with these `weights`.

    It knows no clock, alarm, file or tracker. On several ranks each has a loop, with its `division`
    of the prompts.
    """

    config: Config
    policy: Policy
    rewards: Mapping[str, Reward]
    weights: Tensor
    algorithm: Algorithm
    algorithm_state: AlgorithmState | None
    order: PromptOrder
    division: Division
    collector: Collector
    updater: Updater
    learner: Learner
    sizes: BatchSizes
    world: World
    find_sizes: Callable[[Cond], None] = lambda cond: None
    """Finds batch sizes before the first rollout; the trainer sets it (`parts.find_sizes`)."""
    iteration: int = 0

    def sample_groups(self) -> Groups:
        """Prompts -> rollout -> rewards: the groups of the current iteration."""
        watch, prompts = Stopwatch(), self.prompts_of(self.iteration)
        cond = self.policy.encode(prompts)
        watch.lap("encode")
        self.find_sizes(cond)
        with self._sampling():
            algorithm = self.algorithm_now()
            spec = self.collector.own_spec(algorithm, self.iteration)
            collected = self.collector.collect(spec, cond, prompts, watch)
            # an algorithm may look at the whole batch
            scores = self.world.gather(collected.scores)
            watch.lap("waiting")
        return Groups(algorithm, prompts, cond, spec, collected, scores, watch)

    def sample_others(
        self, prompts: Sequence[str], algorithm: Algorithm, spec: RolloutSpec
    ) -> Groups:
        """The same for any prompts of this rank, sampled and scored as `spec` says. Teaching by
        clicks samples its groups so (`Trainer.sample_groups`)."""
        watch, cond = Stopwatch(), self.policy.encode(prompts)
        with self._sampling():
            collected = self.collector.collect(spec, cond, prompts, watch)
        return Groups(
            algorithm, prompts, cond, spec, collected, self.world.gather(collected.scores), watch
        )

    def advantages(self, groups: Groups) -> Tensor:
        """Rewards -> advantages [N, G] of all ranks' groups."""
        _, rewards = compared(groups.scores, groups.spec.group_size)
        return advantages_of(groups.algorithm, rewards, self.weights)

    def learn_from(self, groups: Groups, advantages: Tensor) -> Row:
        """Advantages [N, G] of all ranks' groups -> loss -> step: ends an iteration; returns its
        metrics."""
        stats, rate = self._update(groups, self.world.shard(advantages))
        groups.watch.lap("update")
        plans = self.collector.plans(groups.algorithm, self.iteration)
        plans *= len(groups.rewards) // len(plans)  # of every group: prompt by prompt, K plans each
        state_log: dict[str, float] = {}
        if self.algorithm_state is not None:
            branches = [plan.branch for plan in plans]
            state_log = self.algorithm_state.observe(
                self.iteration, branches, groups.rewards, self.weights
            )
        self.iteration += 1
        names, clip = list(self.rewards), groups.algorithm.advantage_clip
        return {
            "kind": "train",
            "iteration": self.iteration,
            **of_groups(plans, names, groups.rewards, advantages, clip),
            **state_log,
            **stats.summary(groups.algorithm),
            "learning_rate": rate,
            **of_cost(groups.collected, self.world, self.sizes, groups.watch, self.policy.device),
        }

    def _update(self, groups: Groups, advantages: Tensor) -> tuple[UpdateStats, float]:
        """Optimizer steps on this rank's groups; returns their statistics and the learning rate."""
        self.updater.algorithm = groups.algorithm
        if self.algorithm.uses_rewards:
            self.updater.reward = partial(
                weighted_scores,
                self.policy,
                self.rewards,
                self.weights,
                groups.prompts,
            )
        rate = self.learner.set_rate(self.iteration, self.config.trainer.iterations)
        with guided_by(self.policy, self.config.sampling.guidance_scale):
            stats = self.updater.update(groups.examples(advantages), groups.cond)
        self.learner.update_average()
        if self.algorithm.uses_old:
            self.learner.update_old(self.algorithm.old_decay(self.learner.steps))
        return stats, rate

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """While entered, the policy has the weights and guidance of rollouts."""
        algorithm = self.algorithm
        old = algorithm.uses_old and algorithm.samples_old(self.learner.steps)
        weights = self.learner.as_old() if old else nullcontext()
        with weights, guided_by(self.policy, self.config.sampling.guidance_scale):
            yield

    def algorithm_now(self) -> Algorithm:
        """The algorithm of the current iteration: the config's, or its state's
        (`AlgorithmState.at`)."""
        return (
            self.algorithm
            if self.algorithm_state is None
            else self.algorithm_state.at(self.iteration)
        )

    def prompts_of(self, iteration: int) -> list[str]:
        """This rank's prompts of an iteration."""
        places = self.config.trainer.prompts_per_iteration
        return self.division.prompts.shard(self.order.batch(iteration, places))
