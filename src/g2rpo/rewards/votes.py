"""The answers of a person to `g2rpo teach`: lines of votes.jsonl, each written through to disk, and the pictures beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

from PIL import Image
from torch import Tensor

from g2rpo.core.errors import UserError
from g2rpo.core.files import append_line
from g2rpo.core.images import to_tensor
from g2rpo.core.plain import read_json_lines

FILE, FOLDER = "votes.jsonl", "votes"
"""Names in a run directory: the answers, and a folder of pictures for each round."""
Kind = Literal["vote", "undo", "strength", "direct"]


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One answer: `liked` members of a group, none, or nothing at all (`skipped`); the undoing of the last answer; another
    `strength` of learning from here on; or learning without a head (`direct`).

    `iteration` is the number of updates when it was given, `digest` that of the group's pictures, `ahead` the session's.
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
    ahead: int = 1
    seconds: float = 0.0
    time: str = ""


def append(path: Path, vote: Vote) -> None:
    """Adds a line, synced to disk."""
    append_line(path, json.dumps(asdict(vote)))


def read(path: Path) -> list[Vote]:
    """The lines of a file; UserError for one that is no vote, or takes none back."""
    if not path.is_file():
        raise UserError(f"votes {path}: there is no such file; `g2rpo teach` writes RUN/votes.jsonl")
    try:
        rows = read_json_lines(path, dict)
    except ValueError as error:
        raise UserError(f"votes {path}: {error}") from None
    votes = [_vote(path, number, row) for number, row in enumerate(rows, 1)]
    if any(total < 0 for total in accumulate({"vote": 1, "undo": -1}.get(vote.kind, 0) for vote in votes)):
        raise UserError(f"votes {path}: takes back more answers than it has")
    return votes


def vote_of(fields: Mapping[str, Any]) -> Vote:
    """The answer with these fields, as JSON has them; TypeError if they are no answer's."""
    return Vote(**{**fields, "liked": tuple(fields.get("liked", ()))})


def _vote(path: Path, number: int, row: dict[str, Any]) -> Vote:
    try:
        vote = vote_of(row)
        known = vote.kind in get_args(Kind) and all(isinstance(member, int) for member in vote.liked)
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


def answered(run: Path) -> Iterator[tuple[Vote, Tensor]]:
    """The standing answers in a run directory, with the pictures [G, 3, H, W] of their groups in [0, 1]; UserError if there are
    none or pictures cannot be read."""
    found = standing(read(run / FILE))
    if not found:
        raise UserError(f"{run / FILE}: names no picture that was liked")
    for vote in found:
        folder = run / FOLDER / f"{vote.round:06d}"
        try:
            pictures = [Image.open(path, formats=["PNG"]).convert("RGB") for path in sorted(folder.glob("??????.png"))]
            yield vote, to_tensor(pictures) / 255
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise UserError(f"{folder}: the pictures of round {vote.round + 1} cannot be read ({error})") from None
