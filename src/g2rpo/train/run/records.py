"""What the files of a run hold, as they are read back: rows of its log, and its JSON files."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

import g2rpo
from g2rpo.core.data import Row
from g2rpo.core.devices import name_of_device
from g2rpo.core.errors import counted, refuse, shown
from g2rpo.core.files import in_bytes
from g2rpo.core.plain import Count, Iteration, Number, read_lines_as
from g2rpo.core.statistics import Comparison


class Start(BaseModel):
    """A start of a run, or a resume after `iteration` > 0: time, software, device, and digests of
    what the config names (`train.contents`)."""

    time: str
    iteration: int
    g2rpo: str
    commit: str | None
    python: str
    torch: str
    device: str
    contents: dict[str, str]


def started(iteration: int, device: torch.device, contents: Mapping[str, str]) -> Start:
    """The start of this process: after `iteration`, on this device."""
    cpu = f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    return Start(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        iteration=iteration,
        g2rpo=g2rpo.__version__,
        commit=source_commit(Path(g2rpo.__file__).resolve().parents[2]),
        python=platform.python_version(),
        torch=torch.__version__,
        device=cpu if device.type == "cpu" else name_of_device(device),
        contents=dict(contents),
    )


def source_commit(root: Path) -> str | None:
    """The commit of the checkout at `root`, with "-dirty" if files differ from it; None if it is no
    checkout (an installed package) or git is missing."""
    if not (root / ".git").exists():
        return None
    # not `git describe --dirty`, which locks the index: a kill meanwhile would leave the lock there
    status = ["status", "--porcelain=v2", "--branch", "--no-ahead-behind", "--untracked-files=no"]
    command = ["git", "--no-optional-locks", "-C", str(root), *status]
    try:
        told = subprocess.run(command, capture_output=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    commit = re.match(rb"# branch\.oid ([0-9a-f]{12})", told[0])  # none before the first
    dirty = "-dirty" * any(not line.startswith(b"# ") for line in told)
    return None if commit is None else commit[1].decode() + dirty


@dataclass(frozen=True)
class Right(Comparison):
    """The share of right pictures, what these do, and the least scores that they have."""

    least: dict[str, Number] = field(default_factory=dict)
    in_words: Annotated[str, Field(min_length=1)] = "Right on {} prompts"


class Spread(BaseModel):
    """How much pictures of one prompt differ."""

    base: Number
    tuned: Number


class RunResults(BaseModel):
    iteration: Iteration
    prompts: Count | None = None
    rewards: dict[str, Comparison]
    right: Right | None = None
    diversity: Spread | None = None
    diversity_right: Spread | None = None


@dataclass(frozen=True)
class PlannedAndMeasured:
    """`Planned`, and the median of iterations after the first, and the allocator's peak of this
    rank."""

    card: str
    seconds: float
    memory: int
    measured_seconds: float
    measured_memory: int | None
    compiling: float = 0.0

    def __str__(self) -> str:
        peak = (
            "" if self.measured_memory is None else f" ({in_bytes(self.measured_memory)} measured)"
        )
        return f"{self.seconds:.3g} s an iteration ({self.measured_seconds:.3g} s measured), {in_bytes(self.memory)}{peak}"


FIRST_LOOK = 1 / 12
"""The share of `evaluation.every_minutes` after which the first evaluation is made, for an early
look."""

Amount = Annotated[int, Field(ge=0, le=10**15)]
Seconds = Annotated[int | float, Field(gt=0, le=1e12)]


def _indexed(name: str) -> str:
    if name.startswith(("step/", "granularity/")) and not re.fullmatch(r"\w+/[0-9]{1,6}/.+", name):
        raise ValueError("has no index")
    return name


Name = Annotated[str, AfterValidator(_indexed)]
"""Of a logged number; those of steps and granularities have their index."""


class LogRow(BaseModel):
    """What every row has, and further numbers by name."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[Name, Number | None]

    iteration: Iteration
    seconds: Seconds
    alarms: dict[str, str] = {}

    @model_validator(mode="after")
    def _whole(self) -> LogRow:
        refuse(_faults_of_numbers(self.__pydantic_extra__), ValueError)
        return self


def _faults_of_numbers(numbers: Mapping[str, float | None]) -> Iterator[str]:
    """Of numbers that are counts, or that are read together."""
    for name, value in numbers.items():
        if name.startswith("scored/") and not (isinstance(value, int) and value >= 0):
            yield f"{name}: should be a count, is {shown(value)}"
        if (of := re.fullmatch(r"(image/\w+?)(/low|/high)?", name)) is not None:
            lacking = {of[1], f"{of[1]}/low", f"{of[1]}/high"} - numbers.keys()
            yield from (f"{each} is missing beside {name}" for each in sorted(lacking))


class EvaluationRow(LogRow):
    """The row of an evaluation."""

    kind: Literal["eval"]


class TrainingRow(LogRow):
    """The row of an iteration."""

    kind: Literal["train"]
    iteration: Annotated[int, Field(ge=1, le=10**6)]
    evaluations: Amount
    images: Amount
    rollout: Annotated[Seconds, Field(alias="seconds/rollout")]


def read_log(path: Path) -> list[Row]:
    """All rows of a log so far, without a last line that was cut short; none without a file.
    UserError names any other damaged line."""
    kind: Any = Annotated[EvaluationRow | TrainingRow, Field(discriminator="kind")]
    rows = read_lines_as(kind, path) if path.exists() else []
    return [row.model_dump(by_alias=True, exclude_unset=True) for row in rows]
