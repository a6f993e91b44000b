"""What hears a run, in a fixed order, on every rank (`Trainer.listeners`): alarms, checkpoints, the
log, the clock and the times of evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from torch import Tensor

from g2rpo.core.data import Row
from g2rpo.core.distributed import World
from g2rpo.core.errors import Stopped, refuse
from g2rpo.core.statistics import or_nan
from g2rpo.train.collector import Groups
from g2rpo.train.evaluation.heldout import Evaluation
from g2rpo.train.monitor.alarms import HELPS, Scores
from g2rpo.train.monitor.trackers import Feed
from g2rpo.train.run.records import FIRST_LOOK

if TYPE_CHECKING:
    from g2rpo.train.trainer import Trainer


class Ask(Flag):
    """What a listener may ask for. What one rank's listener asks for, all ranks do, in this
    order."""

    NOTHING = 0
    LEAVE = auto()
    """To save, and to end the process: the run goes on later."""
    EVALUATE = auto()
    SAVE = auto()


@dataclass
class Listener:
    """Hears a run. A subclass overrides what it needs; `Trainer.listeners` has the order."""

    trainer: Trainer

    def listening(self) -> AbstractContextManager[object]:
        """Entered while `Trainer.train` runs."""
        return nullcontext()

    def hear_groups(self, groups: Groups, advantages: Tensor) -> None:
        """This rank's groups of an iteration and their advantages [N, G], after they were learnt
        from."""

    def hear(self, row: Row, evaluation: Evaluation | None) -> None:
        """A row of metrics before it is yielded: of an iteration, or of an `evaluation` of the base
        or the trained model."""

    def asks(self) -> Ask:
        """What should happen next, asked after every row was yielded, and once before the first.
        May raise `Stopped`."""
        return Ask.NOTHING


def asked_by(listeners: Sequence[Listener], stopping: bool, world: World) -> Ask:
    """What any listener of any rank asks for; a rank that is `stopping` asks to leave."""
    own = reduce(
        or_, (listener.asks() for listener in listeners), Ask.LEAVE if stopping else Ask.NOTHING
    )
    counts = world.total(*(ask in own for ask in Ask))
    return reduce(or_, (ask for ask, count in zip(Ask, counts, strict=True) if count), Ask.NOTHING)


UNSCORED = 5
"""Consecutive iterations without any score of a reward after which a run stops."""
SKIPPED = 10
"""Consecutive updates with a gradient that is not finite (none is applied) after which a run
stops."""


@dataclass
class EarlyStop(Listener):
    """Sets the alarms of every row, reports new ones, and ends the run by their actions, or after
    `UNSCORED` iterations or `SKIPPED` updates."""

    asked: bool = False
    """Whether a new alarm is to end the run."""
    unscored: Sequence[str] = ()
    """Rewards without any score in the last `UNSCORED` iterations; one of weight 0 need not have
    one."""

    def load_history(self, rewards: Sequence[str], prompts: int) -> None:
        """Gives the alarms what earlier starts logged and scored, up to the current iteration:
        scores of `prompts` by `rewards`."""
        run, iteration = self.trainer.run, self.trainer.iteration
        self.trainer.alarms.rows = [row for row in run.read_log() if row["iteration"] <= iteration]
        looks = [row["iteration"] for row in self.trainer.alarms.rows if row["kind"] == "eval"]
        kept = [look for look in looks if run.scores(look).is_file()]
        self.trainer.alarms.history = {
            look: run.read_scores(look, rewards, prompts) for look in kept
        }

    def hear(self, row: Row, evaluation: Evaluation | None) -> None:
        new = self.trainer.alarms.see(row, None if evaluation is None else evaluation.scores)
        self.asked |= any(self.trainer.config.action_of(name) == "stop" for name in new)
        for name in new:
            if self.trainer.world.is_main:
                said = f"{name}: {row['alarms'][name]}. What helps: {HELPS[name]}"
                self.trainer.run.notify(f"alarm after iteration {row['iteration']}: {said}")
        if evaluation is None:
            rows = [each for each in self.trainer.alarms.rows if each["kind"] == "train"]
            newest = rows[-UNSCORED:]
            self.unscored = [
                name
                for name in self.trainer.config.trained
                if len(newest) == UNSCORED
                and all(math.isnan(or_nan(each.get(f"reward/{name}"))) for each in newest)
            ]

    def asks(self) -> Ask:
        """Raises `Stopped` after too many iterations without a score, or too many updates in a row
        that were skipped because of their gradient; weights are those of the last update."""
        iteration, skipped = self.trainer.iteration, self.trainer.updater.skipped_in_a_row
        said = f"gave no score at all in {UNSCORED} iterations in a row"
        refuse(
            (f"iteration {iteration}: reward '{name}' {said}" for name in self.unscored), Stopped
        )
        if skipped >= SKIPPED:
            self.trainer.save()
            how_long = f"{skipped} updates in a row"
            raise Stopped(
                f"iteration {iteration}: the gradient was not finite in {how_long}; the weights before are saved"
            )
        return Ask.NOTHING

    def end(self) -> None:
        """Raises `Stopped` if that is the action of a new alarm."""
        asked, self.asked = self.asked, False
        iteration = self.trainer.iteration
        if asked and iteration < self.trainer.config.trainer.iterations:
            raise Stopped(
                f"stopped by an alarm after iteration {iteration}; {self.trainer.run.how_to_continue}"
            )

    def check_base(self, scores: Scores) -> None:
        """Raises `Stopped` if no reward that is trained on has any score [N] of the base's
        pictures."""
        trained = self.trainer.config.trained
        if trained and all(bool(scores[name].isnan().all()) for name in trained):
            raise Stopped(
                f"no reward ({', '.join(trained)}) gave a score to any of the base's {len(scores[trained[0]])} held-out "
                "pictures, so nothing could be learnt; the pictures are finite: look for what the rewards said"
            )


@dataclass
class Checkpoints(Listener):
    """Asks for a checkpoint every `trainer.checkpoint_every` iterations or `checkpoint_minutes`,
    after the last iteration, and before an alarm ends the run. Keeps the weights of the best
    evaluation, where one is better than the base's."""

    saved_at: float = 0.0
    """By this rank's `time.monotonic`."""
    seconds: float = 0.0
    """What the last save took; 0 before the first one of this start."""
    unsaved: bool = False
    """Whether an iteration was trained since."""

    def listening(self) -> AbstractContextManager[object]:
        self.saved_at = time.monotonic()
        return nullcontext()

    def hear(self, row: Row, evaluation: Evaluation | None) -> None:
        self.unsaved |= row["kind"] == "train"
        if evaluation is None or not row["iteration"]:
            return
        # on all ranks together: shards are gathered
        if self.trainer.world.total(self.trainer.alarms.best_so_far)[0]:
            self.trainer.persistence.keep_best(row["iteration"])

    def asks(self) -> Ask:
        c, iteration = self.trainer.config.trainer, self.trainer.iteration
        minutes, ends = c.checkpoint_minutes, self.trainer.early_stop.asked
        late = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        due = iteration % c.checkpoint_every == 0 or iteration >= c.iterations or ends or late
        return Ask.SAVE if due and self.unsaved else Ask.NOTHING

    @contextmanager
    def saving(self) -> Iterator[None]:
        """To be entered for every save."""
        self.saved_at, self.unsaved = time.monotonic(), False
        yield
        self.seconds = time.monotonic() - self.saved_at


