"""Scenes of a few flat shapes on a light background: their description, layout, drawing and prompts,
and an exact, procedural detector of the objects in a picture, without learned weights.

A `Scene` describes *what* a prompt asks for; a list of `Object`s is one layout of it, with
positions. One scene has many layouts. Everything is a function of a `numpy.random.Generator`.

    prompt = group | group relation group
    group  = ("a" | "one" | "two" | "three") [size] colour shape

The train and held-out prompts are lists fixed by the rules below, in a shuffled order that never
changes.

Of a picture, foreground is what differs from the ground; each connected component is one object; its
colour is the nearest of the palette to its median; its shape is the nearest of a few templates,
compared at a common size.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from scipy import ndimage

from g2rpo.core.errors import shown

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
SUPERSAMPLE = 4

Picture = NDArray[np.uint8]
"""An image [64, 64, 3]."""


@dataclass(frozen=True)
class Group:
    """`count` objects alike; `size=None` leaves the size open (each layout then picks one for the
    whole group)."""

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
    """One shape on the canvas: centre and radius of its bounding circle, in pixels (y grows
    downwards)."""

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


def outline(shape: Shape) -> list[tuple[float, float]]:
    """The corners of a polygon in the unit circle (or a tenth beyond), y downwards; a circle is a
    48-gon."""
    if shape == "square":
        return [(-0.78, -0.78), (0.78, -0.78), (0.78, 0.78), (-0.78, 0.78)]
    if shape == "triangle":
        return [(0.0, -0.95), (0.94, 0.68), (-0.94, 0.68)]
    if shape == "star":
        ring = [(1.04 if i % 2 == 0 else 0.46, math.pi * i / 5) for i in range(10)]
        return [(r * math.sin(a), 0.05 - r * math.cos(a)) for r, a in ring]
    return [
        (0.92 * math.cos(a), 0.92 * math.sin(a))
        for a in np.linspace(0, 2 * math.pi, 48, endpoint=False)
    ]


def draw_scene(objects: list[Object], rng: np.random.Generator) -> Picture:
    """Draws objects, anti-aliased, with a slight shade of the ground and of each group's colour."""
    ground = tuple(int(v) for v in 244 + rng.integers(-5, 6) + rng.integers(-2, 3, size=3))
    image = Image.new("RGB", (SIDE * SUPERSAMPLE, SIDE * SUPERSAMPLE), ground)
    pen = ImageDraw.Draw(image)
    shade = {o.colour: rng.integers(-8, 9, size=3) for o in objects}
    for o in objects:
        corners = [
            ((o.x + o.radius * u) * SUPERSAMPLE, (o.y + o.radius * v) * SUPERSAMPLE)
            for u, v in outline(o.shape)
        ]
        fill = tuple(int(v) for v in np.clip(np.array(RGB[o.colour]) + shade[o.colour], 0, 255))
        pen.polygon(corners, fill=fill)
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX))


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


LEAST_FOREGROUND = 0.25  # least difference from the ground, in any channel
SMALLEST_OBJECT = 8  # components of fewer pixels are dust, not objects
COLOUR_TOLERANCE = 0.3  # largest distance to the palette, in RGB
SHAPE_TOLERANCE = 0.11  # largest mean difference to a template
PATCH_SIDE = 16  # shapes are compared as 16x16 patches
LARGE_FROM = (RADII["small"][1] + RADII["large"][0]) / 2

FloatArray = NDArray[np.float32]
_PALETTE: FloatArray = (np.array([RGB[c] for c in COLOURS]) / 255).astype(np.float32)


@dataclass(frozen=True)
class FoundObject:
    """One object of a picture. `colour` or `shape` is None if it is unlike all known ones."""

    x: float
    y: float
    radius: float
    colour: Colour | None
    shape: Shape | None

    @property
    def size(self) -> Size:
        return "large" if self.radius >= LARGE_FROM else "small"


def detect(image: FloatArray) -> list[FoundObject]:
    """All objects of an image [3, H, W] with values in [0, 1], in reading order of their topmost
    pixels."""
    pixels = np.moveaxis(image, 0, -1)
    ground = np.median(pixels.reshape(-1, 3)[::3], axis=0)
    difference = pixels - ground
    labels, _ = ndimage.label(np.abs(difference).max(-1) > LEAST_FOREGROUND)
    boxes = ndimage.find_objects(labels)
    return [
        found
        for k, box in enumerate(boxes, 1)
        if (found := _describe(difference, labels, k, box, ground)) is not None
    ]


def _describe(
    difference: FloatArray, labels: NDArray[np.int32], k: int, box: tuple, ground: FloatArray
) -> FoundObject | None:
    """The object of component `k`, which lies in `box`, or None if it is too small."""
    rows, cols = (slice(max(s.start - 1, 0), s.stop + 1) for s in box)
    inside = labels[rows, cols] == k
    if inside.sum() < SMALLEST_OBJECT:
        return None
    local = difference[rows, cols]
    strength = np.abs(local).sum(-1)
    core = local[inside & (strength >= np.median(strength[inside]))]
    ink = np.median(core, axis=0)  # the object's colour, less the ground
    distance = np.linalg.norm(_PALETTE - (ink + ground), axis=1)
    nearest = int(distance.argmin())
    colour = COLOURS[nearest] if distance[nearest] <= COLOUR_TOLERANCE else None

    cover = np.clip(local @ ink / (ink @ ink), 0, 1) * ndimage.binary_dilation(
        inside, np.ones((3, 3))
    )
    area = float(cover.sum())
    v, u = (
        float((cover.sum(axis) * np.arange(cover.shape[1 - axis])).sum() / area) for axis in (1, 0)
    )
    names, templates, areas = _templates()
    error = np.abs(templates - _patch(cover, u, v, area)).mean((1, 2))
    best = int(error.argmin())
    radius = float(np.sqrt(area / areas[best]))
    shape = names[best] if error[best] <= SHAPE_TOLERANCE else None
    return FoundObject(cols.start + u + 0.5, rows.start + v + 0.5, radius, colour, shape)


def _patch(cover: FloatArray, u: float, v: float, area: float) -> FloatArray:
    """`cover` around its centroid (u, v), resampled so that every shape has the same area."""
    reach = np.sqrt(area) * np.linspace(-1, 1, PATCH_SIDE)
    grid = np.meshgrid(v + reach, u + reach, indexing="ij")
    return ndimage.map_coordinates(cover, grid, order=1, output=np.float32)


@cache
def _templates() -> tuple[list[Shape], FloatArray, FloatArray]:
    """Names [T], patches [T, 16, 16] and areas (at unit radius) [T] of every shape, small and
    large."""
    names: list[Shape] = []
    patches, areas = [], []
    for shape in SHAPES:
        for radius in (sum(RADII["small"]) / 2, sum(RADII["large"]) / 2):
            picture = draw_scene(
                [Object(SIDE / 2, SIDE / 2, radius, "black", shape)], np.random.default_rng(0)
            )
            grey = picture[..., 0].astype(np.float32)
            cover = (grey.max() - grey) / (grey.max() - grey.min())
            area = float(cover.sum())
            v, u = ndimage.center_of_mass(cover)
            names.append(shape)
            patches.append(_patch(cover, u, v, area))
            areas.append(area / radius**2)
    return names, np.stack(patches), np.array(areas, np.float32)
