"""The key of a packet: which picture of a pair is whose. It is kept in the run's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from g2rpo.core.seeding import fair_sides, generator_for
from g2rpo.monitor.scores import Score
from g2rpo.run.run import Run

Side = Literal["base", "tuned"]
SIDES: tuple[Side, Side] = ("base", "tuned")
CONTROLS = 2
"""Pairs of two equal pictures in a packet. Who prefers one of them does not look closely."""
PLAIN = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
PacketId = Annotated[str, Field(pattern="^[0-9a-f]{12}$")]


class Pair(BaseModel):
    """A pair of a page. `pictures` are files, from RUN/packets; `scores` are by reward."""

    model_config = PLAIN

    prompt: str
    left: Side
    right: Side
    pictures: dict[Side, str]
    scores: dict[str, dict[Side, Score | None]]

    @property
    def control(self) -> bool:
        """Whether both pictures are the same."""
        return self.left == self.right


class Key(BaseModel):
    """The key of a packet. `seed` drew order and sides; `contents` are digests of prompts, model
    and weights; `trained` are the rewards of training."""

    model_config = PLAIN

    packet: PacketId
    seed: int
    weights: str
    contents: dict[str, str]
    steps: int
    trained: list[str]
    pairs: Annotated[list[Pair], Field(min_length=1)]


def file_of(run: Run, packet: str, name: str) -> Path:
    """What a run keeps of a packet: key.json; results.json (`answers.Opened`); pairs.jsonl, with
    the prompt, and the files of the chosen and rejected picture, of each decided answer."""
    return run.packets / f"{packet}.{name}"


@dataclass(frozen=True)
class Place:
    """A pair of a page: the pictures of the prompt `index` by these models."""

    index: int
    left: Side
    right: Side


def places(prompts: int, pairs: int, seed: int) -> list[Place]:
    """The pairs of a page in their order: base and tuned of at most `pairs` of the prompts, and
    `CONTROLS`, where there are four times as many prompts. A control shows one of both models,
    drawn too, and a prompt of its own: otherwise it would tell whose picture is in a pair."""
    controls = min(CONTROLS, prompts // 4)
    compared = min(pairs, prompts - controls)
    found: list[Place] = []
    for index, turned in enumerate(fair_sides(compared, seed, "sides")):
        left, right = reversed(SIDES) if turned else SIDES
        found.append(Place(index, left, right))
    for index, turned in enumerate(fair_sides(controls, seed, "controls"), compared):
        found.append(Place(index, SIDES[turned], SIDES[turned]))
    order = torch.randperm(len(found), generator=generator_for(seed, "order"))
    return [found[number] for number in order.tolist()]
