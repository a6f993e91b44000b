"""What a use case reports while it works: events, given to one callable. The command line shows
them; from Python they are silent unless asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line imports this before anything that takes long
    from g2rpo.core.data import Row
    from g2rpo.core.statistics import Comparison


@dataclass(frozen=True)
class Line:
    """A line of text, after the `title` that it is about."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class Serving:
    """The last line before a server waits for requests."""

    text: str


@dataclass(frozen=True)
class Caution:
    """A line that asks for attention."""

    text: str


@dataclass(frozen=True)
class Progress:
    """So much of a piece of work is done; the first event has what was done before."""

    name: str
    unit: str
    done: int
    total: int


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a run in iterations and in network evaluations, with each `row` of metrics as
    it is logged."""

    iteration: int
    iterations: int
    evaluations: int
    total: int
    row: Row | None = None


@dataclass(frozen=True)
class TrainingEnded:
    """The iterations are over after so many seconds; base and tuned are compared next."""

    seconds: float


@dataclass(frozen=True)
class Results:
    """A finished run: base against tuned by reward."""

    directory: Path
    table: Mapping[str, Comparison]
    heldout: Sequence[str]
    trained: Sequence[str]
    """The rewards that were trained on."""
    plugins: bool
    """Whether the run's model is code of the user's."""


Event = Line | Serving | Caution | Progress | TrainingProgress | TrainingEnded | Results
Emit = Callable[[Event], None]


def silent(event: Event) -> None:
    """For callers who want no reports."""


_doing: list[str] = []


@contextmanager
def doing(what: str) -> Iterator[None]:
    """While entered, `what` takes the time: a command that is silent says so (`now_doing`)."""
    _doing.append(what)
    try:
        yield
    finally:
        _doing.remove(what)  # another thread may have begun something


def now_doing() -> str:
    """What began last of all that takes time now; "" for nothing."""
    return _doing[-1] if _doing else ""


def cautions(emit: Emit) -> Callable[[str], None]:
    """`emit` for messages that are all cautions."""
    return lambda message: emit(Caution(message))
