"""Writing a run directory: by one rank, each file whole or not at all."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from g2rpo.core import plugins
from g2rpo.core.errors import RewardFailed
from g2rpo.core.files import whole_file, write_whole
from g2rpo.runs.directory import RunDirectory
from g2rpo.runtime.distributed import World
from g2rpo.runtime.folders import held, writing
from g2rpo.training.checkpoint import newest_iteration


@dataclass(frozen=True)
class RunFiles:
    """The run directory of a trainer; nothing is written if `run_dir` is None. One rank of `world` writes, and `notify` is
    called with warnings."""

    run_dir: Path | None
    world: World
    notify: Callable[[str], None]

    @property
    def run(self) -> RunDirectory:
        if self.run_dir is None:
            raise ValueError("this trainer has no run_dir to write to")
        return RunDirectory(self.run_dir)

    @property
    def writes(self) -> bool:
        """Whether this rank writes the run directory."""
        return self.run_dir is not None and self.world.is_main

    @property
    def command(self) -> str:
        """The command that continues the run, for messages."""
        return f"`{shlex.join(['g2rpo', 'resume', str(self.run.path), *plugins.repeated()])}`"

    @property
    def how_to_continue(self) -> str:
        """The end of a message after a stop."""
        return "it had no run directory to continue from" if self.run_dir is None else f"{self.command} continues it"

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Locks the directory against other processes, on the rank that writes it."""
        if not self.writes:
            yield
            return
        with held(self.run.path, self.notify):
            yield

    @contextmanager
    def written(self, path: Path) -> Iterator[Path]:
        """A path to write a file of the run to; it is renamed to `path` when complete. `Stopped` if it cannot be written."""
        with self.holding(), writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as unfinished:
                yield unfinished

    @contextmanager
    def naming(self, iteration: int) -> Iterator[None]:
        """Adds the iteration and the path of the traceback to the message of a failed reward."""
        try:
            yield
        except RewardFailed as error:
            raise RewardFailed(f"after iteration {iteration}: {error}{self._keep_traceback(error)}") from error.__cause__

    def _keep_traceback(self, error: BaseException) -> str:
        """Writes the traceback of an error's cause into the run directory; returns the end of a message that names it."""
        if self.run_dir is None or not self.run_dir.is_dir() or error.__cause__ is None:
            return ""
        path = self.run.traceback(self.world.rank)
        try:
            write_whole(path, "".join(traceback.format_exception(error.__cause__)).encode(errors="replace"))
        except OSError as full:
            return f"\nThe whole traceback could not be written to {path} ({full.strerror})."
        begins = "continues from the last checkpoint" if newest_iteration(self.run.checkpoints) else "begins again"
        return f"\nThe whole traceback is in {path}; {self.command} {begins}."
