"""Trackers: TensorBoard, Weights & Biases, trackio. They get copies of `metrics.jsonl`.

Accounts and keys are configured as the libraries do (`wandb login`, WANDB_API_KEY, HF_TOKEN), never
in a config.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from g2rpo.core import plugins
from g2rpo.core.files import write_whole
from g2rpo.core.plain import as_json, read_as

PATIENCE = 60.0  # seconds that the end of a run waits for a tracker
METHODS = ("start", "log", "finish")  # of a tracker
BACKLOG = 50  # rows that a tracker may be behind before `notify` is called


class Tracker(Protocol):
    """A destination for a run's log. Methods are called from one thread, on the rank that writes
    the run directory."""

    def start(self, run_dir: Path, iteration: int, config: Mapping[str, Any]) -> None:
        """A run begins, or resumes after `iteration` > 0; rows of later iterations will be
        repeated."""

    def log(self, row: Mapping[str, Any], pictures: Mapping[str, Path]) -> None:
        """A row of metrics.jsonl, with the PNG files that belong to it by name."""

    def finish(self, ok: bool) -> None:
        """The run has ended; `ok` is False if an exception ended it."""


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row by their names in a tracker, such as train/loss."""
    numbers = {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and name != "iteration"
    }
    return {
        f"{row['kind']}/{name}": value for name, value in numbers.items() if math.isfinite(value)
    }


class TensorBoard:
    """Event files in `run_dir/tensorboard`. They are written here, not by SummaryWriter, whose
    thread prints a traceback when the disk is full."""

    def start(self, run_dir: Path, iteration: int, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}"  # read in the order of their names
        self.file = RecordWriter((folder / name).open("wb"))
        self._write(0, file_version="brain.Event:2")
        if iteration:  # events from this step on are hidden: they will be written again
            self._write(iteration + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, row: Mapping[str, Any], pictures: Mapping[str, Path]) -> None:
        from PIL import Image
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.summary import scalar, text

        values = [scalar(name, value) for name, value in scalars(row).items()]
        values += [text(f"alarms/{name}", said) for name, said in row.get("alarms", {}).items()]
        for name, path in pictures.items():
            # the stored PNG: torch's `image` would encode pixels again
            with Image.open(path) as picture:
                width, height = picture.size
            stored = Summary.Image(
                encoded_image_string=path.read_bytes(), height=height, width=width, colorspace=3
            )
            values.append(Summary(value=[Summary.Value(tag=name, image=stored)]))
        for value in values:
            self._write(row["iteration"], summary=value)

    def _write(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), step=step, **content)
        self.file.write(event.SerializeToString())
        self.file.flush()

    def finish(self, ok: bool) -> None:
        self.file.close()


@dataclass
class Memory:
    """A tracker's run, and the last iteration of each kind of row that it was sent."""

    id: str
    sent: dict[str, int] = field(default_factory=dict)


