"""Durations of the phases of an iteration."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """Seconds by phase on `clock`."""

    seconds: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Discards the time since the last lap."""
        self._last = self.clock()

    def lap(self, phase: str) -> None:
        """Adds the time since the last lap to `phase`."""
        now = self.clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
