"""Ctrl-C, SIGTERM and SIGHUP: a command ends with a message and an exit code, and a run saves a
checkpoint.

Loads nothing heavy, so that the signals are handled while heavy libraries load.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from g2rpo.core.errors import Interrupted, Preempted, Stopped, where
from g2rpo.core.process import (
    EXIT_CODES,
    end_at_once,
    exit_code,
    stop_signals,
    stopped_by,
)


class Stopping:
    """Handles these signals: by raising `Interrupted`, or inside `after` by calling `ask`.

    `message` describes what is kept if the command ends now; without one nothing is.
    """

    def __init__(self, message: str = "") -> None:
        self.message = message
        self.asked: signal.Signals | None = None
        self._raised: signal.Signals | None = None
        self._ask: Callable[[], None] | None = None

    @contextmanager
    def after(self, ask: Callable[[], None]) -> Iterator[None]:
        """While entered, the first signal calls `ask`, which ends the command later; a second
        Ctrl-C ends it at once."""
        self.honour()
        self._ask = ask
        try:
            yield
        finally:
            self._ask = None

    def honour(self) -> None:
        """Raises `Interrupted` if the one that `handle` raised has not arrived: a library caught
        it, or made another error of it, as imports do."""
        if self._raised is not None:
            raise self._interrupted(self._raised)

    @contextmanager
    def handling(self, *signals: signal.Signals) -> Iterator[None]:
        """While entered, these signals are handled, none of them lost; a no-op outside the main
        thread."""
        # only the main one may set handlers
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle) for number in signals}
        try:
            yield
            self.honour()
        except (Exception, SystemExit):
            self.honour()
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        impatient = self.asked is not None and number == signal.SIGINT
        self.asked = self.asked or signal.Signals(number)
        if self._ask is None and _imports_torch(frame):
            end_at_once(self.asked, self.message)
        if self._ask is None or impatient:
            self._raised = self.asked
            raise self._interrupted(self.asked)
        self._ask()
        again = (
            "; press again to stop at once"
            if number == signal.SIGINT
            else f" ({signal.Signals(number).name})"
        )
        _tell(f"stopping after this iteration{again}")

    def _interrupted(self, number: signal.Signals) -> Interrupted:
        return Interrupted(self.message or stopped_by(number), exit_code(number, self.message))


@contextmanager
def stoppable(message: str) -> Iterator[Stopping]:
    """While entered, the signals are handled by `Stopping`; a no-op outside the main thread."""
    stopping = Stopping(message)
    try:
        with stopping.handling(*stop_signals()):
            yield stopping
    except Preempted as error:
        error.exit_code = EXIT_CODES[stopping.asked or signal.SIGTERM]
        raise
    except SystemExit as error:  # from the user's code; an exit code of 0 would be wrong
        raise Stopped(
            f"code that the command called has ended it: sys.exit({error.code!r}){where(error)}"
        ) from error


@contextmanager
def until_ctrl_c() -> Iterator[None]:
    """While entered, Ctrl-C ends the block and not the command; outside the main thread nothing
    changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGINT, before)


def _imports_torch(frame: FrameType | None) -> bool:
    """Whether a module of torch is being imported. Its C++ calls Python, and aborts the process if
    that raises."""
    while frame is not None:
        if (
            frame.f_code.co_name == "<module>"
            and str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"
        ):
            return True
        frame = frame.f_back
    return False


def _tell(words: str) -> None:
    """Writes unbuffered, because a signal may interrupt a buffered write; on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # a terminal that is gone must not keep a run from saving
            os.write(2, f"\ng2rpo: {words}\n".encode())
