"""The one exception that means: what the user gave is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Wrong input. The message says what is wrong, where, and what would be right; the command line exits with 2."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x' or 'y'?" for near matches of `word`, else the known words, as the end of a message."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if near:
        return f" Did you mean {' or '.join(repr(match) for match in near)}?"
    return f" Known: {', '.join(known)}."
