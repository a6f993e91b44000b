"""The answers of a person, as lines of votes.jsonl, each written through to disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from g2rpo.core.errors import UserError
from g2rpo.core.files import append_line
from g2rpo.core.plain import read_json_lines

Kind = Literal["vote", "undo", "strength"]


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One answer: `liked` members of a group, none, or nothing at all (`skipped`); the undoing of the last answer; or another
    `strength` of learning from here on.

    `iteration` is the number of updates before it counts, `digest` that of the group's pictures.
    """

    kind: Kind = "vote"
    round: int
    prompt: str = ""
    step: int = 0
    digest: str = ""
    liked: tuple[int, ...] = ()
    skipped: bool = False
    strength: float = 1.0
    iteration: int
    seconds: float = 0.0
    time: str = ""


def append(path: Path, vote: Vote) -> None:
    """Adds a line, synced to disk."""
    append_line(path, json.dumps(asdict(vote)))


def read(path: Path) -> list[Vote]:
    """The lines of a file; UserError for one that is no vote."""
    if not path.is_file():
        raise UserError(f"votes {path}: there is no such file; `g2rpo teach` writes RUN/votes.jsonl")
    return [_vote(path, number, row) for number, row in enumerate(read_json_lines(path, dict), 1)]


def _vote(path: Path, number: int, row: dict[str, Any]) -> Vote:
    try:
        vote = Vote(**{**row, "liked": tuple(row.get("liked", ()))})
        known = vote.kind in ("vote", "undo", "strength") and all(isinstance(member, int) for member in vote.liked)
    except TypeError:
        known = False
    if not known:
        raise UserError(f"votes {path}, line {number}: is no answer that g2rpo teach wrote")
    return vote


def standing(votes: Sequence[Vote]) -> list[Vote]:
    """The answers that name a picture and were not taken back."""
    found: list[Vote] = []
    for vote in votes:
        if vote.kind == "undo":
            found.pop()
        elif vote.kind == "vote":
            found.append(vote)
    return [vote for vote in found if vote.liked]
