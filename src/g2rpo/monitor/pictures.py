"""Pictures for people: grids of samples, before and after, with their scores."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from g2rpo.plain import parse_json

INK, SOFT, PAPER = (40, 40, 46), (93, 96, 105), (255, 255, 255)
RIGHT, WRONG = (0, 97, 158), (182, 70, 0)
LINE = 15  # pixels from one line of text to the next
CELL = 128  # pixels of a small picture in a grid; larger ones keep up to twice as many
NOTE = "g2rpo-grid"  # the PNG text chunk with the layout


def to_pil(image: Tensor) -> Image.Image:
    """A PIL picture of [3, H, W], 8 bit or in [0, 1]."""
    pixels = image if image.dtype == torch.uint8 else (image.clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())


@dataclass(frozen=True)
class Strip:
    """A row of a grid: pictures [N, 3, H, W], their scores [N] by reward and, if a reward defines it, whether they are right
    [N] (1, 0, or NaN for unknown)."""

    images: Tensor
    label: str = ""
    scores: Mapping[str, Tensor] = field(default_factory=dict)
    right: Tensor | None = None

    def said(self, index: int) -> list[str]:
        """One line for each score of a picture."""
        return [f"{name} {figure(float(values[index]))}" for name, values in self.scores.items()]

    def verdict(self, index: int) -> bool | None:
        return None if self.right is None or math.isnan(self.right[index]) else bool(self.right[index])


def figure(value: float) -> str:
    """A score for people: three decimals, fewer if it is large."""
    return "no score" if math.isnan(value) else f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"


def save_grid(path: Path, strips: Sequence[Strip], prompts: Sequence[str], note: str = "") -> None:
    """Writes strips of pictures, one column per prompt with the prompt above it; under each picture its verdict and scores, and
    below all the `note`. The file contains all this and the layout as text, so that `read_grid` can separate it again.
    """
    font = ImageFont.load_default(size=12)
    images = strips[0].images
    width = min(max(CELL, images.shape[3]), 2 * CELL)
    height = round(width * images.shape[2] / images.shape[3])
    left, top, gap = (64 if any(strip.label for strip in strips) else 8), 46, 8
    under = LINE * max(len(strip.scores) + (strip.right is not None) for strip in strips)
    right, step = left + len(prompts) * (width + gap), height + under + gap
    words = [line for part in note.split("\n") for line in textwrap.wrap(part, max(20, (right - 16) // 6))]
    canvas = Image.new("RGB", (right, top + len(strips) * step + LINE * len(words)), PAPER)
    draw = ImageDraw.Draw(canvas)
    boxes = [[(left + c * (width + gap), top + r * step) for c in range(len(prompts))] for r in range(len(strips))]
    for prompt, (x, _) in zip(prompts, boxes[0], strict=True):
        lines = textwrap.wrap(prompt, width // 6)
        text = "\n".join([*lines[:2], lines[2] + " ..."] if len(lines) > 3 else lines)
        draw.multiline_text((x, 3), text, fill=INK, font=font, spacing=1)
    for strip, corners in zip(strips, boxes, strict=True):
        draw.text((8, corners[0][1] + height // 2 - 8), strip.label, fill=INK, font=font)
        for index, (x, y) in enumerate(corners):
            canvas.paste(to_pil(strip.images[index]).resize((width, height), Image.Resampling.LANCZOS), (x, y))
            y += height + 1
            if strip.right is not None:
                _mark(draw, x, y, strip.verdict(index), font)
                y += LINE
            for line in strip.said(index):
                draw.text((x, y), line, fill=SOFT, font=font)
                y += LINE
    for number, line in enumerate(words):
        draw.text((8, top + len(strips) * step + LINE * number - 2), line, fill=INK, font=font)
    about = {
        "prompts": list(prompts),
        "size": [width, height],
        "boxes": boxes,
        "scores": [[_plain(strip.scores, i) for i in range(len(prompts))] for strip in strips],
        "right": [[strip.verdict(i) for i in range(len(prompts))] for strip in strips],
        "note": note,
    }
    info = PngInfo()
    info.add_itxt(NOTE, json.dumps(about, ensure_ascii=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path, pnginfo=info)


def _mark(draw: ImageDraw.ImageDraw, x: int, y: int, right: bool | None, font: Any) -> None:
    """A tick or a cross, and the word, so that no reader depends on colour."""
    if right is None:
        draw.text((x, y), "no verdict", fill=SOFT, font=font)
        return
    colour = RIGHT if right else WRONG
    strokes = [((1, 7), (4, 10), (10, 3))] if right else [((1, 3), (9, 11)), ((1, 11), (9, 3))]
    for stroke in strokes:
        draw.line([(x + across, y + down) for across, down in stroke], fill=colour, width=2)
    draw.text((x + 15, y), "right" if right else "wrong", fill=colour, font=font)


def _plain(scores: Mapping[str, Tensor], index: int) -> dict[str, float | None]:
    values = {name: float(each[index]) for name, each in scores.items()}
    return {name: None if math.isnan(value) else value for name, value in values.items()}


@dataclass(frozen=True)
class Grid:
    """The contents of a grid: rows of one picture per prompt, its scores by reward (None: no score), and whether it is right
    (None: not known). Older grids have no scores and no verdicts."""

    prompts: list[str]
    rows: list[list[Image.Image]]
    scores: list[list[dict[str, float | None]]]
    right: list[list[bool | None]]


def read_grid(path: Path) -> Grid:
    """The contents of a file of `save_grid`, at the drawn size (small pictures enlarged, large ones reduced). Raises ValueError
    for any other picture.
    """
    try:
        with Image.open(path, formats=["PNG"]) as canvas:
            if NOTE not in canvas.info:
                raise ValueError("does not say what it shows")
            note = parse_json(canvas.info[NOTE])
            (width, height), prompts, rows = note["size"], note["prompts"], note["boxes"]
            boxes = [[(x, y, x + width, y + height) for x, y in row] for row in rows]
            for x, y, right, bottom in (box for row in boxes for box in row):
                if not (0 <= x < right <= canvas.width and 0 <= y < bottom <= canvas.height):
                    raise ValueError("names a place outside of itself")
            if not boxes or any(len(row) != len(prompts) for row in boxes):
                raise ValueError("does not hold a picture for every prompt")
            scores = [
                [{str(name): None if v is None else float(v) for name, v in dict(cell).items()} for cell in row]
                for row in note.get("scores", [[{}] * len(prompts)] * len(boxes))
            ]
            right = [
                [None if v is None else bool(v) for v in row] for row in note.get("right", [[None] * len(prompts)] * len(boxes))
            ]
            if any([len(row) for row in table] != [len(row) for row in boxes] for table in (scores, right)):
                raise ValueError("does not hold scores for every picture")
            cropped = [[canvas.crop(box) for box in row] for row in boxes]
            return Grid([str(prompt) for prompt in prompts], cropped, scores, right)
    except (ValueError, TypeError, KeyError, AttributeError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} {error}") from None
