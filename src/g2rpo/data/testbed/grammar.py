"""Prompts and scenes: rendering, parsing, and the held-out compositions.

    prompt = group | group relation group
    group  = ("a" | "one" | "two" | "three") [size] colour shape

The train and held-out prompts are lists fixed by the rules below, in a shuffled order that never
changes.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Literal, get_args

import numpy as np

from g2rpo.core.errors import shown
from g2rpo.data.testbed.scenes import (
    COLOURS,
    RELATIONS,
    SHAPES,
    SIZES,
    Group,
    Scene,
    kind,
    sample_scene,
)

SceneSplit = Literal["train", "heldout"]
SPLIT_SIZES: dict[SceneSplit, int] = {"train": 2000, "heldout": 400}

NUMBERS = ("a", "two", "three")
COUNTS = {"a": 1, "one": 1, "two": 2, "three": 3}
NOUNS = {word: shape for shape in SHAPES for word in (shape, f"{shape}s")}


def render_prompt(scene: Scene) -> str:
    """The prompt that means `scene`; `parse` undoes it."""
    texts = [_group_text(group) for group in scene.groups]
    return texts[0] if scene.relation is None else f"{texts[0]} {scene.relation} {texts[1]}"


def _group_text(group: Group) -> str:
    noun = group.shape if group.count == 1 else f"{group.shape}s"
    return " ".join(filter(None, (NUMBERS[group.count - 1], group.size, group.colour, noun)))


def parse(prompt: str) -> Scene:
    """The scene that `prompt` asks for; ValueError says which word does not belong."""
    words = prompt.lower().strip().rstrip(".").split()
    if not words:
        raise ValueError("the prompt is empty")
    first, rest = _parse_group(words, prompt)
    if not rest:
        return Scene((first,))
    for relation in RELATIONS:
        head = relation.split()
        if rest[: len(head)] == head:
            second, rest = _parse_group(rest[len(head) :], prompt)
            if rest:
                raise ValueError(f"unexpected {' '.join(rest)!r} at the end of {shown(prompt)}")
            return Scene((first, second), relation)
    raise ValueError(
        f"expected one of {', '.join(RELATIONS)} at {' '.join(rest)!r} in {shown(prompt)}"
    )


def _parse_group(words: list[str], prompt: str) -> tuple[Group, list[str]]:
    """The group that `words` begin with, and the words after it."""

    def take(meaning: str, choices: tuple[str, ...]) -> str:
        found = words[0] if words else "the end"
        if found not in choices:
            raise ValueError(
                f"expected {meaning} ({', '.join(choices)}), found {shown(found)} in {shown(prompt)}"
            )
        return words.pop(0)

    words = list(words)
    count = COUNTS[take("a number", tuple(COUNTS))]
    size = next((s for s in SIZES if words[:1] == [s]), None)
    words = words[1:] if size else words
    colour = COLOURS[COLOURS.index(take("a colour", COLOURS))]
    shape = NOUNS[take("a shape", tuple(NOUNS))]
    return Group(count, colour, shape, size), words


def is_heldout(scene: Scene) -> bool:
    """Whether neither pretraining nor training may see this scene: a fixed fifth of all
    compositions.

    Of two groups the pair of (colour, shape) kinds is held out, whatever their order, counts, sizes
    and relation; of a single group the triple (count, colour, shape).
    """
    if scene.relation is None:
        group = scene.groups[0]
        key = f"{group.count} {group.colour} {group.shape}"
    else:
        key = " + ".join(sorted(" ".join(kind(group)) for group in scene.groups))
    return zlib.crc32(key.encode()) % 5 == 0


@cache
def scene_prompts(split: SceneSplit) -> tuple[str, ...]:
    """The prompts of a split, distinct, in a fixed shuffled order; any prefix is a fair sample."""
    if split not in get_args(SceneSplit):
        raise ValueError(
            f"unknown split {shown(split)}, expected one of {', '.join(get_args(SceneSplit))}"
        )
    rng = np.random.default_rng(zlib.crc32(split.encode()))
    found: dict[str, None] = {}
    while len(found) < SPLIT_SIZES[split]:
        scene = sample_scene(rng)
        if is_heldout(scene) == (split == "heldout"):
            found[render_prompt(scene)] = None
    return tuple(found)
