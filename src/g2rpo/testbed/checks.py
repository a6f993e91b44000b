"""Checks whether a picture shows its scene: questions with answers between 0 and 1."""

from __future__ import annotations

from collections.abc import Callable

from g2rpo.testbed.detector import Found
from g2rpo.testbed.scenes import Group, Relation, Scene, kind

_HOLDS: dict[Relation, Callable[[Found, Found], bool]] = {
    "left of": lambda a, b: a.x < b.x,
    "right of": lambda a, b: a.x > b.x,
    "above": lambda a, b: a.y < b.y,
    "below": lambda a, b: a.y > b.y,
}


def check_scene(scene: Scene, objects: list[Found]) -> dict[str, float]:
    """Answers by question; all are 1 exactly when the picture shows the scene and nothing else.

    For each group: is there such an object (.5 for the right colour or shape alone), the ratio of actual and asked count and,
    if a size is named, the share of objects that have it. For the scene: the share of pairs that satisfy the relation, and
    the share of all objects that belong to it.
    """
    members = [[o for o in objects if (o.colour, o.shape) == kind(group)] for group in scene.groups]
    others = [o for o in objects if not any(o in found for found in members)]
    answers: dict[str, float] = {}
    for i, (group, found) in enumerate(zip(scene.groups, members, strict=True)):
        answers[f"object {i}"] = 1.0 if found else _resemblance(group, others)
        answers[f"count {i}"] = min(len(found), group.count) / max(len(found), group.count)
        if group.size is not None:
            answers[f"size {i}"] = sum(o.size == group.size for o in found) / max(len(found), 1)
    if scene.relation is not None:
        holds = [_HOLDS[scene.relation](a, b) for a in members[0] for b in members[1]]
        answers["relation"] = sum(holds) / max(len(holds), 1)
    answers["nothing else"] = 1 - len(others) / len(objects) if objects else 0.0
    return answers


def _resemblance(group: Group, others: list[Found]) -> float:
    """0.5 if another object has the group's colour or shape, else 0."""
    return 0.5 if any(o.colour == group.colour or o.shape == group.shape for o in others) else 0.0
