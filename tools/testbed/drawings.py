"""Random drawings of scenes: where their objects stand, scenes that differ in one attribute, and
the training pictures."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from g2rpo.data.testbed.scenes import (
    COLOURS,
    MAX_COUNT,
    RADII,
    SHAPES,
    SIDE,
    SIZES,
    Group,
    Object,
    Picture,
    Relation,
    Scene,
    Size,
    draw_scene,
    is_heldout,
    parse,
    render_prompt,
    sample_scene,
)
from tools.testbed.training import Context, to_images

# least distance between two bounding circles; corners reach out by a tenth, so at least 3 pixels
# stay free
GAP = 4.5
MARGIN = 2.0  # least distance of a bounding circle to the frame
FAMILY = 4  # pictures in a row of the data that share a scene but for one edit
CELL = 16  # neat layouts put their objects near the middle of cells of this size

Box = tuple[float, float, float, float]
"""left, top, right, bottom."""

OPPOSITE: dict[Relation, Relation] = {
    "left of": "right of",
    "right of": "left of",
    "above": "below",
    "below": "above",
}


def render(scene: Scene, seed: int) -> Picture:
    """A picture of `scene`: the same picture for the same seed."""
    rng = np.random.default_rng(seed)
    return draw_scene(layout(scene, rng), rng)


def layout(scene: Scene, rng: np.random.Generator, *, neat: bool = False) -> list[Object]:
    """Places a scene's objects at random, apart from each other, and on the side that the relation
    asks for.

    A `neat` layout keeps every object near the middle of a cell of a 4x4 grid, and objects of a
    size nearly equal.
    """
    place = _place_neatly if neat else _place
    while True:
        objects: list[Object] = []
        regions = _regions(scene, rng)
        for group, region in zip(scene.groups, regions, strict=True):
            size = group.size or SIZES[rng.integers(len(SIZES))]
            for _ in range(group.count):
                placed = place(group, size, region, objects, rng)
                if placed is None:
                    break
                objects.append(placed)
        if len(objects) == sum(g.count for g in scene.groups):
            return objects


def _regions(scene: Scene, rng: np.random.Generator) -> list[Box]:
    """Boxes, one per group, apart along the relation's axis; more objects get more room."""
    if scene.relation is None:
        return [(0, 0, SIDE, SIDE)]
    ahead = scene.relation in ("left of", "above")
    near, far = scene.groups if ahead else scene.groups[::-1]
    cut = (rng.uniform(0.4, 0.6) + 0.06 * (near.count - far.count)) * SIDE
    if scene.relation in ("left of", "right of"):
        boxes: list[Box] = [(0, 0, cut, SIDE), (cut, 0, SIDE, SIDE)]
    else:
        boxes = [(0, 0, SIDE, cut), (0, cut, SIDE, SIDE)]
    return boxes if ahead else boxes[::-1]


def _place(
    group: Group, size: Size, region: Box, others: list[Object], rng: np.random.Generator
) -> Object | None:
    """One object inside `region` with its gap to all others, or None when ten tries find no
    room."""
    left, top, right, bottom = region
    for _ in range(10):
        radius = rng.uniform(*RADII[size])
        room = radius + MARGIN
        if right - left < 2 * room or bottom - top < 2 * room:
            continue
        x, y = rng.uniform(left + room, right - room), rng.uniform(top + room, bottom - room)
        if _is_free(x, y, radius, others):
            return Object(x, y, radius, group.colour, group.shape)
    return None


