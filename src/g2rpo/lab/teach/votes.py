"""The answers of a person to `g2rpo teach`: lines of votes.jsonl, each written through to disk, and
the pictures beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from g2rpo.core.errors import UserError
from g2rpo.core.files import write_whole
from g2rpo.core.plain import read_lines_as
from g2rpo.train.monitor.scores import picture_of
from g2rpo.train.run.folder import Run

Place = Annotated[int, Field(ge=0, lt=10**6)]


class Vote(BaseModel):
    """One answer: the `liked` members of the group of a `round`, none if there is nothing to choose;
    or the taking back of the last answer (`undo`). `digest` is that of the group (`digest_of`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    kind: Literal["vote", "undo"] = "vote"
    round: Place
    prompt: str = ""
    step: Place = 0
    digest: str = ""
    liked: tuple[Place, ...] = ()
    members: Place = 0
    time: str = ""


def digest_of(prompt: str, pictures: Tensor) -> str:
    """The digest of a group: its prompt, and its pictures [G, 3, H, W] in 8 bit, of clips their
    middle frames."""
    content = prompt.encode() + b"\0" + pictures.contiguous().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def read(path: Path) -> list[Vote]:
    """The lines of a file; UserError for one that is no vote, or takes none back."""
    if not path.is_file():
        raise UserError(
            f"votes {path}: there is no such file; `g2rpo teach` writes RUN/votes.jsonl"
        )
    votes = read_lines_as(Vote, path)
    standing(votes, str(path))
    return votes


def standing(votes: Sequence[Vote], name: str = "") -> list[Vote]:
    """The answers that were not taken back."""
    found: list[Vote] = []
    for vote in votes:
        if vote.kind == "vote":
            found.append(vote)
        elif not found:
            raise UserError(f"votes {name}: takes back more answers than it has")
        else:
            found.pop()
    return found


def write_pairs(run: Run) -> None:
    """Writes the answers of a session as pairs of a liked picture and another one of its group, with
    pictures relative to the run; the reward `pairs` and other trainers read them."""
    lines = []
    for vote in standing(read(run.votes)):
        others = [member for member in range(vote.members) if member not in vote.liked]
        folder = run.group(vote.round)
        for pair in product(vote.liked, others):
            chosen, rejected = (
                picture_of(folder, member).relative_to(run.path).as_posix() for member in pair
            )
            row = {"prompt": vote.prompt, "chosen": chosen, "rejected": rejected}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_whole(run.pairs, "".join(lines).encode())
