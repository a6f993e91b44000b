"""Progress of commands: a bar on a terminal; occasional plain lines in a file or pipe."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

Items = Sequence[tuple[str, str]]
"""Names with formatted values."""

QUIET = 30.0
"""Longest time without a line, in seconds, if there is no terminal."""
SHORT = 3
"""Names are not shortened below this many characters."""


class Steady(Progress):
    """A bar on a terminal. Elsewhere `line(task)` is printed whenever `tell` is called, and after `quiet` seconds without."""

    def __init__(self, *columns: ProgressColumn, console: Console, line: Callable[[Task], str], quiet: float = QUIET) -> None:
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self.line = line
        self.quiet = quiet
        self._told = -math.inf
        self._over = threading.Event()
        self._teller = threading.Thread(target=self._tell_regularly, daemon=True)

    def start(self) -> None:
        super().start()
        if self.disable:
            self._told = time.monotonic()
            self._teller.start()

    def stop(self) -> None:
        super().stop()
        self._over.set()
        if self._teller.is_alive():
            self._teller.join()

    def tell(self) -> None:
        """A line for every task, if there is no terminal."""
        if self.disable:
            self._told = time.monotonic()
            for task in self.tasks:
                say(self.console, self.line(task))

    def _tell_regularly(self) -> None:
        while not self._over.wait(max(0.0, self._told + self.quiet - time.monotonic())):
            if time.monotonic() >= self._told + self.quiet:
                self.tell()


class Rate(ProgressColumn):
    """Throughput and remaining time."""

    def __init__(self, unit: str) -> None:
        super().__init__(Column(no_wrap=True))
        self.unit = unit

    def render(self, task: Task) -> Text:
        return Text("  ".join(pace(task, self.unit)))


def pace(task: Task, unit: str) -> list[str]:
    """The rate of a task since it was started and the time that remains, as text; empty before there is a rate.

    `task.fields["first"]` is what was completed when it started, 0 if there is no such field.
    """
    done, elapsed = task.completed - task.fields.get("first", 0), task.elapsed
    if not done or not elapsed or task.total is None:
        return []
    rate = done / elapsed
    left = timedelta(seconds=round((task.total - task.completed) / rate))
    return [f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s", f"{left} left"]


def counter(console: Console, unit: str) -> Steady:
    """Counts `unit`, with the rate and the time that remains."""

    def line(task: Task) -> str:
        return "  ".join([f"{task.description} {task.completed:,.0f}/{task.total or 0:,.0f} {unit}", *pace(task, unit)])

    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}"), Rate(unit)
    return Steady(*columns, console=console, line=line)


class Fitted:
    """Items in one line of any width; see `fitted`."""

    def __init__(self, items: Items) -> None:
        self.items = items

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(len(fitted(self.items, 0)), len(fitted(self.items, math.inf)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(fitted(self.items, options.max_width), no_wrap=True)


def fitted(items: Items, width: float) -> str:
    """The items in one line of `width` characters: with shorter names if needed, then without the last items and with their
    number. Values are never shortened; at least one item is shown."""
    for count in range(len(items), 0, -1):
        more = [f"+{len(items) - count}"] if count < len(items) else []
        for longest in range(max(len(name) for name, _ in items), SHORT - 1, -1):
            line = "  ".join([*(f"{_shortened(name, longest)} {value}" for name, value in items[:count]), *more])
            if len(line) <= width:
                return line
    return line if items else ""


def _shortened(name: str, longest: int) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"


def add_names(table: Table, title: str, names: Sequence[str], width: int) -> None:
    """Adds a column of names, unwrapped unless they take more than a quarter of `width`."""
    table.add_column(title, overflow="fold", no_wrap=max(map(len, names)) <= width // 4)


def say_items(console: Console, head: str, items: Items) -> None:
    """Prints items in one line; on a terminal wrapped between items."""
    width = console.width if console.is_terminal else math.inf
    line = head
    for name, value in items:
        item = f"  {name} {value}"
        if len(line) + len(item) > width and line.strip():
            say(console, line)
            line = ""
        line += f"  {item}" if not line else item
    say(console, line)


def say(console: Console, line: str) -> None:
    """Prints a line without interpreting markup."""
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def warn_on(console: Console) -> Callable[[str], None]:
    """A function that prints warnings."""
    return lambda message: console.print(f"[yellow]{escape(message)}[/]", highlight=False, soft_wrap=True)
