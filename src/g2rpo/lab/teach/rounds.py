"""The rounds of `g2rpo teach`: the groups of pictures on which a person is asked, and the answers,
lines of votes.jsonl, each written through to disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from g2rpo.core.errors import UserError
from g2rpo.core.files import write_whole
from g2rpo.core.images import to_uint8
from g2rpo.core.noise import generator_for
from g2rpo.core.plain import read_lines_as
from g2rpo.data.prompts import PromptOrder
from g2rpo.train.evaluation.heldout import picture_of
from g2rpo.train.monitor.pictures import stills
from g2rpo.train.run.folder import Run
from g2rpo.train.trainer import Trainer

SHOWN_STEPS = (0, 1)
"""Steps whose noise the groups differ by, by turns: that of later steps changes little that a person
can see."""
CANDIDATE_PROMPTS, PREVIEWED_PICTURES = 6, 3
"""Prompts that a round considers, and pictures that are drawn of each to find the one to ask about:
where twelve pictures are alike there is nothing to choose, and three tell it nearly as well as
twelve (studies/LOG.md)."""
MOST_PROMPTS = 64
"""Training prompts, at most, that groups are drawn from."""

Place = Annotated[int, Field(ge=0, lt=10**6)]
VoteKind = Literal["vote", "undo"]


@dataclass(frozen=True)
class AskedGroup:
    """Pictures [G, 3, H, W] in [0, 1], or clips, of one prompt, on which a person is asked."""

    round: int
    prompt: str
    step: int
    images: Tensor
    digest: str


class AskedGroups:
    """Draws the groups of a session, each by the weights as they are, from noise of its round."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.seed = trainer, trainer.config.trainer.seed
        first = PromptOrder(trainer.prompts, self.seed).batch(0, MOST_PROMPTS)
        self.order = PromptOrder(list(dict.fromkeys(first)), self.seed + 1)

    def draw(self, round: int) -> AskedGroup:
        """The group of the candidate prompt whose pictures differ most, by the first `PREVIEWED_PICTURES` of
        each."""
        step = SHOWN_STEPS[round % len(SHOWN_STEPS)]
        prompts = list(dict.fromkeys(self.order.batch(round, CANDIDATE_PROMPTS)))
        size = self.trainer.algorithm.group_size
        previews = self.pictures(round, step, prompts, min(PREVIEWED_PICTURES, size))
        spreads = [float(images.var(0).mean()) for images in previews]
        chosen = spreads.index(max(spreads))
        (images,) = self.pictures(round, step, prompts[chosen : chosen + 1], size, first=chosen)
        digest = digest_of_group(prompts[chosen], to_uint8(stills(images)))
        return AskedGroup(round, prompts[chosen], step, images, digest)

    def pictures(
        self, round: int, step: int, prompts: Sequence[str], size: int, first: int = 0
    ) -> list[Tensor]:
        """Those of a group of each of `prompts`, the candidates from the `first` on; one that is not
        finite is black."""
        t = self.trainer
        plan = {"branch_steps": (step,), "granularities": (1,), "branch_schedule": "all"}
        algorithm = replace(t.algorithm, group_size=size, **plan)  # type: ignore[type-var]

        def noise(place: int, *purpose: Any) -> torch.Generator:
            return generator_for(self.seed, "teach", round, first + place, *purpose)

        groups = t.sample_groups(prompts, algorithm, noise, rewards={})
        return [images[0].nan_to_num(0, 0, 0) for images in t.pictures(groups)]


class Click(BaseModel):
    """What the page sends: an answer to a group (`Session.answer`), or the taking back of the last."""

    model_config = ConfigDict(frozen=True)

    act: Literal["answer", "undo"]
    round: Place
    digest: str
    liked: list[Place]


class Vote(BaseModel):
    """One answer: the `liked` members of the group of a `round`, none if there is nothing to choose;
    or the taking back of the last answer (`undo`). `digest` is that of the group (`digest_of_group`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    kind: VoteKind = "vote"
    round: Place
    prompt: str = ""
    step: Place = 0
    digest: str = ""
    liked: tuple[Place, ...] = ()
    members: Place = 0
    time: str = ""


def digest_of_group(prompt: str, pictures: Tensor) -> str:
    """The digest of a group: its prompt, and its pictures [G, 3, H, W] in 8 bit, of clips their
    middle frames."""
    content = prompt.encode() + b"\0" + pictures.contiguous().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def read_votes(path: Path) -> list[Vote]:
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
    for vote in standing(read_votes(run.votes)):
        others = [member for member in range(vote.members) if member not in vote.liked]
        folder = run.group(vote.round)
        for pair in product(vote.liked, others):
            chosen, rejected = (
                picture_of(folder, member).relative_to(run.path).as_posix() for member in pair
            )
            row = {"prompt": vote.prompt, "chosen": chosen, "rejected": rejected}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_whole(run.pairs, "".join(lines).encode())
