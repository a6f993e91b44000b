"""A run's folder: the names of its files, and all that is read from it and written to it."""

from __future__ import annotations

import os
import shlex
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from g2rpo.config.resolve import (
    absent_reward,
    allow_code,
    codes_in,
    listed_differences,
    read_yaml,
    resolve,
)
from g2rpo.config.schema import MAY_CHANGE, Config
from g2rpo.core import plugins
from g2rpo.core.data import Row
from g2rpo.core.distributed import ALONE, World
from g2rpo.core.errors import RewardFailed, UserError, placed, refuse
from g2rpo.core.files import (
    RunFiles,
    append_line,
    is_empty,
    open_regular,
    remove_unfinished,
    whole_file,
    write_whole,
    writing,
)
from g2rpo.core.plain import as_json, read_as, read_lines_as
from g2rpo.train.evaluation.heldout import read_scores
from g2rpo.train.run.checkpoint import checkpoints, newest_iteration
from g2rpo.train.run.lock import enter_fresh, held, no_run
from g2rpo.train.run.records import PlannedAndMeasured, RunResults, Start, read_log, started

T = TypeVar("T")


@dataclass(frozen=True)
class Run(RunFiles):
    """The folder of a run: its only reader and writer.

    Without a `folder` nothing is written. Of several ranks, rank 0 of `world` writes. `notify` is
    called with warnings.
    """

    world: World = ALONE
    notify: Callable[[str], None] = print

    def group(self, round: int) -> Path:
        """The folder of the pictures of a group that was answered (`g2rpo teach`)."""
        return self.path / "votes" / f"{round:06d}"

    @property
    def weights(self) -> Path:
        """The weights of a finished run: `adapter` or `transformer`. UserError if it has none."""
        for folder in (self.adapter, self.transformer):
            if folder.is_dir():
                return folder
        raise UserError(
            f"{self.path} has no weights yet (neither adapter/ nor transformer/); has it finished?"
        )

    # --- entering

    @property
    def writes(self) -> bool:
        """Whether this rank writes the folder."""
        return self.folder is not None and self.world.is_main

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Locks the folder against other processes, on the rank that writes it."""
        if not self.writes:
            yield
            return
        with held(self.path, self.notify):
            yield

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """While entered, the folder is locked, and disk errors while `path` is written are
        `Stopped`."""
        with self.holding(), writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield

    @contextmanager
    def written(self, path: Path) -> Iterator[Path]:
        """A path to write a file of the run to; it is renamed to `path` when complete. `Stopped` if
        it cannot be written."""
        with self.writing(path), whole_file(path) as unfinished:
            yield unfinished

    def check(self, config: Config, resume: bool) -> None:
        """Refuses a folder in which a run of `config` cannot begin, or with `resume` continue if
        there is one; nothing is written."""
        refuse(
            self._faults_of_begun(config, resume)
            if self.config.is_file()
            else self._faults_of_new()
        )

    def _faults_of_begun(self, config: Config, resume: bool) -> Iterator[str]:
        if kept := list(self._kept()):
            yield (
                f"{self.path} holds {', '.join(kept)} of a run, and no checkpoint from which it could go on; to begin again "
                f"would overwrite them. `{shlex.join(['g2rpo', 'train', str(self.config)])}` begins it in another folder "
                "(--run-dir names one); or delete this one"
            )
        if not resume:
            yield (
                f"{self.path} already holds a run; {self.command} continues it (from Python: resume=True), "
                "or name another --run-dir"
            )
        if listed := listed_differences(config, self.read_config(), MAY_CHANGE):
            how = f"{self.command} continues that run; `g2rpo train` with another --run-dir starts this one."
            yield f"{self.path} belongs to a run with another config:{listed}\n{how}"

    def _faults_of_new(self) -> Iterator[str]:
        if not is_empty(self.path):
            yield f"{self.path} is not empty and holds no run (no config.yaml); name another --run-dir"

    def _kept(self) -> Iterator[str]:
        """What a run that begins here would overwrite: nothing if there is a checkpoint, an answer or
        `.unsaved`; else every result but the base's evaluation."""
        answers = self.votes.is_file() and self.votes.stat().st_size > 0
        if answers or self.unsaved.is_file() or checkpoints(self.checkpoints):
            return
        for path in (self.adapter, self.transformer, self.best, self.exports, self.results):
            if path.exists():
                yield path.name
        for folder in (self.scores(0).parent, self.pictures(0).parent):
            of_base = self.scores(0).stem
            if any(not path.name.startswith(of_base) for path in folder.glob("*")):
                yield folder.name
        if any(row["iteration"] for row in self.read_log()):
            yield self.log.name

    def claim(self, config: Config) -> None:
        """Makes the folder this run's by writing config.yaml."""
        with placed(f"{self.path}: cannot be written (", OSError, after=")"):
            self.path.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self.path)
            write_whole(self.config, config.to_yaml().encode())
            if not (checkpoints(self.checkpoints) or any(self._kept())):
                self.unsaved.touch()

    def mark_saved(self) -> None:
        """Removes `.unsaved`: the run has a checkpoint or weights, so it must not begin again over them."""
        with writing(self.unsaved):
            self.unsaved.unlink(missing_ok=True)

    # --- reading

    def read_config(
        self,
        overrides: Sequence[str] = (),
        notify: Callable[[str], None] = lambda message: None,
        *,
        mention: bool = True,
    ) -> Config:
        """The config, with overrides as for `config.resolve.resolve`.

        An algorithm whose code the user has not named is a `plugins.Mentioned` one; without `mention`
        it is refused.
        """
        if not self.config.is_file():
            raise UserError(no_run(self.path))
        data = read_yaml(self.config)
        if not mention:
            allow_code(overrides)
            plugins.require_all(codes_in(data))  # in one message
        # when the run began
        taken_out = [override for override in overrides if absent_reward(data, override)]
        return resolve(
            data,
            [each for each in overrides if each not in taken_out],
            str(self.config),
            notify,
            mention,
        )

    def read_starts(self) -> list[Start]:
        """The lines of `record_start`, oldest first; UserError for any other line."""
        return read_lines_as(Start, self.starts) if self.starts.exists() else []

    def read_log(self) -> list[Row]:
        """All rows so far, without a last line that was cut short. UserError names any other
        damaged line."""
        return read_log(self.log)

    def gaps(self, rows: Sequence[Row], iteration: int) -> list[str]:
        """Messages about what `rows`, the log after `iteration` iterations, lacks (a deleted or
        truncated file)."""
        known = {(row["kind"], row["iteration"]) for row in rows}
        expected = [("eval", 0), *(("train", number) for number in range(1, iteration + 1))]
        missing = [row for row in expected if row not in known]
        if not missing:
            return []
        lacks = f"{len(missing)} of the {len(expected)} rows up to iteration {iteration}"
        return [f"{self.log}: lacks {lacks}; curves and alarms continue without them"]

    def read_scores(
        self, iteration: int, names: Collection[str], count: int | None = None
    ) -> dict[str, Tensor]:
        """The held-out scores [N] after an iteration, by reward (`train.evaluation.heldout.read_scores`)."""
        return read_scores(self.scores(iteration), names, count)

    def read_results(self) -> RunResults | None:
        """Base against tuned; None until the run has finished once. UserError if they are
        damaged."""
        return _read_if_there(RunResults, self.results)

    def finished_at(self) -> int | None:
        """The iteration of the weights that the results and the model card describe; None if there
        are none."""
        try:
            found = self.read_results()
        except UserError:  # damaged, and to be rewritten
            return None
        return None if found is None else found.iteration

    def read_plan(self) -> PlannedAndMeasured | None:
        """The plan beside what was measured; None without one."""
        return _read_if_there(PlannedAndMeasured, self.plan, "delete it")

    # --- writing

    def record_start(
        self, iteration: int, device: torch.device, contents: Mapping[str, str] | None = None
    ) -> None:
        """Appends a `Start` with these `contents` to starts.jsonl."""
        line = as_json(started(iteration, device, contents or {}).model_dump())
        with writing(self.starts):
            append_line(self.starts, line)

    def check_length(self, config: Config) -> None:
        """Refuses fewer iterations than the run has made: its config would repeat another run."""
        iterations, done = config.trainer.iterations, newest_iteration(self.checkpoints)
        if iterations < done:
            raise UserError(
                f"trainer.iterations={iterations}: {self.path} has made {done}; trainer.iterations={done} ends it there"
            )

    def check_contents(self, contents: Mapping[str, str], accept: bool) -> list[str]:
        """Refuses to continue with other prompts, model or reward code than at the last start. With
        `accept` it returns the changes. Held-out prompts may never change: the base model was
        evaluated on the first ones.
        """
        starts = [start for start in self.read_starts() if start.contents]
        before = starts[-1].contents if starts else dict(contents)
        keys = [key for key in {**before, **contents} if before.get(key) != contents.get(key)]
        changed = [
            f"{key}: {before.get(key, 'nothing')} then, {contents.get(key, 'nothing')} now"
            for key in keys
        ]
        if not changed or (accept and "evaluation.prompts" not in keys):
            return changed
        go_on = (
            "Held-out prompts cannot change within a run, whose base model was evaluated on them; begin another run."
            if "evaluation.prompts" in keys
            else "To continue with them add --accept-changes; the base model keeps its scores."
        )
        listed = "\n".join(f"  {line}" for line in changed)
        raise UserError(
            f"{self.path}: what its config names has changed since the last start:\n{listed}\n{go_on}"
        )

    @contextmanager
    def logging(self, iteration: int) -> Iterator[Callable[[Row], None]]:
        """Yields what appends a row to the log; rows after `iteration`, where the run goes on, are
        dropped first."""
        rows = self.read_log()  # a last line that was cut short is none
        lines = self.log.read_bytes().splitlines(keepends=True) if self.log.exists() else []
        kept = [
            line
            for line, row in zip(lines, rows, strict=False)
            if 0 < iteration >= row["iteration"]
        ]
        with writing(self.log):
            write_whole(self.log, b"".join(kept))
            # unbuffered, so that closing does not repeat a write that a full disk refused
            file = open(self.log, "ab", buffering=0, opener=open_regular)  # noqa: SIM115

        def write(row: Row) -> None:
            line = f"{as_json(row)}\n".encode()
            with writing(self.log):
                while line:  # a write to a nearly full disk may be partial without an error
                    line = line[file.write(line) :]
                os.fsync(file.fileno())  # on disk before any later checkpoint

        with file:
            yield write

    def write_plan(self, both: PlannedAndMeasured) -> None:
        self._write_json(self.plan, asdict(both))

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Writes what `read_results` reads."""
        self._write_json(self.results, results)

    def _write_json(self, path: Path, value: Mapping[str, Any]) -> None:
        with self.writing(path):
            write_whole(path, as_json(value, 1).encode())

    # --- messages

    @property
    def command(self) -> str:
        """The command that continues the run, for messages."""
        return f"`{shlex.join(['g2rpo', 'resume', str(self.path), *plugins.repeated()])}`"

    @property
    def how_to_continue(self) -> str:
        """The end of a message after a stop."""
        return (
            "it had no run directory to continue from"
            if self.folder is None
            else f"{self.command} continues it"
        )

    @contextmanager
    def naming(self, iteration: int) -> Iterator[None]:
        """Adds the iteration and the path of the traceback to the message of a failed reward."""
        try:
            yield
        except RewardFailed as error:
            raise RewardFailed(
                f"after iteration {iteration}: {error}{self._keep_traceback(error)}"
            ) from error.__cause__

    def _keep_traceback(self, error: BaseException) -> str:
        """Writes the traceback of an error's cause into the folder; returns the end of a message
        that names it."""
        if self.folder is None or not self.folder.is_dir() or error.__cause__ is None:
            return ""
        path = self.path / f"traceback_rank{self.world.rank}.txt"
        try:
            write_whole(
                path, "".join(traceback.format_exception(error.__cause__)).encode(errors="replace")
            )
        except OSError as full:
            return f"\nThe whole traceback could not be written to {path} ({full.strerror})."
        begins = (
            "continues from the last checkpoint"
            if newest_iteration(self.checkpoints)
            else "begins again"
        )
        return f"\nThe whole traceback is in {path}; {self.command} {begins}."


@contextmanager
def entered(
    config: Config, run_dir: Path | None, resume: bool, notify: Callable[[str], None] = print
) -> Iterator[Path]:
    """The directory for a run of `config`, locked while entered; if it was created here and is
    still empty, it is removed.

    Without `run_dir` a fresh `runs/NAME`, `runs/NAME-2`, ... is taken. A directory that holds a run
    is only entered with `resume` and the same config; with `resume` a directory may hold none yet.
    """
    if resume and run_dir is None:
        raise UserError("--resume continues a run: name its directory with --run-dir")
    with ExitStack() as stack:
        if run_dir is None:
            directory = enter_fresh(stack, Path("runs"), config.recipe or "run", notify)
        else:
            directory = run_dir
            Run(directory).check(config, resume)  # before it is touched
            stack.enter_context(held(directory, notify))
            Run(directory).check(config, resume)  # unchanged since the last process released it
        yield directory


def _read_if_there(kind: type[T], path: Path, hint: str = "") -> T | None:
    """A file of JSON; None if there is none."""
    return read_as(kind, path, hint) if path.is_file() else None
