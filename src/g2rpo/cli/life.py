"""A sign of life: a line on stderr while a command works in silence, as while libraries and models
are loaded."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from g2rpo.core.events import now_doing

FIRST_SILENCE = 0.5
"""Seconds of silence before the first line, which comes within two seconds of the start on a busy
machine too."""
SECONDS_AT_FIRST, SECONDS_LATER = 5.0, 60.0
"""Seconds between lines: in the first `FIRST_SECONDS` seconds of a silence, and afterwards, as while the
jobs of a study run."""
FIRST_SECONDS = 120.0
LOOK_SECONDS = 0.25
"""Seconds between two looks at the clock."""


class Life:
    """Whether something was said lately. One command runs in a process at a time."""

    def __init__(self) -> None:
        self._silent_since = 0.0
        self._told = 0.0
        self._paused = False

    def heard(self) -> None:
        """To be called when the command has printed something itself."""
        self._silent_since = self._told = time.monotonic()

    def pause(self) -> None:
        """No line until `go_on`: a bar shows progress, or a server waits for requests."""
        self._paused = True

    def go_on(self) -> None:
        """From now on silences are broken again."""
        self._paused = False
        self.heard()

    @contextmanager
    def of(self, work: str) -> Iterator[None]:
        """While entered, silences are broken by lines about `work`, if there is any; on rank 0
        only."""
        if not work or os.environ.get("RANK", "0") != "0":
            yield
            return
        over, began = threading.Event(), time.monotonic()
        self.go_on()
        teller = threading.Thread(target=self._tell, args=(work, began, over), daemon=True)
        teller.start()
        try:
            yield
        finally:
            over.set()
            teller.join()

    def _tell(self, work: str, began: float, over: threading.Event) -> None:
        while not over.wait(LOOK_SECONDS):
            if line := self.line(work, began):
                print(line, file=sys.stderr, flush=True)

    def line(self, work: str, began: float) -> str:
        """What is to be said at this moment, if anything."""
        now = time.monotonic()
        if self._paused or now - self._told < self._patience(now):
            return ""
        self._told = now
        doing = now_doing() or ("loading libraries" if _importing() else "")
        line = f"g2rpo: {work}: still working, {now - began:.0f} s"
        return f"{line}: {doing}" if doing else line

    def _patience(self, now: float) -> float:
        """The longest silence at this moment."""
        if self._told == self._silent_since:
            return FIRST_SILENCE
        return SECONDS_AT_FIRST if now - self._silent_since < FIRST_SECONDS else SECONDS_LATER


def _importing() -> bool:
    """Whether a thread imports a module."""
    for frame in sys._current_frames().values():
        each: FrameType | None = frame
        while each is not None:
            if each.f_code.co_filename == "<frozen importlib._bootstrap>":
                return True
            each = each.f_back
    return False


LIFE = Life()
