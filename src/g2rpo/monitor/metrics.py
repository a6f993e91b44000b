"""The log of a run: metrics.jsonl, one object per iteration or evaluation."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from g2rpo.core.files import open_regular, write_whole
from g2rpo.core.plain import Iteration, Number, as_json, read_lines_as
from g2rpo.runs.directory import RunDirectory
from g2rpo.runtime.folders import writing

Row = dict[str, Any]
Amount = Annotated[int, Field(ge=0, le=10**15)]
Seconds = Annotated[int | float, Field(gt=0, le=1e12)]


def _indexed(name: str) -> str:
    if name.startswith(("step/", "granularity/")) and not re.fullmatch(r"\w+/[0-9]{1,6}/.+", name):
        raise ValueError("has no index")
    return name


Name = Annotated[str, AfterValidator(_indexed)]
"""Of a logged number; those of steps and granularities have their index."""


class Logged(BaseModel):
    """What every row has, and further numbers by name."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[Name, Number | None]

    iteration: Iteration
    seconds: Seconds
    alarms: dict[str, str] = {}


class Evaluated(Logged):
    """The row of an evaluation."""

    kind: Literal["eval"]


class Trained(Logged):
    """The row of an iteration."""

    kind: Literal["train"]
    iteration: Annotated[int, Field(ge=1, le=10**6)]
    evaluations: Amount
    images: Amount
    rollout: Annotated[Seconds, Field(alias="seconds/rollout")]


class MetricsLog:
    """Appends rows to `run_dir/metrics.jsonl`. A run resumed after `first_iteration` drops later rows."""

    def __init__(self, run_dir: Path, first_iteration: int = 0) -> None:
        self.path = RunDirectory(run_dir).log
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        rows = read_metrics(run_dir)  # a last line that was cut short is none
        kept = [line for line, row in zip(lines, rows, strict=False) if 0 < first_iteration >= row["iteration"]]
        with writing(self.path):
            write_whole(self.path, b"".join(kept))
            # unbuffered, so that closing does not repeat a write that a full disk refused
            self._file = open(self.path, "ab", buffering=0, opener=open_regular)  # noqa: SIM115

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, row: Row) -> None:
        line = f"{as_json(row)}\n".encode()
        with writing(self.path):
            while line:  # a write to a nearly full disk may be partial without an error
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())  # on disk before any later checkpoint


def read_metrics(run_dir: Path) -> list[Row]:
    """All rows so far, without a last line that was cut short. UserError names any other damaged line."""
    path = RunDirectory(run_dir).log
    kind: Any = Annotated[Evaluated | Trained, Field(discriminator="kind")]
    rows = read_lines_as(kind, path) if path.exists() else []
    return [row.model_dump(by_alias=True, exclude_unset=True) for row in rows]


def gaps(run_dir: Path, rows: Sequence[Row], iteration: int) -> list[str]:
    """Messages about rows missing from the log of a run after `iteration` iterations (a deleted or truncated file)."""
    known = {(row["kind"], row["iteration"]) for row in rows}
    expected = [("eval", 0), *(("train", number) for number in range(1, iteration + 1))]
    if not (missing := [row for row in expected if row not in known]):
        return []
    lacks = f"{len(missing)} of the {len(expected)} rows up to iteration {iteration}"
    return [f"{RunDirectory(run_dir).log}: lacks {lacks}; curves and alarms continue without them"]