def _place_neatly(
    group: Group, size: Size, region: Box, others: list[Object], rng: np.random.Generator
) -> Object | None:
    """One object near the middle of a cell whose middle lies in `region`, or None when ten tries
    find no free one."""
    left, top, right, bottom = region
    low, high = RADII[size]
    for _ in range(10):
        radius = rng.uniform(low, low + (high - low) / 4)
        middle = (rng.integers(SIDE // CELL, size=2) + 0.5) * CELL
        if not (left <= middle[0] < right and top <= middle[1] < bottom):
            continue
        room = radius + MARGIN
        x, y = np.clip(middle + rng.uniform(-1, 1, size=2), room, SIDE - room).tolist()
        if _is_free(x, y, radius, others):
            return Object(x, y, radius, group.colour, group.shape)
    return None


def _is_free(x: float, y: float, radius: float, others: list[Object]) -> bool:
    return all(math.hypot(x - o.x, y - o.y) >= radius + o.radius + GAP for o in others)


def sample_train_scene(rng: np.random.Generator) -> Scene:
    """A random scene that is not held out."""
    return next(scene for scene in iter(lambda: sample_scene(rng), None) if not is_heldout(scene))


def edits(scene: Scene) -> Iterator[Scene]:
    """All scenes that differ from `scene` in one attribute of one group, or in the relation turned
    round."""
    for i, group in enumerate(scene.groups):
        changed: list[Group] = []
        changed += [
            dataclasses.replace(group, count=n) for n in range(1, MAX_COUNT + 1) if n != group.count
        ]
        changed += [dataclasses.replace(group, colour=c) for c in COLOURS if c != group.colour]
        changed += [dataclasses.replace(group, shape=s) for s in SHAPES if s != group.shape]
        if group.size is not None:
            changed += [dataclasses.replace(group, size=s) for s in SIZES if s != group.size]
        for new in changed:
            groups = (*scene.groups[:i], new, *scene.groups[i + 1 :])
            try:
                yield dataclasses.replace(scene, groups=groups)
            except ValueError:  # too many objects, or the groups have become alike
                continue
    if scene.relation is not None:
        yield turned_round(scene)


def turned_round(scene: Scene) -> Scene:
    """The same two groups, in the opposite relation."""
    if scene.relation is None:
        raise ValueError("a single group has no relation to turn round")
    return dataclasses.replace(scene, relation=OPPOSITE[scene.relation])


def attribute(scene: Scene, edited: Scene) -> str:
    """Which attribute an edit has changed: count, colour, shape, size or relation."""
    for a, b in zip(scene.groups, edited.groups, strict=True):
        for name in ("count", "colour", "shape", "size"):
            if getattr(a, name) != getattr(b, name):
                return name
    return "relation"


def corrupt(scene: Scene, rng: np.random.Generator) -> Scene:
    """A random edit of `scene`, each kind of attribute equally likely, that is not held out."""
    by_attribute: dict[str, list[Scene]] = {}
    for edited in edits(scene):
        if not is_heldout(edited):
            by_attribute.setdefault(attribute(scene, edited), []).append(edited)
    choices = by_attribute[sorted(by_attribute)[rng.integers(len(by_attribute))]]
    return choices[rng.integers(len(choices))]


@dataclass(frozen=True)
class Dataset:
    """Pictures [N, 64, 64, 3] uint8 and their scenes, in families of `FAMILY` that differ in one
    edit."""

    pictures: NDArray[np.uint8]
    scenes: list[Scene]

    def images(self, rows: NDArray[np.int64] | slice) -> Tensor:
        """Rows as float images [B, 3, 64, 64] in [0, 1]."""
        return to_images(self.pictures[rows])

    @property
    def prompts(self) -> list[str]:
        return [render_prompt(scene) for scene in self.scenes]


def draw_dataset(rng: np.random.Generator, count: int, *, neat: bool = False) -> Dataset:
    """`count` pictures and their scenes, family by family; none is held out."""
    scenes: list[Scene] = []
    pictures = np.empty((count, SIDE, SIDE, 3), np.uint8)
    while len(scenes) < count:
        base = sample_train_scene(rng)
        for scene in (base, *(corrupt(base, rng) for _ in range(FAMILY - 1))):
            pictures[len(scenes)] = draw_scene(layout(scene, rng, neat=neat), rng)
            scenes.append(scene)
    return Dataset(pictures, scenes)


@cache
def training_pictures(ctx: Context) -> Dataset:
    """What the autoencoder and the learned rewards are trained on; an earlier run's are read
    back."""
    pictures_file, prompts_file = ctx.work / "pictures.npy", ctx.work / "prompts.json"
    if not prompts_file.exists():
        with torch.random.fork_rng(devices=[]):
            dataset = draw_dataset(ctx.rng("world"), ctx.scaled(100_000, 256))
        np.save(pictures_file, dataset.pictures)
        prompts_file.write_text(json.dumps(dataset.prompts), encoding="utf-8")
    scenes = [parse(prompt) for prompt in json.loads(prompts_file.read_text(encoding="utf-8"))]
    return Dataset(np.load(pictures_file, mmap_mode="r"), scenes)