@dataclass
class Log(Listener):
    """Writes rows to metrics.jsonl and sends them, with an evaluation's pictures, to `trackers`: on
    rank 0, while listening. Rows of an earlier start after the current iteration are removed."""

    _open: tuple[Callable[[Row], None], Feed] | None = field(default=None, init=False)

    @contextmanager
    def listening(self) -> Iterator[None]:
        if not self.trainer.run.writes:
            yield
            return
        run, iteration = self.trainer.run, self.trainer.iteration
        config = self.trainer.config.model_dump(mode="json")
        of = self.trainer.trackers, run.path, iteration, config, run.notify
        with run.holding(), run.logging(iteration) as write, Feed(*of) as feed:
            self._open = write, feed
            try:
                yield
            finally:
                self._open = None

    def hear(self, row: Row, evaluation: Evaluation | None) -> None:
        if self._open is None:
            return
        write, feed = self._open
        write(row)
        pictures = (
            {} if evaluation is None else {"eval/samples": self.trainer.run.grid(row["iteration"])}
        )
        feed.log(row, pictures)


@dataclass
class TimeLimit(Listener):
    """Asks for a last evaluation, and then to leave, where another iteration would leave too little
    time for both and for a checkpoint. At least one iteration is trained."""

    trained: bool = False

    def hear(self, row: Row, evaluation: Evaluation | None) -> None:
        self.trained |= row["kind"] == "train"

    def asks(self) -> Ask:
        config, iteration = self.trainer.config.trainer, self.trainer.iteration
        if config.max_hours is None or not self.trained or iteration >= config.iterations:
            return Ask.NOTHING
        newest = {row["kind"]: row for row in self.trainer.alarms.rows}
        ending = sum(row["seconds"] for row in newest.values()) + self.trainer.checkpoints.seconds
        if time.monotonic() + ending <= self.trainer.began + 3600 * config.max_hours:
            return Ask.NOTHING
        evaluated = "eval" in newest and newest["eval"]["iteration"] == iteration
        return Ask.LEAVE if evaluated else Ask.EVALUATE


@dataclass
class Evaluations(Listener):
    """Asks for an evaluation of the base model, and then as `evaluation.every` and `every_minutes`
    say."""

    def asks(self) -> Ask:
        """Where the log lacks an evaluation that is due; minutes are of training since the last."""
        config, rows = self.trainer.config, self.trainer.alarms.rows
        every, minutes = config.evaluation.every, config.evaluation.every_minutes
        iteration = self.trainer.iteration
        evaluated = [row["iteration"] for row in rows if row["kind"] == "eval"]
        last = max(evaluated, default=0)
        since = (row for row in rows if row["kind"] == "train" and row["iteration"] > last)
        spent = sum(row["seconds"] for row in since)
        late = minutes is not None and spent >= 60 * minutes * (1 if last else FIRST_LOOK)
        due = iteration % every == 0 or iteration >= config.trainer.iterations or late
        return Ask.EVALUATE if due and iteration not in evaluated else Ask.NOTHING
