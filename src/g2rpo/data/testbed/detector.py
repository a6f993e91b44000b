"""An exact, procedural detector of the objects in a picture, without learned weights, in well under
a millisecond.

Foreground is what differs from the ground; each connected component is one object; its colour is
the nearest of the palette to its median; its shape is the nearest of a few templates, compared at a
common size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from g2rpo.data.testbed.scenes import (
    COLOURS,
    RADII,
    RGB,
    SHAPES,
    SIDE,
    Colour,
    Object,
    Shape,
    Size,
    draw_scene,
)

FOREGROUND = 0.25  # least difference from the ground, in any channel
SPECK = 8  # components of fewer pixels are dust, not objects
COLOUR_TOLERANCE = 0.3  # largest distance to the palette, in RGB
SHAPE_TOLERANCE = 0.11  # largest mean difference to a template
PATCH = 16  # shapes are compared as 16x16 patches
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
    labels, _ = ndimage.label(np.abs(difference).max(-1) > FOREGROUND)
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
    if inside.sum() < SPECK:
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
    reach = np.sqrt(area) * np.linspace(-1, 1, PATCH)
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
