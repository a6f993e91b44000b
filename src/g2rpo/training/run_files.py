"""The files of a run: who writes them, whole or not at all, and the log."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g2rpo.errors import RewardFailed
from g2rpo.evaluation.heldout import iteration_name
from g2rpo.files import whole_file
from g2rpo.monitor.metrics import MetricsLog, Row
from g2rpo.monitor.trackers import Feed, Tracker
from g2rpo.runtime.distributed import World
from g2rpo.runtime.folders import held, writing


@dataclass(frozen=True)
class RunFiles:
    """The run directory of a trainer; None keeps nothing. One rank of `world` writes, and `notify` is called with warnings."""

    folder: Path | None
    world: World
    notify: Callable[[str], None]

    @property
    def directory(self) -> Path:
        if self.folder is None:
            raise ValueError("this trainer has no run_dir to write to")
        return self.folder

    @property
    def writes(self) -> bool:
        """Whether this rank keeps the run."""
        return self.folder is not None and self.world.is_main

    @property
    def command(self) -> str:
        """What continues the run, as messages name it."""
        return f"`g2rpo resume {shlex.quote(str(self.folder))}`" if self.folder is not None else "nothing that was kept"

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keeps other processes out of the directory, where this rank writes it."""
        if not self.writes:
            yield
            return
        with held(self.directory, self.notify):
            yield

    @contextmanager
    def written(self, name: str) -> Iterator[Path]:
        """Where to write a file of the run, which is then there as a whole; `Stopped` if the disk refuses."""
        path = self.directory / name
        with self.holding(), writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as unfinished:
                yield unfinished

    @contextmanager
    def log(self, iteration: int, config: Mapping[str, Any], trackers: Sequence[Tracker]) -> Iterator[Callable[[Row], Row]]:
        """A function that keeps a row and passes it to the trackers; rows after `iteration` of an earlier start are dropped.
        On ranks that do not write the function does nothing."""
        if not self.writes:
            yield lambda row: row
            return
        with (
            self.holding(),
            MetricsLog(self.directory, iteration) as log,
            Feed(trackers, self.directory, iteration, config, self.notify) as feed,
        ):

            def logged(row: Row) -> Row:
                log.write(row)
                pictures = {"eval/samples": self.directory / sample_picture(iteration_name(row["iteration"]))}
                feed.log(row, pictures if row["kind"] == "eval" else {})
                return row

            yield logged

    @contextmanager
    def naming(self, iteration: int) -> Iterator[None]:
        """Adds to a reward's failure when it happened, and where its traceback is."""
        try:
            yield
        except RewardFailed as error:
            raise RewardFailed(f"after iteration {iteration}: {error}{self._keep_traceback(error)}") from error.__cause__

    def _keep_traceback(self, error: BaseException) -> str:
        """Writes the traceback of an error's cause into the run directory; returns where, as the end of a message."""
        if self.folder is None or not self.folder.is_dir() or error.__cause__ is None:
            return ""
        path = self.folder / f"traceback_rank{self.world.rank}.txt"
        try:
            path.write_text("".join(traceback.format_exception(error.__cause__)), encoding="utf-8")
        except OSError as full:
            return f"\nThe whole traceback could not be written to {path} ({full.strerror})."
        return f"\nThe whole traceback is in {path}; {self.command} goes on from the last checkpoint."


def sample_picture(name: str) -> str:
    """Where in a run directory a grid of pictures is."""
    return f"samples/{name}.png"