class Hosted:
    """What W&B and trackio have in common: a resumed run continues the tracker's run, and no row is
    sent twice. `run_dir/trackers/NAME.json` stores that run and the last iteration of each kind of
    row. It is written before a row is sent, so a kill in between loses one row in the tracker.
    """

    name: str

    def __init__(self, project: str | None = None) -> None:
        self.project = project or os.environ.get(f"{self.name.upper()}_PROJECT") or "g2rpo"

    def start(self, run_dir: Path, iteration: int, config: Mapping[str, Any]) -> None:
        self.memory = run_dir / "trackers" / f"{self.name}.json"
        self.memory.parent.mkdir(exist_ok=True)
        self.state = (
            read_as(Memory, self.memory) if self.memory.exists() else Memory(secrets.token_hex(4))
        )
        self.module: Any = importlib.import_module(self.name)
        self.run = self.init(run_dir, config)

    def init(self, run_dir: Path, config: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def log(self, row: Mapping[str, Any], pictures: Mapping[str, Path]) -> None:
        kind, iteration = row["kind"], row["iteration"]
        if iteration <= self.state.sent.get(kind, -1):
            return
        self.state.sent[kind] = iteration
        write_whole(self.memory, as_json(self.state).encode())
        self.send(
            iteration,
            {
                **scalars(row),
                **{name: self.module.Image(str(path)) for name, path in pictures.items()},
            },
        )

    def send(self, iteration: int, values: dict[str, Any]) -> None:
        self.run.log(values, step=iteration)

    def finish(self, ok: bool) -> None:
        self.run.finish()


class WandB(Hosted):
    """Weights & Biases. Its settings are its own: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline,
    ..."""

    name = "wandb"

    def init(self, run_dir: Path, config: Mapping[str, Any]) -> Any:
        wandb = self.module
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError(
                "not logged in; run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
            )
        run = wandb.init(
            project=self.project,
            name=run_dir.name,
            id=self.state.id,
            resume="allow",
            config=dict(config),
            allow_val_change=True,  # keys that a resumed run may change
            dir=run_dir,
            reinit="create_new",
            settings=wandb.Settings(console="off"),  # leave the terminal to g2rpo
        )
        run.define_metric("*", step_metric="iteration")
        return run

    def send(self, iteration: int, values: dict[str, Any]) -> None:
        # W&B's own step counts rows; two kinds of rows share an iteration
        self.run.log({**values, "iteration": iteration})

    def finish(self, ok: bool) -> None:
        self.run.finish(exit_code=0 if ok else 1)


class Trackio(Hosted):
    """trackio: a local dashboard (`trackio show`), or a Hugging Face Space named by
    TRACKIO_SPACE_ID."""

    name = "trackio"

    def init(self, run_dir: Path, config: Mapping[str, Any]) -> Any:
        name = f"{run_dir.name}-{self.state.id}"  # trackio identifies runs by name
        return self.module.init(
            project=self.project, name=name, resume="allow", config=dict(config), embed=False
        )


class Feed:
    """Sends rows to trackers, each in its own thread, so that none can end or delay a run. `notify`
    is called once for a tracker that fails (it gets no further rows), falls far behind, or does not
    finish within `patience` seconds.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        run_dir: Path,
        iteration: int,
        config: Mapping[str, Any],
        notify: Callable[[str], None],
        patience: float = PATIENCE,
    ) -> None:
        self.notify, self.patience = notify, patience
        self.lines = [_Line(tracker) for tracker in trackers]
        for line in self.lines:
            line.calls.put(("start", run_dir, iteration, config))
            line.start()

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for line in self.lines:
            line.calls.put(("finish", kind is None))
            line.calls.put(None)
        for line in self.lines:
            line.join(self.patience)
            if line.is_alive():
                self._tell(
                    line,
                    f"is not done after {self.patience:g} s; it may lack rows, metrics.jsonl has them all",
                )
        self._complain()

    def log(self, row: Mapping[str, Any], pictures: Mapping[str, Path]) -> None:
        for line in self.lines:
            if line.error is None:
                line.calls.put(("log", dict(row), dict(pictures)))
            if line.calls.qsize() > BACKLOG:
                self._tell(line, f"is {BACKLOG} rows behind; training does not wait for it")
        self._complain()

    def _complain(self) -> None:
        for line in self.lines:
            if line.error is not None:
                self._tell(
                    line,
                    f"failed ({type(line.error).__name__}: {line.error}); the run goes on without it",
                )

    def _tell(self, line: _Line, message: str) -> None:
        if message not in line.told:
            line.told.add(message)
            self.notify(
                f"tracker {getattr(line.tracker, 'name', type(line.tracker).__name__)} {message}"
            )


class _Line(threading.Thread):
    """One tracker's thread: calls the methods named in `calls` until None, or until something
    fails."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(daemon=True)  # one that hangs must not keep the process alive
        self.tracker = tracker
        # a method's name and arguments
        self.calls: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.told: set[str] = set()

    def run(self) -> None:
        try:
            while (call := self.calls.get()) is not None:
                method, *arguments = call
                getattr(self.tracker, method)(*arguments)
        except (Exception, SystemExit) as error:  # whatever its library comes up with, for Feed
            self.error = error


TRACKERS = {
    "tensorboard": f"{__name__}:TensorBoard",
    "wandb": f"{__name__}:WandB",
    "trackio": f"{__name__}:Trackio",
}


def faults_of_tracker(name: str) -> Iterator[str]:
    """Of a tracker whose library is not installed, and a class that is none. UserError for a name
    of which there is nothing."""
    kind = plugins.find_class("trackers", name, TRACKERS)
    lacks = [each for each in METHODS if not callable(getattr(kind, each, None))]
    if isinstance(kind, type) and lacks:
        yield f"trackers: {name} is no tracker, it lacks {', '.join(lacks)}"
    if name in TRACKERS and importlib.util.find_spec(name) is None:
        yield f"trackers: {name} is not installed; `pip install {name}`, or leave it out"


def build_trackers(names: Sequence[str]) -> list[Tracker]:
    """The trackers of a config; nothing of their libraries is imported yet."""
    return [plugins.find_class("trackers", name, TRACKERS)() for name in names]
