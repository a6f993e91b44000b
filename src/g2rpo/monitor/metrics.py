"""The log of a run: metrics.jsonl, one object per iteration or evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from g2rpo.core.errors import UserError
from g2rpo.core.files import open_regular, write_whole
from g2rpo.core.plain import as_json, read_json_lines
from g2rpo.runs.directory import RunDirectory
from g2rpo.runtime.folders import writing

Row = dict[str, Any]
NEEDED = {"train": ("iteration", "evaluations", "images", "seconds", "seconds/rollout"), "eval": ("iteration", "seconds")}
"""Numbers that every row of a kind must have."""


class MetricsLog:
    """Appends rows to `run_dir/metrics.jsonl`. A run resumed after `first_iteration` drops later rows."""

    def __init__(self, run_dir: Path, first_iteration: int = 0) -> None:
        self.path = RunDirectory(run_dir).log
        kept = [row for row in read_metrics(run_dir) if 0 < first_iteration >= row["iteration"]]
        with writing(self.path):
            write_whole(self.path, "".join(as_json(row) + "\n" for row in kept).encode())
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
    try:
        return read_json_lines(path, _checked) if path.exists() else []
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def gaps(run_dir: Path, rows: Sequence[Row], iteration: int) -> list[str]:
    """Messages about rows missing from the log of a run after `iteration` iterations (a deleted or truncated file)."""
    known = {(row["kind"], row["iteration"]) for row in rows}
    expected = [("eval", 0), *(("train", number) for number in range(1, iteration + 1))]
    if not (missing := [row for row in expected if row not in known]):
        return []
    lacks = f"{len(missing)} of the {len(expected)} rows up to iteration {iteration}"
    return [f"{RunDirectory(run_dir).log}: lacks {lacks}; curves and alarms continue without them"]


def _checked(row: Any) -> Row:
    """`row` if it is one that a run writes; ValueError if not."""
    if not isinstance(row, dict) or row.get("kind") not in NEEDED:
        raise ValueError("it is not a row of a run's log")
    for key in NEEDED[row["kind"]]:
        if not isinstance(row.get(key), int | float) or row[key] < 0 or (row[key] == 0 and key.startswith("seconds")):
            raise ValueError(f"its '{key}' is missing, or no number")
    alarms = row.get("alarms", {})
    if not isinstance(alarms, dict) or not all(isinstance(said, str) for said in alarms.values()):
        raise ValueError("its 'alarms' are not texts by name")
    for key, value in row.items():
        if key not in ("kind", "alarms") and value is not None and not (isinstance(value, int | float) and abs(value) < 1e300):
            raise ValueError(f"its '{key}' is no number")
    if not isinstance(row["iteration"], int):
        raise ValueError("its 'iteration' is no whole number")
    return row
