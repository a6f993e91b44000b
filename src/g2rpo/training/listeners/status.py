"""Says in a run's folder what it does at this moment, for `g2rpo watch`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from g2rpo.core.data import Row
from g2rpo.core.errors import Stopped
from g2rpo.evaluation.heldout import Evaluation
from g2rpo.run.run import Run
from g2rpo.run.status import Status, begun
from g2rpo.training.listeners.listener import Listener

EVERY = 2.0
"""Seconds between two writes within a phase."""


@dataclass
class StatusFile(Listener):
    """Writes status.json: at the beginning of a phase, while it counts network evaluations, and why
    training ended early."""

    run: Run
    now: Status = field(default_factory=lambda: begun("training"))
    written: float = field(default=0.0, init=False)
    """By `time.monotonic`."""

    def begin(self, phase: str, of: int = 0) -> None:
        """A phase begins, with `of` network evaluations if they are known."""
        self._write(begun(phase, of))

    def count(self, rows: int) -> None:
        """So many network evaluations more are done in this phase."""
        self.now.done += rows
        if time.monotonic() - self.written >= EVERY:
            self._write(self.now)

    @contextmanager
    def listening(self) -> Iterator[None]:
        self.begin("training")
        try:
            yield
        except BaseException as error:
            left = "its program left the loop over `train`" * isinstance(error, GeneratorExit)
            self.now.ended = left or str(error).strip() or type(error).__name__
            self._write(self.now)
            raise

    def hear(self, row: Row, evaluation: Evaluation | None) -> None:
        if self.now.phase != "training":
            self.begin("training")

    def _write(self, now: Status) -> None:
        self.now, self.written = now, time.monotonic()
        if self.run.writes:
            with suppress(Stopped):  # a full disk ends the run where it matters: in its log
                self.run.write_status(now)
