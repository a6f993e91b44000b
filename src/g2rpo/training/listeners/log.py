"""Writes a run's log, and sends it to the trackers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from g2rpo.evaluation.heldout import Evaluation
from g2rpo.monitor.metrics import MetricsLog, Row
from g2rpo.monitor.trackers import Feed, Tracker
from g2rpo.training.listeners.listener import Listener
from g2rpo.training.loop import Loop
from g2rpo.training.run_files import RunFiles


@dataclass
class Log(Listener):
    """Writes rows to metrics.jsonl and sends them, with an evaluation's pictures, to `trackers`: on rank 0, while listening.
    Rows of an earlier start after the current iteration are removed."""

    loop: Loop
    files: RunFiles
    trackers: Sequence[Tracker]
    _open: tuple[MetricsLog, Feed] | None = field(default=None, init=False)

    @contextmanager
    def listening(self) -> Iterator[None]:
        if not self.files.writes:
            yield
            return
        path, iteration = self.files.run.path, self.loop.iteration
        config = self.loop.config.model_dump(mode="json")
        feed = Feed(self.trackers, path, iteration, config, self.files.notify)
        with self.files.holding(), MetricsLog(path, iteration) as log, feed:
            self._open = log, feed
            try:
                yield
            finally:
                self._open = None

    def hear(self, row: Row, evaluation: Evaluation | None) -> None:
        if self._open is None:
            return
        log, feed = self._open
        log.write(row)
        pictures = {} if evaluation is None else {"eval/samples": self.files.run.grid(row["iteration"])}
        feed.log(row, pictures)
