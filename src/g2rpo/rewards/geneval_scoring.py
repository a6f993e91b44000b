"""GenEval's scoring of detected objects (Ghosh et al. 2023, arXiv 2310.11513; djghosh13/geneval,
evaluate_images.py, MIT), and Flow-GRPO's partial score on the same detections (arXiv 2505.05470;
yifan123/reward-server, gen_eval.py, MIT)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from g2rpo.core.plain import as_json, parse_as

ColourWord = Literal[
    "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"
]
RelationWord = Literal["left of", "right of", "above", "below"]
COLOUR_WORDS: tuple[str, ...] = get_args(ColourWord)
MOST_OBJECTS = 16
"""The most confident objects of a class that are considered."""
FREE_SHARE = 0.1
"""The share of the sum of two objects' sizes by which their centres may differ without a
relation."""


@dataclass(frozen=True)
class Detection:
    """An object in a picture: its class, confidence, corners (left, top, right, bottom) and, if
    known, its pixels [H, W]."""

    label: str
    score: float
    box: tuple[float, float, float, float]
    mask: Tensor | None = None


FoundObjects = Mapping[str, Sequence[Detection]]
"""Detections by class, the most confident first."""
NameColours = Callable[[str, Sequence[Detection]], list[str]]
"""The colours of objects of one class."""


class Clause(BaseModel):
    """A requirement on a picture: the count of objects of a class, their colour, and their position
    relative to an earlier clause's."""

    model_config = ConfigDict(frozen=True)

    label: str = Field(alias="class")
    count: Annotated[int, Field(ge=1)]
    colour: ColourWord | None = Field(None, alias="color")
    position: tuple[RelationWord, Annotated[int, Field(ge=0)]] | None = None


class Task(BaseModel):
    """GenEval's metadata of a prompt; other fields are ignored."""

    model_config = ConfigDict(frozen=True)

    include: Annotated[list[Clause], Field(min_length=1)]
    exclude: list[Clause] = []
    tag: Any = None

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Task | None:
        """The task of a prompt's metadata, None if it has no `include`; ValueError says what is
        wrong with it."""
        if not metadata.get("include"):
            return None
        named = {
            "include": metadata["include"],
            "exclude": metadata.get("exclude") or [],
            "tag": metadata.get("tag"),
        }
        return parse_as(cls, as_json(named))

    @model_validator(mode="after")
    def _positions_are_of_earlier_clauses(self) -> Task:
        for index, clause in enumerate(self.include):
            if clause.position is not None and clause.position[1] >= index:
                raise ValueError(
                    f"include.{index}.position: {clause.position[1]} is not the number of an earlier clause"
                )
        return self

    @property
    def counting(self) -> bool:
        return bool(self.tag == "counting")

    @property
    def labels(self) -> set[str]:
        return {clause.label for clause in (*self.include, *self.exclude)}


def by_class(detections: Sequence[Detection], threshold: float) -> FoundObjects:
    """Detections above `threshold` by class, the most confident first, at most `MOST_OBJECTS` of
    each."""
    found: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda each: -each.score):
        if detection.score > threshold:
            found.setdefault(detection.label, []).append(detection)
    return {label: objects[:MOST_OBJECTS] for label, objects in found.items()}


def is_correct(task: Task, found: FoundObjects, name_colours: NameColours) -> bool:
    """GenEval's score: whether all of `include` is there and nothing of `exclude`.

    At least `count` objects are needed, and the `count` most confident ones must have the colour
    and the position.
    """
    matched: list[Sequence[Detection] | None] = []
    for clause in task.include:
        objects = found.get(clause.label, ())[: clause.count]
        right = len(objects) >= clause.count
        if right and clause.colour is not None:
            right = name_colours(clause.label, objects).count(clause.colour) >= clause.count
        if right and clause.position is not None:
            right = _stands(objects, clause.position, matched)
        matched.append(objects if right else None)
    return None not in matched and not any(
        len(found.get(c.label, ())) >= c.count for c in task.exclude
    )


def partial_score(task: Task, found: FoundObjects, name_colours: NameColours) -> float:
    """Flow-GRPO's reward, at most 1, and 1 if all is right: the mean over its clauses.

    A clause gives 1 - |count - objects| / count, negative for many more, and the same for objects
    of the right colour. Where the number is wrong, colour and position give 0. A position gives 1
    if right, 0 and (as published) another 1 if wrong, and nothing where the colour is wrong.
    `exclude` is not used, since counts must be exact.
    """
    matched: list[Sequence[Detection] | None] = []
    scores: list[float] = []
    for clause in task.include:
        objects = found.get(clause.label, ())
        right = len(objects) == clause.count
        scores.append(_share(len(objects), clause.count))
        if not right and (clause.colour or clause.position):
            scores.append(0.0)
        if right and clause.colour is not None:
            coloured = name_colours(clause.label, objects).count(clause.colour)
            scores.append(_share(coloured, clause.count))
            right = coloured == clause.count
        if right and clause.position is not None:
            placed = matched[clause.position[1]] is not None
            right = _stands(objects, clause.position, matched)
            scores += [1.0] if right else [0.0, 1.0] if placed else [0.0]
        matched.append(objects if right else None)
    return sum(scores) / len(scores)


def _share(number: int, asked: int) -> float:
    return 1 - abs(asked - number) / asked


def _stands(
    objects: Sequence[Detection],
    position: tuple[str, int],
    matched: Sequence[Sequence[Detection] | None],
) -> bool:
    """Whether all objects have the required position relative to all objects of an earlier
    clause."""
    relation, target = position
    others = matched[target]
    return others is not None and all(
        relation in relations(a.box, b.box) for a in objects for b in others
    )


def relations(a: Sequence[float], b: Sequence[float]) -> set[str]:
    """The position of box `a` relative to box `b`: none, one or two of `RelationWord`.

    The offset of the centres is shortened by a tenth of the sizes; a direction counts if it is more
    than half of the offset.
    """
    corners = np.array([a, b], dtype=np.float64).reshape(2, 2, 2)
    centres, sizes = corners.mean(axis=1), np.abs(corners[:, 1] - corners[:, 0])
    offset = centres[0] - centres[1]
    kept = np.maximum(np.abs(offset) - FREE_SHARE * sizes.sum(axis=0), 0) * np.sign(offset)
    if np.all(np.abs(kept) < 1e-3):
        return set()
    x, y = kept / np.linalg.norm(offset)
    checks = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in checks.items() if holds}
