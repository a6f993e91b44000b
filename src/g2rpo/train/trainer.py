"""The trainer: a loop with held-out evaluations, a run directory and listeners."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from g2rpo.config.schema import Config
from g2rpo.config.work import plans_in
from g2rpo.core.contracts import check_own_advantages
from g2rpo.core.data import Row
from g2rpo.core.distributed import World
from g2rpo.core.errors import Preempted
from g2rpo.core.plans import Plan
from g2rpo.core.statistics import Comparison
from g2rpo.core.types import Algorithm, Policy, Reward, as_rewards
from g2rpo.models.sharding import WHOLE, Replicated
from g2rpo.rollout.engine import Noise
from g2rpo.train.collector import Groups
from g2rpo.train.evaluation.heldout import Evaluation
from g2rpo.train.evaluator import evaluator_of
from g2rpo.train.learner import Snapshot
from g2rpo.train.listeners.checkpoints import Checkpoints
from g2rpo.train.listeners.early_stop import EarlyStop
from g2rpo.train.listeners.evaluations import Evaluations
from g2rpo.train.listeners.first_group import FirstGroup
from g2rpo.train.listeners.listener import Ask, Listener, asked_by
from g2rpo.train.listeners.log import Log
from g2rpo.train.listeners.time_limit import TimeLimit
from g2rpo.train.model_card import header_of, write_card
from g2rpo.train.monitor.alarms import alarms_of
from g2rpo.train.monitor.trackers import TensorBoard, Tracker
from g2rpo.train.parts import find_sizes, loop_of
from g2rpo.train.persistence import Persistence, stateful
from g2rpo.train.run.folder import Run
from g2rpo.train.stopwatch import Stopwatch


@dataclass(repr=False, kw_only=True)
class Trainer:
    """Trains `policy` on `rewards` by `config`, and writes `run_dir`.

    `judges` are rewards that score held-out pictures and are not trained on. `run_dir=None` writes
    nothing. `notify` is called
    when batch sizes are found, or halved because memory ran out, and when `trackers` fail. `shards`
    holds the ranks and the placement of the weights: every rank has a trainer, with its share of
    the prompts; rank 0 writes. After `stopping` is set on any rank, `train` saves after the current
    iteration, or during an evaluation, and raises `Preempted`. `began` is when
    the process started, by `time.monotonic`: `trainer.max_hours` count from it.
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

    def __post_init__(self) -> None:
        c = self.config
        self.rewards, self.judges = as_rewards(self.rewards), as_rewards(self.judges)
        self.stopping = False
        self.final: Evaluation | None = None  # of the weights as they are
        self.run = Run(self.run_dir, self.world, self.notify)
        stateful({**self.rewards, **self.judges})  # refuses a state that no checkpoint can hold
        loop = self.loop = loop_of(
            c,
            self.policy,
            self.rewards,
            self.prompts,
            self.shards,
            self.notify,
            lambda rows: self.on_evaluations(rows),
        )
        self.algorithm, self.division = loop.algorithm, loop.division
        self.learner, self.sizes = loop.learner, loop.sizes
        self.collector, self.updater, self.sigmas = (
            loop.collector,
            loop.updater,
            loop.collector.sigmas,
        )
        self.own_prompts = self.division.own(c.trainer.prompts_per_iteration)
        self.alarms = alarms_of(c, self.sigmas, self.policy)
        self.evaluator = evaluator_of(loop, self.judges, self.heldout, self.shards, self.run)
        loop.find_sizes = partial(find_sizes, loop, len(self.evaluator.own()))
        self.persistence = Persistence(
            policy=self.policy,
            learner=self.learner,
            algorithm_state=loop.algorithm_state,
            rewards={**self.rewards, **self.judges},
            shards=self.shards,
            run=self.run,
            keep=c.trainer.keep_checkpoints,
            header=partial(header_of, c),
        )

        self.early_stop = EarlyStop(
            loop=self.loop,
            alarms=self.alarms,
            run=self.run,
            save=self.save,
        )
        self.checkpoints = Checkpoints(self.loop, self.early_stop, self.persistence)
        self.listeners: Sequence[Listener] = [
            self.early_stop,  # before the others: it sets a row's alarms
            self.checkpoints,
            Log(self.loop, self.run, self.trackers),
            FirstGroup(self.loop, self.run),
            TimeLimit(self.loop, self.early_stop, self.checkpoints, self.began),
            Evaluations(self.loop, self.early_stop),
        ]

    def __repr__(self) -> str:
        of = f"iteration {self.iteration} of {self.config.trainer.iterations}"
        return f"Trainer({self.config.recipe or 'no recipe'!r}, {of}, run_dir={self.run_dir})"

    @property
    def world(self) -> World:
        """The ranks that train together."""
        return self.shards.world

    @property
    def iteration(self) -> int:
        """How many iterations are done."""
        return self.loop.iteration

    def train(self) -> Iterator[Row]:
        """Runs the remaining iterations; yields a row per iteration and per evaluation as they are
        logged."""
        with self.listening():
            yield from self._done_as_asked()
            while self.iteration < self.config.trainer.iterations:
                yield self.iterate()
                yield from self._done_as_asked()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While entered, the folder is locked, and rows are logged and sent to the trackers."""
        with ExitStack() as stack:
            stack.enter_context(self.run.holding())
            for listener in self.listeners:
                stack.enter_context(listener.listening())
            yield

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

    def iterate(self) -> Row:
        """Runs one iteration; returns its metrics."""
        groups = self.sample_groups()
        return self.learn_from(groups, self.loop.advantages(groups))

    def sample_groups(
        self,
        prompts: Sequence[str] | None = None,
        algorithm: Algorithm | None = None,
        noise: Noise | None = None,
        rewards: Mapping[str, Reward] | None = None,
    ) -> Groups:
        """The current iteration's groups on this rank, with the rewards of all ranks'.

        With `prompts` groups of these, each rank of its own: sampled by the plans and group size of
        `algorithm`, from `noise(place of the prompt, *purpose)`, and scored by `rewards` (none:
        {}); by default the iteration's.
        """
        with self.run.naming(self.iteration):
            if prompts is None:
                return self.loop.sample_groups()
            algorithm = algorithm or self.loop.algorithm_now()
            spec = self.collector.spec(algorithm, self.iteration, noise, rewards)
            return self.loop.sample_others(prompts, algorithm, spec)

    def pictures(self, groups: Groups) -> list[Tensor]:
        """The pictures [M, G, 3, H, W] in [0, 1], or clips, of each of this rank's groups, by tails
        and members."""
        return self.collector.pictures(groups)

    def learn_from(self, groups: Groups, advantages: Tensor) -> Row:
        """Takes optimizer steps on groups with finite `advantages` [N, G], of all ranks' groups as
        `groups.rewards`. That ends the iteration and returns its row, which listeners hear."""
        check_own_advantages(groups.rewards, list(self.rewards), advantages)
        self.final = None
        with self.run.naming(self.iteration):
            row = self.loop.learn_from(groups, advantages)
        for listener in self.listeners:
            listener.hear_groups(groups, self.world.shard(advantages))
        return self._heard(row)

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

    @property
    def base(self) -> Evaluation | None:
        """The base model's evaluation on held-out prompts, once there is one; pictures on rank 0
        alone."""
        return self.evaluator.base()

    def _heard(self, row: Row, evaluation: Evaluation | None = None) -> Row:
        for listener in self.listeners:
            listener.hear(row, evaluation)
        return row

    def set_length(self, iterations: int) -> None:
        """Gives the run another number of iterations; config.yaml says so."""
        length = self.config.trainer.model_copy(update={"iterations": iterations})
        self.config = self.loop.config = self.config.model_copy(update={"trainer": length})
        if self.run.writes:
            with self.run.written(self.run.config) as path:
                path.write_text(self.config.to_yaml(), encoding="utf-8")

    def plans(self, iteration: int | None = None) -> list[Plan]:
        """The config's plans of an iteration, by default the current one (`algorithm_now` may have
        others)."""
        return plans_in(self.config, self.iteration if iteration is None else iteration)

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

    def score_heldout(self, on_rows: Callable[[int], None] | None = None) -> Evaluation:
        """Held-out pictures of the (averaged) weights with all scores. On a single rank, raises
        `Preempted` if `stopping` is set meanwhile, unless `on_rows` is called in place of that."""
        if self.sizes.auto:
            self.loop.find_sizes(self.policy.encode(self.evaluator.own()[:1]))
        return self.evaluator.evaluate(self.iteration, on_rows or self._leave_if_asked)

    def sample(self, prompts: Sequence[str], seed: int = 0, first: int = 0) -> Tensor:
        """Pictures [B, 3, H, W] in [0, 1], or clips, of the (averaged) weights; picture i starts
        from noise (seed, first + i). With sharded weights all ranks must call it."""
        with self.learner.averaged(), self.shards.sampling():
            return self.evaluator.sampler_now(seed=seed).pictures(prompts, first)

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

    def export(self) -> Path:
        """Writes the (averaged) weights as diffusers reads them and returns their path. All ranks
        must call it; rank 0 writes."""
        return self.persistence.export(
            "adapter" if self.config.policy.tuning == "lora" else "transformer", self.iteration
        )

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
        self.loop.iteration = found
        self.early_stop.take_up([*self.rewards, *self.judges], len(self.heldout))
        return [*complaints, *self.run.gaps(self.alarms.rows, found)]

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
