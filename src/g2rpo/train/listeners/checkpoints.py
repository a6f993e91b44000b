"""Asks for checkpoints, and keeps the weights of the best evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from g2rpo.core.data import Row
from g2rpo.train.evaluation.heldout import Evaluation
from g2rpo.train.listeners.early_stop import EarlyStop
from g2rpo.train.listeners.listener import Ask, Listener
from g2rpo.train.loop import Loop
from g2rpo.train.persistence import Persistence


@dataclass
class Checkpoints(Listener):
    """Asks for a checkpoint every `trainer.checkpoint_every` iterations or `checkpoint_minutes`,
    after the last iteration, and before an alarm ends the run. Keeps the weights of the best
    evaluation, where one is better than the base's."""

    loop: Loop
    early_stop: EarlyStop
    persistence: Persistence
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
        if self.loop.world.total(self.early_stop.alarms.best_so_far)[0]:
            self.persistence.keep_best(row["iteration"])

    def asks(self) -> Ask:
        c, iteration = self.loop.config.trainer, self.loop.iteration
        late = (
            c.checkpoint_minutes is not None
            and time.monotonic() - self.saved_at >= 60 * c.checkpoint_minutes
        )
        due = (
            iteration % c.checkpoint_every == 0
            or iteration >= c.iterations
            or self.early_stop.asked
            or late
        )
        return Ask.SAVE if due and self.unsaved else Ask.NOTHING

    @contextmanager
    def saving(self) -> Iterator[None]:
        """To be entered for every save."""
        self.saved_at, self.unsaved = time.monotonic(), False
        yield
        self.seconds = time.monotonic() - self.saved_at
