"""Ends a start of a run after `trainer.max_hours`."""

from __future__ import annotations

import time
from dataclasses import dataclass

from g2rpo.core.data import Row
from g2rpo.train.evaluation.heldout import Evaluation
from g2rpo.train.listeners.checkpoints import Checkpoints
from g2rpo.train.listeners.early_stop import EarlyStop
from g2rpo.train.listeners.listener import Ask, Listener
from g2rpo.train.loop import Loop


@dataclass
class TimeLimit(Listener):
    """Asks for a last evaluation, and then to leave, where another iteration would leave too little
    time for both and for a checkpoint. The time counts from `began`, by `time.monotonic`; at least
    one iteration is trained."""

    loop: Loop
    early_stop: EarlyStop
    checkpoints: Checkpoints
    began: float
    trained: bool = False

    def hear(self, row: Row, evaluation: Evaluation | None) -> None:
        self.trained |= row["kind"] == "train"

    def asks(self) -> Ask:
        config, iteration = self.loop.config.trainer, self.loop.iteration
        if config.max_hours is None or not self.trained or iteration >= config.iterations:
            return Ask.NOTHING
        newest = {row["kind"]: row for row in self.early_stop.alarms.rows}
        ending = sum(row["seconds"] for row in newest.values()) + self.checkpoints.seconds
        if time.monotonic() + ending <= self.began + 3600 * config.max_hours:
            return Ask.NOTHING
        evaluated = "eval" in newest and newest["eval"]["iteration"] == iteration
        return Ask.LEAVE if evaluated else Ask.EVALUATE
