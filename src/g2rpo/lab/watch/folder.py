"""What the files of a run say while it trains, here or on another machine. Takes no lock, writes
nothing, and loads no torch: `g2rpo watch` answers at once."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from g2rpo.core.errors import UserError, placed
from g2rpo.core.files import LOCK
from g2rpo.core.plain import Count, Iteration, checked_as, parse_yaml, read_as, read_text
from g2rpo.run.files import Folder
from g2rpo.run.lock import Owner, last_owner
from g2rpo.run.log_rows import FIRST_LOOK, read_log
from g2rpo.run.status import COMPARING, Status

if TYPE_CHECKING:
    from g2rpo.core.data import Row

NEWEST = 10
"""Rows by which the time of an iteration is judged."""


class Length(BaseModel):
    """Settings of `trainer`."""

    iterations: Count


class Looks(BaseModel):
    """Settings of `evaluation`."""

    every: Count
    every_minutes: float | None = None
    num_prompts: Count
    rewards: dict[str, Any] = {}


class Settings(BaseModel):
    """What a config.yaml says of a run's length and rewards."""

    recipe: str | None = None
    trainer: Length
    evaluation: Looks
    rewards: dict[str, Any]


class Ending(BaseModel):
    """What a results.json says of the weights."""

    iteration: Iteration
    rolled_back_from: Iteration | None = None


@dataclass(frozen=True)
class Watched:
    """A run at the time `now`, in seconds since 1970. `settings` is None while it is loaded for the
    first time, and `status` while it is loaded; `alive` is None where this machine cannot know;
    nothing was written for `silence` seconds."""

    files: Folder
    now: float
    settings: Settings | None
    rows: list[Row]
    status: Status | None
    ending: Ending | None
    owner: Owner | None
    alive: bool | None
    silence: float

    @property
    def name(self) -> str:
        return str(self.files.path)

    @property
    def iteration(self) -> int:
        """How many iterations are done."""
        return next((row["iteration"] for row in reversed(self.rows)), 0)

    @property
    def iterations(self) -> int:
        """How many there will be; 0: not known yet."""
        return self.settings.trainer.iterations if self.settings else 0

    def of_kind(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind]

    @property
    def loading(self) -> bool:
        """Whether the process that holds the folder has not begun to train."""
        return self.alive is not False and self.status is None

    @property
    def rolled_back(self) -> bool:
        left = self.ending.rolled_back_from if self.ending else None
        return left is not None and self.iteration <= left and not self._resumed

    @property
    def looks(self) -> list[Row]:
        """The evaluations up to the weights as they are: none of those that an alarm took back."""
        last = self.ending.iteration if self.rolled_back and self.ending else math.inf
        return [row for row in self.of_kind("eval") if row["iteration"] <= last]

    @property
    def _resumed(self) -> bool:
        """Whether a process has gone on since the results were written."""
        if self.status is None:
            return self.alive is True
        return self.alive is not False and self.status.phase != COMPARING

    @property
    def finished(self) -> bool:
        done = self.ending is not None and self.ending.iteration >= self.iterations > 0
        return (done and not self._resumed) or self.rolled_back

    @property
    def ended(self) -> str | None:
        """Why training ended early, as its process said."""
        return self.status.ended if self.status else None

    @property
    def lost(self) -> bool:
        """Whether the process has gone without a word, or left the folder before `finish`."""
        return self.alive is False and not self.finished and not self.ended

    @property
    def over(self) -> bool:
        return bool(self.finished or self.ended or self.lost)

    @property
    def seconds(self) -> float | None:
        """Those of an iteration; None before the first."""
        newest = [row["seconds"] for row in self.of_kind("train")[-NEWEST:]]
        return sum(newest) / len(newest) if newest else None

    @property
    def until_look(self) -> float | None:
        """Seconds of training until the next evaluation, about."""
        if self.settings is None or self.seconds is None:
            return None
        every, minutes = self.settings.evaluation.every, self.settings.evaluation.every_minutes
        left = min(every - self.iteration % every, self.iterations - self.iteration)
        known = [left * self.seconds]
        if minutes is not None:
            looked = max((row["iteration"] for row in self.of_kind("eval")), default=0)
            since = [r["seconds"] for r in self.of_kind("train") if r["iteration"] > looked]
            known.append(60 * minutes * (1 if looked else FIRST_LOOK) - sum(since))
        return max(0.0, min(known))

    @property
    def left(self) -> float | None:
        """Seconds until the last evaluation is made, about."""
        looks = self.of_kind("eval")
        if self.settings is None or self.seconds is None or not looks:
            return None
        every, minutes = self.settings.evaluation.every, self.settings.evaluation.every_minutes
        training = (self.iterations - self.iteration) * self.seconds
        ahead = -(-self.iterations // every) - self.iteration // every
        if minutes is not None:
            ahead = max(ahead, int(training / (60 * minutes)))
        return max(0.0, training + ahead * looks[-1]["seconds"] - min(self.silence, self.seconds))


def read(path: Path) -> Watched:
    """The run in a folder as it is now. UserError for a folder that is none, and for damaged
    files."""
    files, now = Folder(path), time.time()
    if not path.is_dir():
        raise UserError(f"{path} is no folder; name that of a run, such as runs/words")
    owner, alive = last_owner(path)
    begun = files.config.is_file()
    if not begun and (owner is None or alive is False):
        raise UserError(
            f"{path} is no run directory (no config.yaml), and nothing is loaded for it"
        )
    status = read_as(Status, files.status) if files.status.is_file() else None
    if status and owner and alive is not False and status.since < owner.since:
        status = None  # of an earlier process, which may have had the same number
    written = [files.log, files.status, files.config, files.rates, path / LOCK]
    return Watched(
        files=files,
        now=now,
        settings=_settings(files.config) if begun else None,
        rows=read_log(files.log),
        status=status,
        ending=read_as(Ending, files.results) if files.results.is_file() else None,
        owner=owner,
        alive=alive,
        silence=max(0.0, now - max(map(_time_of, written))),
    )


def _settings(path: Path) -> Settings:
    with placed(f"{path}: "):
        return checked_as(Settings, parse_yaml(read_text(path)))


def _time_of(path: Path) -> float:
    """When a file was last written; 0 without one."""
    return os.stat(path).st_mtime if path.is_file() else 0.0
