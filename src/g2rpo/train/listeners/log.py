"""Writes a run's log, and sends it to the trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from g2rpo.core.data import Row
from g2rpo.train.evaluation.heldout import Evaluation
from g2rpo.train.listeners.listener import Listener
from g2rpo.train.loop import Loop
from g2rpo.train.monitor.trackers import Feed, Tracker
from g2rpo.train.run.folder import Run


@dataclass
class Log(Listener):
    """Writes rows to metrics.jsonl and sends them, with an evaluation's pictures, to `trackers`: on
    rank 0, while listening. Rows of an earlier start after the current iteration are removed."""

    loop: Loop
    run: Run
    trackers: Sequence[Tracker]
    _open: tuple[Callable[[Row], None], Feed] | None = field(default=None, init=False)

    @contextmanager
    def listening(self) -> Iterator[None]:
        if not self.run.writes:
            yield
            return
        iteration = self.loop.iteration
        config = self.loop.config.model_dump(mode="json")
        feed = Feed(self.trackers, self.run.path, iteration, config, self.run.notify)
        with self.run.holding(), self.run.logging(iteration) as write, feed:
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
        pictures = {} if evaluation is None else {"eval/samples": self.run.grid(row["iteration"])}
        feed.log(row, pictures)
