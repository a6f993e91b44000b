"""What commands show while they work."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Rate(ProgressColumn):
    """How many a second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.1f} {self.unit}/s" if task.speed else "")


def counter(console: Console, unit: str) -> Progress:
    """A bar that counts `unit`, with the rate and the time that remains."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        _Rate(unit),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        speed_estimate_period=60,
    )


def say(console: Console, line: str) -> None:
    """A line as it is: names of files and recipes are no markup."""
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def warn_on(console: Console) -> Callable[[str], None]:
    """A function that prints warnings."""
    return lambda message: console.print(f"[yellow]{escape(message)}[/]", highlight=False, soft_wrap=True)
