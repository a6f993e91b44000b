"""An iteration of training: prompts -> rollout -> rewards -> advantages -> loss -> step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from g2rpo.config.schema import Config
from g2rpo.core.capabilities import KeepsOldWeights, candidates_of, differentiates_rewards
from g2rpo.core.contracts import advantages_of, choice_of
from g2rpo.core.types import Algorithm, AlgorithmState, Cond, Example, Policy, Reward
from g2rpo.monitor.metrics import Row
from g2rpo.prompts.order import PromptOrder
from g2rpo.rollout.guidance import in_training
from g2rpo.rollout.scoring import weighted_scores
from g2rpo.runtime.distributed import World
from g2rpo.runtime.memory import BatchSizes
from g2rpo.training.collector import Collected, Collector, Groups
from g2rpo.training.learner import Learner
from g2rpo.training.ranks import Division
from g2rpo.training.reward_states import learn, looked_at, observe
from g2rpo.training.rows import of_cost, of_groups
from g2rpo.training.stopwatch import Stopwatch
from g2rpo.training.updater import Updater, UpdateStats


@dataclass(repr=False, kw_only=True)
class Loop:
    """Iterations of `algorithm` (or of its state, `memory`) on `rewards` with these `weights`.

    It knows no clock, alarm, file or tracker. On several ranks each has a loop, with its `division` of the prompts.
    """

    config: Config
    policy: Policy
    rewards: Mapping[str, Reward]
    weights: Tensor
    algorithm: Algorithm
    memory: AlgorithmState | None
    order: PromptOrder
    division: Division
    collector: Collector
    updater: Updater
    learner: Learner
    sizes: BatchSizes
    world: World
    find_sizes: Callable[[Cond], None] = lambda cond: None
    iteration: int = 0

    def iterate(self) -> tuple[Row, Groups, Tensor]:
        """Runs an iteration; returns its metrics, and this rank's groups with their advantages [N, G]."""
        watch = Stopwatch()
        groups = self.sample_groups(watch)
        advantages = advantages_of(groups.algorithm, groups.rewards, self.weights)
        own = self.world.shard(advantages)
        stats, rate = self.learn_from(groups, own)
        watch.lap("update")
        plans = self.collector.plans(groups.algorithm, self.iteration) * self.config.trainer.prompts_per_iteration
        learnt = dict(groups.learnt)
        if self.memory is not None:
            branches = [plan.branch for plan in plans]
            learnt |= self.memory.observe(self.iteration, branches, groups.rewards, self.weights)
        self.iteration += 1
        row: Row = {
            "kind": "train",
            "iteration": self.iteration,
            **of_groups(plans, list(self.rewards), groups.rewards, advantages, groups.algorithm.advantage_clip),
            **learnt,
            **stats.summary(groups.algorithm),
            "learning_rate": rate,
            **of_cost([*groups.chosen_from, groups.collected], self.world, self.sizes, watch, self.policy.device),
        }
        return row, groups, own

    def sample_groups(self, watch: Stopwatch) -> Groups:
        """Prompts -> rollout -> rewards: the groups of the current iteration."""
        prompts = self.prompts_of(self.iteration)
        cond = self.policy.encode(prompts)
        watch.lap("encode")
        self.find_sizes(cond)
        with self._sampling():
            prompts, cond, chosen_from = self._choose(prompts, cond, watch)
            algorithm = self.algorithm_now()
            collected = self.collector.collect(algorithm, self.iteration, cond, prompts, watch)
            rewards = self.world.gather(collected.rewards)  # an algorithm may look at the whole batch
            watch.lap("waiting")
            observe(self.rewards, self.iteration, rewards)
            pictures = partial(looked_at, self.policy, self.sizes, collected, prompts)
            learnt = learn(self.rewards, self.iteration, pictures, self.world)
        return Groups(algorithm, prompts, cond, collected, rewards, chosen_from, learnt)

    def learn_from(self, groups: Groups, advantages: Tensor) -> tuple[UpdateStats, float]:
        """Advantages [N, G] -> loss -> optimizer steps; returns their statistics and the learning rate."""
        self.updater.algorithm = groups.algorithm
        examples = self._examples(groups, advantages)
        if differentiates_rewards(self.algorithm):
            self.updater.reward = partial(weighted_scores, self.policy, self.rewards, self.weights, groups.prompts)
        rate = self.learner.set_rate(self.iteration, self.config.trainer.iterations)
        with in_training(self.policy, self.config.sampling.guidance_scale):
            stats = self.updater.update(examples, groups.cond)
        self.learner.update_average()
        if isinstance(self.algorithm, KeepsOldWeights):
            self.learner.update_old(self.algorithm.old_decay(self.learner.steps))
        return stats, rate

    def _examples(self, groups: Groups, advantages: Tensor) -> list[Example]:
        examples: list[Example] = []
        for rollout, values in zip(groups.collected.rollouts, advantages, strict=True):
            place = self.collector.first + rollout.prompt
            draw = partial(self.collector.noise, self.iteration, place, "examples", rollout.plan.branch)
            examples += groups.algorithm.examples(rollout, values, draw)
        return examples

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """While entered, the policy has the weights, guidance and assistant of rollouts."""
        a = self.algorithm
        old = isinstance(a, KeepsOldWeights) and a.uses_old and a.samples_old(self.learner.steps)
        weights = self.learner.as_old() if old else nullcontext()
        with weights, in_training(self.policy, self.config.sampling.guidance_scale):
            yield

    def algorithm_now(self) -> Algorithm:
        """The algorithm of the current iteration: the config's, or its state's (`AlgorithmState.at`)."""
        return self.algorithm if self.memory is None else self.memory.at(self.iteration)

    def prompts_of(self, iteration: int) -> list[str]:
        """This rank's prompts of an iteration; where the algorithm chooses among them, the candidates of each place in turn."""
        places = self.config.trainer.prompts_per_iteration
        return self.division.prompts.shard(self.order.batch(iteration, places * candidates_of(self.algorithm)))

    def _choose(self, prompts: list[str], cond: Cond, watch: Stopwatch) -> tuple[list[str], Cond, list[Collected]]:
        """The prompts chosen by the algorithm's state, their rows of `cond`, and the samples made for the choice."""
        each = candidates_of(self.algorithm)
        if each == 1:
            return prompts, cond, []
        anchors = self.collector.anchors(each, self.iteration, cond, prompts, watch)
        rewards = self.world.gather(anchors.rewards)[:, :, 0, 0].unflatten(0, (-1, each))
        chosen = choice_of(self.algorithm, self.memory, self.iteration, rewards, self.weights)
        first = self.division.prompts.first(len(chosen))
        rows = [place * each + chosen[first + place] for place in range(len(prompts) // each)]
        return [prompts[row] for row in rows], cond.rows(rows), [anchors]
