"""The answers of a person to `g2rpo teach`: lines of votes.jsonl, each written through to disk, and
the pictures beside it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from pathlib import Path
from typing import Annotated, Literal

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from g2rpo.core.data import Prompt
from g2rpo.core.errors import UserError
from g2rpo.core.files import append_line, local, write_whole
from g2rpo.core.images import to_tensor
from g2rpo.core.plain import read_lines_as
from g2rpo.prompts.judged import Judged, JudgedList, Kind, as_kind, read_judged

FILE, FOLDER, PAIRS = "votes.jsonl", "votes", "pairs.jsonl"
"""Names in a run directory: the answers, a folder of pictures for each round, and the answers as
pairs, as other trainers read them."""
ANSWERS = ("vote", "blind", "back")
"""Kinds of answers that can be taken back."""
Place = Annotated[int, Field(ge=0, lt=10**6)]


class Vote(BaseModel):
    """One answer: `liked` members of a group, none, or nothing at all (`skipped`); the begin of a
    blind comparison (`look`), and an answer to its pair `step` (`blind`): `liked` is 0 for the
    base's picture, 1 for the new one; back to weights that were confirmed (`back`); the undoing of
    the last of these (`undo`); another `strength` of learning from here on; learning without a head
    (`direct`).

    `iteration` is the number of updates when it was given, `digest` that of the group
    (`digest_of_answer`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    kind: Literal["vote", "undo", "strength", "direct", "look", "blind", "back"] = "vote"
    round: Place
    prompt: str = ""
    step: Place = 0
    digest: str = ""
    liked: tuple[Place, ...] = ()
    skipped: bool = False
    strength: Annotated[float, Field(ge=0, le=4)] = 1.0
    iteration: Place
    time: str = ""


def digest_of_answer(prompt: str, pictures: Tensor) -> str:
    """The digest of a group: its prompt, and its pictures [G, 3, H, W] in 8 bit, of clips their
    middle frames."""
    return hashlib.sha256(
        prompt.encode() + b"\0" + pictures.contiguous().numpy().tobytes()
    ).hexdigest()[:16]


def check_liked(liked: Sequence[int], size: int) -> None:
    """UserError unless these are members of a group of this size, but not all of them."""
    if (
        any(not 0 <= member < size for member in liked)
        or len(set(liked)) < len(liked)
        or len(liked) >= size
    ):
        named = list(liked)
        raise UserError(
            f"an answer names some of the {size} pictures, each once, from 0, and not all of them; got {named}"
        )


def append(path: Path, vote: Vote) -> None:
    """Adds a line, synced to disk."""
    append_line(path, vote.model_dump_json())


def read(path: Path) -> list[Vote]:
    """The lines of a file; UserError for one that is no vote, or takes none back."""
    if not path.is_file():
        raise UserError(
            f"votes {path}: there is no such file; `g2rpo teach` writes RUN/votes.jsonl"
        )
    votes = read_lines_as(Vote, path)
    changes = {**dict.fromkeys(ANSWERS, 1), "undo": -1}
    if any(total < 0 for total in accumulate(changes.get(vote.kind, 0) for vote in votes)):
        raise UserError(f"votes {path}: takes back more answers than it has")
    return votes


def standing(votes: Sequence[Vote]) -> list[Vote]:
    """The answers that name a picture and were not taken back."""
    found: list[Vote] = []
    for vote in votes:
        if vote.kind == "undo":
            found.pop()
        elif vote.kind in ANSWERS:
            found.append(vote)
    return [vote for vote in found if vote.kind == "vote" and vote.liked]


def pairs_of(run: Path) -> list[tuple[str, Judged]]:
    """The answers in a run directory (`answered`) as pairs of a liked picture and another one of
    its group, with their rounds."""
    pairs = []
    for vote, images in answered(run):
        files = sorted((run / FOLDER / f"{vote.round:06d}").glob("??????.png"))
        others = [place for place in range(len(images)) if place not in vote.liked]
        for pair in product(vote.liked, others):
            shown = [str(files[place]) for place in pair]
            judged = Judged.of(Prompt(vote.prompt), shown, (True, False))
            pairs.append((f"round {vote.round + 1}", judged))
    return pairs


def session_of(source: str | Path) -> Path | None:
    """The run directory of a session that `source` is, or whose votes it is; None for another
    source."""
    path = local(source)
    if path.name == FILE:
        return path.parent
    return path if os.path.isfile(path / FILE) else None


def judged_in(source: str | Path, kind: Kind) -> JudgedList:
    """The pairs or marks of a source for `read_judged`, or of the votes of a session."""
    session = session_of(source)
    if session is None:
        return read_judged(source, kind)
    return as_kind(pairs_of(session), kind, str(source))


def write_pairs(run: Path) -> None:
    """Writes the answers of a session as `PAIRS`, with pictures relative to it; without any there
    is no such file."""
    if not standing(read(run / FILE)):
        (run / PAIRS).unlink(missing_ok=True)
        return
    rows = []
    for _, pair in pairs_of(run):
        chosen, rejected = (os.path.relpath(path, run) for path in pair.pictures)
        rows.append({"prompt": str(pair), "chosen": chosen, "rejected": rejected})
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_whole(run / PAIRS, "".join(lines).encode())


def answered(run: Path) -> Iterator[tuple[Vote, Tensor]]:
    """The standing answers in a run directory, with the pictures [G, 3, H, W] of their groups in
    [0, 1]; UserError if there are none, or pictures cannot be read or are not those that were
    answered."""
    found = standing(read(run / FILE))
    if not found:
        raise UserError(f"{run / FILE}: names no picture that was liked")
    for vote in found:
        folder = run / FOLDER / f"{vote.round:06d}"
        try:
            pictures = [
                Image.open(path, formats=["PNG"]).convert("RGB")
                for path in sorted(folder.glob("??????.png"))
            ]
            group = to_tensor(pictures)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise UserError(
                f"{folder}: the pictures of round {vote.round + 1} cannot be read ({error})"
            ) from None
        if digest_of_answer(vote.prompt, group) != vote.digest:
            raise UserError(
                f"{run / FILE}: round {vote.round + 1} was answered for another prompt or other pictures than {folder} has"
            )
        check_liked(vote.liked, len(group))
        yield vote, group / 255
