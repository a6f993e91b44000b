"""`g2rpo report`: a page that shows what runs did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from g2rpo.app.progress import say
from g2rpo.core.errors import UserError
from g2rpo.core.files import write_whole
from g2rpo.lab.report.history import read_runs
from g2rpo.lab.report.page import render
from g2rpo.runs.directory import RunDirectory


def report(directories: Sequence[Path], out: Path | None, console: Console) -> Path:
    """Writes the page, by default RUN/report.html for one run and ./report.html for several; an older one is replaced."""
    runs = read_runs(directories)
    path = out or RunDirectory(runs[0].directory if len(runs) == 1 else Path()).report
    page = render(runs).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    say(console, f"{path} ({len(page) / 1e6:.1f} MB)")
    return path
