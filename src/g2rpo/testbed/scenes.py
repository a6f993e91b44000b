"""Scenes of a few flat shapes on a light background: their description, layout and drawing.

A `Scene` describes *what* a prompt asks for; a list of `Object`s is one layout of it, with positions.
One scene has many layouts. Everything is a function of a `numpy.random.Generator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Size = Literal["small", "large"]
Colour = Literal["red", "green", "blue", "yellow", "purple", "black"]
Shape = Literal["circle", "square", "triangle", "star"]
Relation = Literal["left of", "right of", "above", "below"]

SIZES: tuple[Size, ...] = get_args(Size)
COLOURS: tuple[Colour, ...] = get_args(Colour)
SHAPES: tuple[Shape, ...] = get_args(Shape)
RELATIONS: tuple[Relation, ...] = get_args(Relation)

SIDE = 64  # pixels
MAX_COUNT = 3  # objects in a group
MAX_TOTAL = 4  # objects in a scene
RGB: dict[Colour, tuple[int, int, int]] = {
    "red": (222, 48, 44),
    "green": (40, 160, 72),
    "blue": (44, 92, 220),
    "yellow": (244, 196, 32),
    "purple": (150, 64, 184),
    "black": (36, 36, 42),
}
RADII: dict[Size, tuple[float, float]] = {"small": (5.0, 6.0), "large": (8.2, 9.8)}
GAP = 4.5  # least distance between two bounding circles; corners reach out by a tenth, so at least 3 pixels stay free
MARGIN = 2.0  # least distance of a bounding circle to the frame
CELL = 16  # neat layouts put their objects near the middle of cells of this size
SUPERSAMPLE = 4

Box = tuple[float, float, float, float]
"""left, top, right, bottom."""
Picture = NDArray[np.uint8]
"""An image [64, 64, 3]."""


@dataclass(frozen=True)
class Group:
    """`count` objects alike; `size=None` leaves the size open (each layout then picks one for the whole group)."""

    count: int
    colour: Colour
    shape: Shape
    size: Size | None = None


@dataclass(frozen=True)
class Scene:
    """One group, or two groups of which the first stands in `relation` to the second."""

    groups: tuple[Group, ...]
    relation: Relation | None = None

    def __post_init__(self) -> None:
        if (len(self.groups), self.relation is None) not in ((1, True), (2, False)):
            raise ValueError("a scene is one group without, or two groups with, a relation")
        if any(not 1 <= g.count <= MAX_COUNT for g in self.groups):
            raise ValueError(f"a group has 1 to {MAX_COUNT} objects")
        if sum(g.count for g in self.groups) > MAX_TOTAL:
            raise ValueError(f"a scene has at most {MAX_TOTAL} objects")
        if len(self.groups) == 2 and kind(self.groups[0]) == kind(self.groups[1]):
            raise ValueError("two groups of one scene must differ in colour or shape")


@dataclass(frozen=True)
class Object:
    """One shape on the canvas: centre and radius of its bounding circle, in pixels (y grows downwards)."""

    x: float
    y: float
    radius: float
    colour: Colour
    shape: Shape


def kind(group: Group) -> tuple[Colour, Shape]:
    """The attributes in which two groups of a scene must differ."""
    return group.colour, group.shape


def sample_scene(rng: np.random.Generator) -> Scene:
    """A random scene: one group in a quarter of the cases, else two."""
    while True:
        try:
            if rng.random() < 0.25:
                return Scene((sample_group(rng),))
            groups = (sample_group(rng), sample_group(rng))
            return Scene(groups, RELATIONS[rng.integers(len(RELATIONS))])
        except ValueError:  # too many objects, or two groups of a kind: draw again
            continue


def sample_group(rng: np.random.Generator) -> Group:
    """A random group; its size is named in half of the cases."""
    return Group(
        count=int(rng.integers(1, MAX_COUNT + 1)),
        colour=COLOURS[rng.integers(len(COLOURS))],
        shape=SHAPES[rng.integers(len(SHAPES))],
        size=SIZES[rng.integers(len(SIZES))] if rng.random() < 0.5 else None,
    )


def layout(scene: Scene, rng: np.random.Generator, *, neat: bool = False) -> list[Object]:
    """Places a scene's objects at random, apart from each other, and on the side that the relation asks for.

    A `neat` layout keeps every object near the middle of a cell of a 4x4 grid, and objects of a size nearly equal.
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


def _place(group: Group, size: Size, region: Box, others: list[Object], rng: np.random.Generator) -> Object | None:
    """One object inside `region` with its gap to all others, or None when ten tries find no room."""
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


def _place_neatly(group: Group, size: Size, region: Box, others: list[Object], rng: np.random.Generator) -> Object | None:
    """One object near the middle of a cell whose middle lies in `region`, or None when ten tries find no free one."""
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


def outline(shape: Shape) -> list[tuple[float, float]]:
    """The corners of a polygon in the unit circle (or a tenth beyond), y downwards; a circle is a 48-gon."""
    if shape == "square":
        return [(-0.78, -0.78), (0.78, -0.78), (0.78, 0.78), (-0.78, 0.78)]
    if shape == "triangle":
        return [(0.0, -0.95), (0.94, 0.68), (-0.94, 0.68)]
    if shape == "star":
        ring = [(1.04 if i % 2 == 0 else 0.46, math.pi * i / 5) for i in range(10)]
        return [(r * math.sin(a), 0.05 - r * math.cos(a)) for r, a in ring]
    return [(0.92 * math.cos(a), 0.92 * math.sin(a)) for a in np.linspace(0, 2 * math.pi, 48, endpoint=False)]


def draw(objects: list[Object], rng: np.random.Generator) -> Picture:
    """Draws objects, anti-aliased, with a slight shade of the ground and of each group's colour."""
    ground = tuple(int(v) for v in 244 + rng.integers(-5, 6) + rng.integers(-2, 3, size=3))
    image = Image.new("RGB", (SIDE * SUPERSAMPLE, SIDE * SUPERSAMPLE), ground)
    pen = ImageDraw.Draw(image)
    shade = {o.colour: rng.integers(-8, 9, size=3) for o in objects}
    for o in objects:
        corners = [((o.x + o.radius * u) * SUPERSAMPLE, (o.y + o.radius * v) * SUPERSAMPLE) for u, v in outline(o.shape)]
        fill = tuple(int(v) for v in np.clip(np.array(RGB[o.colour]) + shade[o.colour], 0, 255))
        pen.polygon(corners, fill=fill)
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX))


def render(scene: Scene, seed: int) -> Picture:
    """A picture of `scene`: the same picture for the same seed."""
    rng = np.random.default_rng(seed)
    return draw(layout(scene, rng), rng)
