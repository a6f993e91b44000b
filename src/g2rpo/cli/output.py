"""What commands print: events as lines, on a terminal with a bar of progress, in a file or pipe with occasional plain lines."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from g2rpo.app import events
from g2rpo.cli.life import LIFE


class Heard(Console):
    """A console whose output is a sign of life."""

    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*objects, **how)
        LIFE.heard()


console = Heard(width=None if sys.stdout.isatty() else 10_000)  # no wrapping in files and pipes

Items = Sequence[tuple[str, str]]
"""Names with formatted values."""

QUIET = 30.0
"""Longest time without a line, in seconds, if there is no terminal."""
BETWEEN = 2.0
"""Shortest time between the lines of two iterations, in seconds, if there is no terminal."""
SHORT = 3
"""Names are not shortened below this many characters."""


class Output:
    """Shows the events of a use case on a console; a bar ends with its work, or when this is left."""

    def __init__(self, console: Console = console, quiet: float = QUIET) -> None:
        self.console = console
        self.quiet = quiet
        self._bar: Counter | TrainingBar | None = None
        self._work = ""

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
                self._advance(event, event.name)
                if event.done >= event.total:
                    self._end()
            case events.Training():
                self._advance(event, "training")
            case events.Trained(seconds, controls):
                self._end()
                knobs = ", and free knobs of the base" if controls else ""
                say(self.console, f"trained for {seconds:.0f} s; comparing base and tuned{knobs} ...")
            case events.Results():
                from g2rpo.cli.results import show_run

                show_run(event, self.console)

    def _advance(self, event: events.Progress | events.Training, work: str) -> None:
        """Updates the bar of this work; the first event of a work begins it."""
        if self._bar is None or self._work != work:
            self._end()
            self._work = work
            bar = Counter if isinstance(event, events.Progress) else TrainingBar
            self._bar = bar(event, self.console, self.quiet)  # type: ignore[arg-type]
            self._bar.start()
        self._bar.show(event)  # type: ignore[arg-type]

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            LIFE.go_on()


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
        LIFE.pause()
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


class Counter(Steady):
    """Counts a unit, with the rate and the time that remains."""

    def __init__(self, event: events.Progress, console: Console, quiet: float = QUIET) -> None:
        unit = event.unit

        def line(task: Task) -> str:
            return "  ".join([f"{task.description} {task.completed:,.0f}/{task.total or 0:,.0f} {unit}", *pace(task, unit)])

        columns = TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}")
        super().__init__(*columns, Rate(unit), console=console, line=line, quiet=quiet)
        self.task = self.add_task(event.name, total=event.total, completed=event.done, first=event.done)

    def show(self, event: events.Progress) -> None:
        self.update(self.task, completed=event.done)


class TrainingBar(Steady):
    """The progress of a run, and a line for every evaluation. Without a terminal, a line is printed after an iteration if the
    last one is `BETWEEN` seconds old, and after `quiet` seconds without one."""

    def __init__(self, event: events.Training, console: Console, quiet: float = QUIET) -> None:
        began, self.last = time.monotonic(), -BETWEEN

        def line(task: Task) -> str:
            share = f"{100 * task.completed / task.total:.1f} %" if task.total else ""
            passed, of = timedelta(seconds=round(time.monotonic() - began)), task.fields["iterations"]
            head = f"{passed}  {task.fields['iteration']}/{of} iterations, {share}"
            items = [*_alarms(task.fields["alarms"]), *task.fields["rewards"]]
            return "  ".join([head, *(f"{name} {value}" for name, value in items), *pace(task, "evaluations")])

        count = TextColumn("{task.fields[iteration]}/{task.fields[iterations]}")
        columns = count, BarColumn(bar_width=12), _Rewards(), Rate("eval")
        super().__init__(*columns, console=console, line=line, quiet=quiet)
        fields: dict[str, Any] = {"iteration": event.iteration, "iterations": event.iterations, "rewards": (), "alarms": ()}
        done = event.evaluations  # the evaluation of the base comes first, and is not part of the work
        self.task = self.add_task("", start=event.iteration > 0, total=event.total, completed=done, first=done, **fields)

    def show(self, event: events.Training) -> None:
        counts: dict[str, Any] = {"iteration": event.iteration, "iterations": event.iterations}
        self.update(self.task, completed=event.evaluations, total=event.total, **counts)
        if event.row is None:
            return
        alarms = list(event.row.get("alarms", ()))
        rewards = [
            (key.removeprefix("reward/"), f"{value:.3f}") for key, value in event.row.items() if key.startswith("reward/")
        ]
        if event.row["kind"] == "train":
            self.update(self.task, rewards=rewards, alarms=alarms)
            if time.monotonic() - self.last >= BETWEEN:
                self.last = time.monotonic()
                self.tell()
        else:
            self.start_task(self.task)
            say_items(
                self.console, f"held-out pictures after iteration {event.row['iteration']}:", [*_alarms(alarms), *rewards]
            )


class _Rewards(ProgressColumn):
    """The rewards of the last iteration and the number of active alarms, in the remaining width."""

    def render(self, task: Task) -> Fitted:
        alarms = task.fields["alarms"]
        return Fitted([*([("alarms", str(len(alarms)))] if alarms else []), *task.fields["rewards"]])


def _alarms(names: Sequence[str]) -> Items:
    return [("alarm:", ", ".join(names))] if names else []


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


def warn(console: Console, line: str) -> None:
    """Prints a line that asks for attention."""
    console.print(f"[yellow]{escape(line)}[/]", highlight=False, soft_wrap=True)
