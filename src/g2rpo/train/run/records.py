"""What the JSON files of a run hold, as they are read back."""

from __future__ import annotations

import math
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, Field

import g2rpo
from g2rpo.core.devices import name_of_device
from g2rpo.core.errors import counted
from g2rpo.core.files import in_bytes
from g2rpo.core.plain import Count, Figure, Iteration, Number


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


class Compared(BaseModel):
    """One reward on the held-out prompts (`core.statistics.Comparison`)."""

    base: Figure
    tuned: Figure
    error: Figure
    count: Annotated[int, Field(ge=0)] | None = None
    spread: Figure = math.nan


class Right(Compared):
    """The share of right pictures, what these do, and the least scores that they have."""

    least: dict[str, Number] = {}
    in_words: Annotated[str, Field(min_length=1)] = "Right on {} prompts"


class Spread(BaseModel):
    """How much pictures of one prompt differ."""

    base: Number
    tuned: Number


class RunResults(BaseModel):
    iteration: Iteration
    prompts: Count | None = None
    rewards: dict[str, Compared]
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

    def __str__(self) -> str:
        peak = (
            "" if self.measured_memory is None else f" ({in_bytes(self.measured_memory)} measured)"
        )
        return f"{self.seconds:.3g} s an iteration ({self.measured_seconds:.3g} s measured), {in_bytes(self.memory)}{peak}"
