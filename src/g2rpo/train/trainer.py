"""A run: its iterations, with evaluations and checkpoints in between.

An iteration goes prompts -> rollout -> rewards -> advantages -> loss -> step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from g2rpo.config.algorithms import faults_of_gradients
from g2rpo.config.schema import Config, grid_of
from g2rpo.config.work import plans_in
from g2rpo.core.contracts import advantages_of, check_own_advantages
from g2rpo.core.data import Cond, Row
from g2rpo.core.distributed import World
from g2rpo.core.errors import Preempted, refuse
from g2rpo.core.events import doing
from g2rpo.core.plans import Plan
from g2rpo.core.rewards import Reward, as_rewards
from g2rpo.core.statistics import Comparison
from g2rpo.core.types import Algorithm, Policy
from g2rpo.data.prompts import PromptOrder
from g2rpo.models.sharding import WHOLE, Replicated
from g2rpo.rollout.engine import Noise
from g2rpo.rollout.guidance import check_guidance, guided_by
from g2rpo.rollout.scoring import above_baseline, weighted_scores
from g2rpo.train.collector import Groups, Stopwatch
from g2rpo.train.evaluation.heldout import Evaluation
from g2rpo.train.first_group import FirstGroup
from g2rpo.train.learner import Learner, Snapshot
from g2rpo.train.listeners import Ask, Checkpoints, EarlyStop, Evaluations, Log, TimeLimit, asked_by
from g2rpo.train.model_card import write_card
from g2rpo.train.monitor.alarms import alarms_of
from g2rpo.train.monitor.trackers import TensorBoard, Tracker
from g2rpo.train.parts import collector_of, evaluator_of, persistence_of, sizes_of, updater_of
from g2rpo.train.persistence import stateful
from g2rpo.train.ranks import divided
from g2rpo.train.rows import cost_metrics, group_metrics
from g2rpo.train.run.folder import Run
from g2rpo.train.updater import UpdateStats


@dataclass(repr=False, kw_only=True)
class Trainer:
    """Trains `policy` on `rewards` by `config`, and writes `run_dir`.

    `judges` are rewards that score held-out pictures and are not trained on. `run_dir=None` writes
    nothing. `notify` is called when batch sizes are found, or halved because memory ran out, and
    when `trackers` fail. `shards` holds the ranks and the placement of the weights: every rank has a
    trainer, with its share of the prompts; rank 0 writes. After `stopping` is set on any rank,
    `train` saves after the current iteration, or during an evaluation, and raises `Preempted`.
    `began` is when the process started, by `time.monotonic`: `trainer.max_hours` count from it.
    """

    config: Config
    policy: Policy
    rewards: Mapping[str, Reward]
    prompts: Sequence[str]
    heldout: Sequence[str]
    judges: Mapping[str, Reward] = field(default_factory=dict)
    run_dir: Path | None = None
    notify: Callable[[str], None] = print
    shards: Replicated = WHOLE
    on_evaluations: Callable[[int], None] = lambda rows: None
    trackers: Sequence[Tracker] = field(default_factory=lambda: [TensorBoard()])
    began: float = field(default_factory=time.monotonic)
    iteration: int = field(default=0, init=False)
    """How many iterations are done."""
    stopping: bool = field(default=False, init=False)
    final: Evaluation | None = field(default=None, init=False)
    """The evaluation of the weights as they are, if there is one."""

    def train(self) -> Iterator[Row]:
        """Runs the remaining iterations; yields a row per iteration and per evaluation as they are
        logged."""
        with self.listening():
            yield from self._done_as_asked()
            while self.iteration < self.config.trainer.iterations:
                yield self.iterate()
                yield from self._done_as_asked()

    def iterate(self) -> Row:
        """Runs one iteration; returns its metrics."""
        groups = self.sample_groups()
        return self.learn_from(groups, self.advantages(groups))

    def sample_groups(
        self,
        prompts: Sequence[str] | None = None,
        algorithm: Algorithm | None = None,
        noise: Noise | None = None,
        rewards: Mapping[str, Reward] | None = None,
    ) -> Groups:
        """Prompts -> rollout -> rewards: the current iteration's groups on this rank, with the
        rewards of all ranks'.

        With `prompts` groups of these, each rank of its own: sampled by the plans and group size of
        `algorithm`, from `noise(place of the prompt, *purpose)`, and scored by `rewards` (none:
        {}); by default the iteration's.
        """
        watch, collector, iteration = Stopwatch(), self.collector, self.iteration
        with self.run.naming(iteration):
            own = self.prompts_of(iteration) if prompts is None else prompts
            cond = self.policy.encode(own)
            watch.lap("encode")
            self._find_sizes(cond)
            with self._sampling():
                algorithm = algorithm or self.algorithm_now()
                if prompts is None:
                    spec = collector.own_spec(algorithm, iteration)
                else:
                    spec = collector.spec(algorithm, iteration, noise, rewards)
                collected = collector.collect(spec, cond, own, watch)
                # an algorithm may look at the whole batch
                scores = self.world.gather(collected.scores)
                watch.lap("waiting")
        return Groups(algorithm, own, cond, spec, collected, scores, watch)

    def advantages(self, groups: Groups) -> Tensor:
        """Rewards -> advantages [N, G] of all ranks' groups."""
        rewards = above_baseline(groups.scores, groups.spec.group_size)
        return advantages_of(groups.algorithm, rewards, self.reward_weights)

    def learn_from(self, groups: Groups, advantages: Tensor) -> Row:
        """Advantages -> loss -> step: takes optimizer steps on groups with finite `advantages` [N,
        G], of all ranks' groups as `groups.rewards`. That ends the iteration and returns its row,
        which listeners hear."""
        check_own_advantages(groups.rewards, list(self.rewards), advantages)
        self.final, own = None, self.world.shard(advantages)
        with self.run.naming(self.iteration), doing("learning from groups"):
            stats = self._update(groups, own)
            groups.watch.lap("update")
            plans = self.collector.plans_of(groups, self.iteration)
            state_log = self._observed(groups, plans)
            self.iteration += 1
            row: Row = {
                "kind": "train",
                "iteration": self.iteration,
                **group_metrics(plans, list(self.rewards), groups, advantages),
                **state_log,
                **stats.summary(groups.algorithm),
                "learning_rate": self.learner.rate,
                **cost_metrics(groups, self.world, self.sizes, self.policy.device),
            }
        for listener in self.listeners:
            listener.hear_groups(groups, own)
        return self._heard(row)

    def evaluate(self) -> Row:
        """Evaluates the (averaged) weights on held-out prompts, which after no iteration are the
        base's; returns the row for the log."""
        watch = Stopwatch()
        evaluation = self.final = self.score_heldout()
        if self.iteration == 0:
            self.early_stop.check_base(evaluation.scores)
        spread = self.evaluator.spread(self.iteration, self._leave_if_asked)
        watch.lap("evaluation")
        row = self.evaluator.row(self.iteration, evaluation, spread)
        row["seconds"] = watch.seconds["evaluation"]
        return self._heard(row, evaluation)

    def save(self) -> Path | None:
        """Writes a checkpoint from which `resume` continues bit for bit; returns its path, None
        without a run directory."""
        with self.checkpoints.saving():
            return self.persistence.save(self.iteration)

    def resume(self) -> list[str]:
        """Restores the newest checkpoint that is intact and fits, if there is one; returns what is
        wrong with newer ones and with the log."""
        self.final = None
        found, complaints = self.persistence.resume()
        if found is None:
            return complaints
        self.iteration = found
        self.early_stop.load_history([*self.rewards, *self.judges], len(self.heldout))
        return [*complaints, *self.run.gaps(self.alarms.rows, found)]

    def finish(
        self, on_evaluations: Callable[[int, int], None] = lambda done, total: None
    ) -> dict[str, Comparison]:
        """Compares base and tuned on held-out prompts; writes weights, table, before/after grid,
        curves and a model card. `on_evaluations(done, total)` is called after each network call,
        with this rank's evaluations."""
        total, done = 0 if self.final else self.evaluator.evaluations(), 0

        def count(rows: int) -> None:
            nonlocal done
            self._leave_if_asked(rows)
            done += rows
            on_evaluations(done, total)

        with self.run.holding():
            weights = self.export() if self.run_dir is not None else Path()
            tuned = self.score_heldout(count) if self.final is None else self.final
            table = self.evaluator.finish(tuned, self.iteration)
            if self.run.writes:
                with self.run.writing(weights):
                    own = self.config, self.iteration, table, self.heldout, self.policy
                    write_card(self.run, weights, *own)
            return table

    # --- what these steps are made of

    def __post_init__(self) -> None:
        c, algorithm, policy, shards = self.config, self.config.algorithm, self.policy, self.shards
        self.rewards, self.judges = as_rewards(self.rewards), as_rewards(self.judges)
        every = {**self.rewards, **self.judges}
        weights = {name: c.rewards[name].weight for name in self.rewards}
        stateful(every)  # refuses a state that no checkpoint can hold
        refuse(faults_of_gradients(algorithm, self.rewards, weights))
        check_guidance(policy, c.sampling.guidance_scale)
        self.algorithm, self.algorithm_state = algorithm, algorithm.memory()
        self.reward_weights = torch.tensor([*weights.values()])
        self.run = Run(self.run_dir, self.world, self.notify)
        self.division = divided(c, self.world)
        self.own_prompts = self.division.own(c.trainer.prompts_per_iteration)
        self.order = PromptOrder(self.prompts, c.trainer.seed)
        self.sigmas = grid_of(c.sampling.shift, policy, c.sampling.num_steps)
        self.learner = Learner(policy.trainable_parameters(), c.optim, shards, algorithm.uses_old)
        self.sizes = sizes_of(self)
        self.collector, self.updater = collector_of(self), updater_of(self)
        self.evaluator, self.persistence = evaluator_of(self), persistence_of(self)
        self.alarms = alarms_of(c, self.sigmas, policy)
        self.early_stop, self.checkpoints = EarlyStop(self), Checkpoints(self)
        self.listeners = [
            self.early_stop,  # before the others: it sets a row's alarms
            self.checkpoints,
            Log(self),
            FirstGroup(self),
            TimeLimit(self),
            Evaluations(self),
        ]

    def __repr__(self) -> str:
        of = f"iteration {self.iteration} of {self.config.trainer.iterations}"
        return f"Trainer({self.config.recipe or 'no recipe'!r}, {of}, run_dir={self.run_dir})"

    @property
    def world(self) -> World:
        """The ranks that train together."""
        return self.shards.world

    @property
    def base(self) -> Evaluation | None:
        """The base model's evaluation on held-out prompts, once there is one; pictures on rank 0
        alone."""
        return self.evaluator.base()

    def prompts_of(self, iteration: int) -> list[str]:
        """This rank's prompts of an iteration."""
        places = self.config.trainer.prompts_per_iteration
        return self.division.by_prompt.shard(self.order.batch(iteration, places))

    def plans(self, iteration: int | None = None) -> list[Plan]:
        """The config's plans of an iteration, by default the current one (`algorithm_now` may have
        others)."""
        return plans_in(self.config, self.iteration if iteration is None else iteration)

    def algorithm_now(self) -> Algorithm:
        """The algorithm of the current iteration: the config's, or its state's
        (`AlgorithmState.at`)."""
        state = self.algorithm_state
        return self.algorithm if state is None else state.at(self.iteration)

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """While entered, the policy has the weights and guidance of rollouts."""
        old = self.algorithm.uses_old and self.algorithm.samples_old(self.learner.steps)
        weights = self.learner.as_old() if old else nullcontext()
        with weights, guided_by(self.policy, self.config.sampling.guidance_scale):
            yield

    def _update(self, groups: Groups, advantages: Tensor) -> UpdateStats:
        """Optimizer steps on this rank's groups; returns their statistics."""
        updater, learner, algorithm = self.updater, self.learner, self.algorithm
        updater.algorithm = groups.algorithm
        if algorithm.uses_rewards:
            of = self.policy, self.rewards, self.reward_weights, groups.prompts
            updater.reward = partial(weighted_scores, *of)
        learner.set_scheduled_rate(self.iteration, self.config.trainer.iterations)
        with guided_by(self.policy, self.config.sampling.guidance_scale):
            stats = updater.update(groups.examples(advantages), groups.cond)
        learner.update_average()
        if algorithm.uses_old:
            learner.update_old(algorithm.old_decay(learner.steps))
        return stats

    def _observed(self, groups: Groups, plans: Sequence[Plan]) -> dict[str, float]:
        """Shows the algorithm's state an iteration; returns what it logs."""
        if self.algorithm_state is None:
            return {}
        seen = [plan.branch for plan in plans], groups.rewards, self.reward_weights
        return self.algorithm_state.observe(self.iteration, *seen)

    def _find_sizes(self, cond: Cond) -> None:
        heldout = len(self.evaluator.own())
        self.collector.find_sizes(self.algorithm, self.iteration, cond, heldout)

    # --- listeners, and what they ask for

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While entered, the folder is locked, and rows are logged and sent to the trackers."""
        with ExitStack() as stack:
            stack.enter_context(self.run.holding())
            for listener in self.listeners:
                stack.enter_context(listener.listening())
            yield

    def _heard(self, row: Row, evaluation: Evaluation | None = None) -> Row:
        for listener in self.listeners:
            listener.hear(row, evaluation)
        return row

    def _done_as_asked(self) -> Iterator[Row]:
        """Does what listeners ask for; yields the row of an evaluation. Saves before it raises
        `Preempted`."""
        asked = asked_by(self.listeners, self.stopping, self.world)
        try:
            if Ask.EVALUATE in asked and Ask.LEAVE not in asked:
                yield self.evaluate()
                # its row may have raised an alarm
                asked |= asked_by(self.listeners, self.stopping, self.world)
            if Ask.LEAVE in asked:
                raise self._preempted()
        except Preempted:
            if self.iteration:
                self.save()
            self.early_stop.end()
            raise
        if Ask.SAVE in asked:
            self.save()
        self.early_stop.end()

    def _leave_if_asked(self, rows: int) -> None:
        """After so many network evaluations raises `Preempted` if `stopping` is set; not with several
        ranks, since they must stop together."""
        if self.stopping and self.world.size == 1:
            raise self._preempted()

    def _preempted(self) -> Preempted:
        self.stopping = False
        return Preempted(
            f"stopped after iteration {self.iteration}, as asked; {self.run.how_to_continue}"
        )

    # --- for sessions, notebooks and other callers

    def score_heldout(self, on_rows: Callable[[int], None] | None = None) -> Evaluation:
        """Held-out pictures of the (averaged) weights with all scores. On a single rank, raises
        `Preempted` if `stopping` is set meanwhile, unless `on_rows` is called in place of that."""
        if self.sizes.auto:
            self._find_sizes(self.policy.encode(self.evaluator.own()[:1]))
        return self.evaluator.evaluate(self.iteration, on_rows or self._leave_if_asked)

    def sample(self, prompts: Sequence[str], seed: int = 0, first: int = 0) -> Tensor:
        """Pictures [B, 3, H, W] in [0, 1], or clips, of the (averaged) weights; picture i starts
        from noise (seed, first + i). With sharded weights all ranks must call it."""
        with self.learner.averaged(), self.shards.sampling():
            return self.evaluator.sampler_now(seed=seed).pictures(prompts, first)

    def pictures(self, groups: Groups) -> list[Tensor]:
        """The pictures [M, G, 3, H, W] in [0, 1], or clips, of each of this rank's groups, by tails
        and members."""
        return self.collector.pictures(groups)

    def export(self) -> Path:
        """Writes the (averaged) weights as diffusers reads them and returns their path. All ranks
        must call it; rank 0 writes."""
        folder = "adapter" if self.config.policy.tuning == "lora" else "transformer"
        return self.persistence.export(folder, self.iteration)

    def set_rate(self, learning_rate: float) -> None:
        """Sets the learning rate of the next updates, before warm-up and decay."""
        self.learner.learning_rate = learning_rate

    def snapshot(self) -> Snapshot:
        """A copy of weights and moments in host memory, for `restore`."""
        return self.learner.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Puts a copy of weights and moments back; the iteration, the log and the rewards' states
        stay."""
        self.final = None
        self.learner.restore(snapshot)
