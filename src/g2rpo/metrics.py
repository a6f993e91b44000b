"""The log of a run: metrics.jsonl, one object per iteration or evaluation."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from g2rpo.files import write_whole

Row = dict[str, Any]


class MetricsLog:
    """Appends rows to `run_dir/metrics.jsonl`. A run resumed after `first_iteration` drops later rows."""

    def __init__(self, run_dir: Path, first_iteration: int = 0) -> None:
        self.path = run_dir / "metrics.jsonl"
        kept = [row for row in read_metrics(run_dir) if 0 < first_iteration >= row["iteration"]]
        write_whole(self.path, "".join(_line(row) for row in kept).encode())
        self._file = self.path.open("a", encoding="utf-8")

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def write(self, row: Row) -> None:
        self._file.write(_line(row))
        self._file.flush()
        os.fsync(self._file.fileno())  # a checkpoint that comes later must not outlive the rows before it


def read_metrics(run_dir: Path) -> list[Row]:
    """All rows so far; a last line that an interruption cut short is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise
    return rows


def _line(row: Row) -> str:
    """JSON has no NaN: a missing number is null."""
    clean = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
    return json.dumps(clean, ensure_ascii=False) + "\n"
