"""Waiting for what will come, never for a time."""

import time

PATIENCE_S = 180.0
"""Ends what hangs, and nothing that a machine with much to do is slow with."""


def until(condition, alive=lambda: True, what=lambda: ""):
    """Returns once `condition()` is true; `alive()` is false where it cannot become true any more,
    and `what()` tells why."""
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert alive() and time.monotonic() < ends, what()
        time.sleep(0.01)
