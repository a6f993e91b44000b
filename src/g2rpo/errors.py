"""What ends a command with a message instead of a traceback."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parent))
"""Where Python's own code, installed packages and this one lie."""


class UserError(Exception):
    """Wrong input. The message says what is wrong, where, and what would be right; the command line exits with 2."""


class Stopped(Exception):
    """A run that ended before its time, though nothing that the user gave is wrong; exit code 1. The message says why."""

    exit_code = 1


class Preempted(Stopped):
    """The run was asked to end, and left a checkpoint; exit code 75, which by custom means: try again."""

    exit_code = 75


class RolledBack(Stopped):
    """An alarm ended the run, and the trainer has the weights of its best evaluation."""


class RankLost(Stopped):
    """Another rank has died, or did not answer in time."""


class RewardFailed(Stopped):
    """A reward raised an exception, or answered nonsense. Its cause, if any, has the traceback."""


def where(error: BaseException) -> str:
    """ " (in NAME, FILE:LINE: CODE)" of the innermost line on the way to `error` that is no library's; "" if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(LIBRARIES)]
    return f" (in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x' or 'y'?" for near matches of `word`, else the known words, as the end of a message."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if near:
        return f" Did you mean {' or '.join(repr(match) for match in near)}?"
    return f" Known: {', '.join(known)}."
