"""What commands print: events as lines, on a terminal with a bar of progress, in a file or pipe
with occasional plain lines."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID
from rich.table import Column
from rich.text import Text

from g2rpo.cli.life import LIFE
from g2rpo.core import events


class Heard(Console):
    """A console whose output is a sign of life."""

    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*objects, **how)
        LIFE.heard()

    def on_broken_pipe(self) -> None:
        raise  # rich's sys.exit(1) would be taken for one of a reward's code


console = Heard(
    width=None if sys.stdout and sys.stdout.isatty() else 10_000
)  # no wrapping in files and pipes

NamedValues = Sequence[tuple[str, str]]
"""Names with formatted values."""

LONGEST_SILENCE = 30.0
"""Longest time without a line, in seconds, if there is no terminal."""
SECONDS_BETWEEN = 2.0
"""Shortest time between the lines of two iterations, in seconds, if there is no terminal."""
SHORTEST_NAME = 3
"""Names are not shortened below this many characters."""


class Output:
    """Shows the events of a use case on a console; a bar ends with its work, or when this is
    left."""

    def __init__(self, console: Console = console, quiet: float = LONGEST_SILENCE) -> None:
        self.console = console
        self.quiet = quiet
        self._bar: Bar | None = None

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def __call__(self, event: events.Event) -> None:
        if self._bar is None:  # a server has ended
            LIFE.go_on()
        match event:
            case events.Line(text, title):
                self.console.print(Text.assemble((title, "bold"), text), soft_wrap=True)
            case events.Serving(text):
                say(self.console, text)
                LIFE.pause()
            case events.Caution(text):
                warn(self.console, text)
            case events.Progress():
                self._count(event)
            case events.TrainingProgress():
                self._train(event)
            case events.TrainingEnded(seconds):
                self._end()
                say(self.console, f"trained for {seconds:.0f} s; comparing base and tuned ...")
            case events.Results():
                from g2rpo.cli.results import show_run

                show_run(event, self.console)

    def _bar_of(
        self, work: str, unit: str, width: int, done: int, total: int, started: bool = True
    ) -> Bar:
        """The bar of this work; its first event begins it."""
        if self._bar is None or self._bar.work != work:
            self._end()
            self._bar = Bar(self.console, self.quiet, work, unit, width)
            self._bar.task = self._bar.add_task("", start=started, completed=done, first=done)
        self._bar.update(self._bar.task, completed=done, total=total)
        return self._bar

    def _count(self, event: events.Progress) -> None:
        bar = self._bar_of(event.name, event.unit, 24, event.done, event.total)
        bar.head, bar.middle = event.name, Text(f"{event.done}/{event.total}")
        bar.line = lambda: f"{event.name} {event.done:,}/{event.total:,} {event.unit}"
        bar.start()
        if event.done >= event.total:
            self._end()

    def _train(self, event: events.TrainingProgress) -> None:
        """A line for every evaluation. Without a terminal, a line is printed after an iteration if
        the last one is `SECONDS_BETWEEN` old, and after `quiet` seconds without one."""
        unit = "eval" if self.console.is_terminal else "evaluations"
        # the evaluation of the base comes first, and is not part of the work
        bar = self._bar_of(
            "training", unit, 12, event.evaluations, event.total, started=event.iteration > 0
        )
        bar.head = f"{event.iteration}/{event.iterations}"
        share = f"{event.evaluations / event.total:.1%}".replace("%", " %") if event.total else ""
        row: Any = event.row or {"kind": ""}
        rewards = [
            (key.removeprefix("reward/"), f"{value:.3f}")
            for key, value in row.items()
            if key.startswith("reward/")
        ]
        alarms = list(row.get("alarms", ()))
        named = [*([("alarm:", ", ".join(alarms))] if alarms else []), *rewards]
        if row["kind"] == "eval":
            bar.start_task(bar.task)
            say_items(self.console, f"held-out pictures after iteration {row['iteration']}:", named)
        if row["kind"] == "train":
            bar.middle = FittedLine([*([("alarms", str(len(alarms)))] if alarms else []), *rewards])
            bar.items = "".join(f"  {name} {value}" for name, value in named)
        bar.line = lambda: (
            f"{_clock(time.monotonic() - bar.began)}  {bar.head} iterations, {share}{bar.items}"
        )
        bar.start()
        if row["kind"] == "train" and time.monotonic() - bar.last >= SECONDS_BETWEEN:
            bar.last = time.monotonic()
            bar.tell()

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            LIFE.go_on()


class DrawnColumn(ProgressColumn):
    """A column by a function of the task."""

    def __init__(
        self, draw: Callable[[Task], RenderableType], column: Column | None = None
    ) -> None:
        super().__init__(column)
        self.draw = draw

    def render(self, task: Task) -> RenderableType:
        return self.draw(task)


class Bar(Progress):
    """One work: on a terminal its head, a bar, what is in the middle, the rate, and the time that
    remains. Elsewhere its line is printed whenever `tell` is called, and after `quiet` seconds
    without."""

    task: TaskID
    line: Callable[[], str]
    head, items = "", ""
    middle: RenderableType = ""

    def __init__(self, console: Console, quiet: float, work: str, unit: str, width: int) -> None:
        columns = (
            DrawnColumn(lambda task: Text(self.head)),
            BarColumn(width),
            DrawnColumn(lambda task: self.middle),
        )
        rate = DrawnColumn(lambda task: Text("  ".join(self.pace(task))), Column(no_wrap=True))
        super().__init__(*columns, rate, console=console, disable=not console.is_terminal)
        self.quiet, self.work, self.unit = quiet, work, unit
        self.began, self.last, self._told = time.monotonic(), -math.inf, -math.inf
        self._over = threading.Event()
        self._teller = threading.Thread(target=self._tell_regularly, daemon=True)

    def start(self) -> None:
        """Shows the bar, if that has not begun."""
        LIFE.pause()
        super().start()
        if self.disable and not self._teller.is_alive():
            self._told = time.monotonic()
            self._teller.start()

    def stop(self) -> None:
        super().stop()
        self._over.set()
        if self._teller.is_alive():
            self._teller.join()

    def tell(self) -> None:
        """A line, if there is no terminal."""
        if self.disable:
            self._told = time.monotonic()
            say(self.console, "  ".join([self.line(), *self.pace(self.tasks[0])]))

    def _tell_regularly(self) -> None:
        while not self._over.wait(self._told + self.quiet - time.monotonic()):
            if time.monotonic() >= self._told + self.quiet:
                self.tell()

    def pace(self, task: Task) -> list[str]:
        """The rate since the task was started, and the time that remains; before there is a rate what
        is done first."""
        done, elapsed = task.completed - task.fields["first"], task.elapsed
        if not done or not elapsed or task.total is None:
            return [now] if (now := events.now_doing()) else []
        rate = done / elapsed
        shown = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        return [f"{shown} {self.unit}/s", f"{_clock((task.total - task.completed) / rate)} left"]


def _clock(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))


class FittedLine:
    """NamedValues in one line of any width; see `fit_in_line`."""

    def __init__(self, items: NamedValues) -> None:
        self.items = items

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(len(fit_in_line(self.items, 0)), len(fit_in_line(self.items, math.inf)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(fit_in_line(self.items, options.max_width), no_wrap=True)


def fit_in_line(items: NamedValues, width: float) -> str:
    """The items in one line of `width` characters: with shorter names if needed, then without the
    last items and with their number. Values are never shortened; at least one item is shown."""
    for count in range(len(items), 0, -1):
        more = [f"+{len(items) - count}"] if count < len(items) else []
        for longest in range(max(len(name) for name, _ in items), SHORTEST_NAME - 1, -1):
            shown = [
                f"{name if len(name) <= longest else name[: longest - 1] + '…'} {value}"
                for name, value in items[:count]
            ]
            line = "  ".join([*shown, *more])
            if len(line) <= width:
                return line
    return line if items else ""


def say_items(console: Console, head: str, items: NamedValues) -> None:
    """Prints items in one line; on a terminal wrapped between items."""
    width = console.width if console.is_terminal else math.inf
    line = head
    for name, value in items:
        item = f"  {name} {value}"
        if len(line) + len(item) > width and line.strip():
            say(console, line)
            line = "  "
        line += item
    say(console, line)


def say(console: Console, line: str) -> None:
    """Prints a line without interpreting markup."""
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def warn(console: Console, line: str) -> None:
    """Prints a line that asks for attention."""
    console.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)
