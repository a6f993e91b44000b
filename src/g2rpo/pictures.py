"""Pictures for people: grids of samples, before and after, and curves."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from g2rpo.metrics import Row
from g2rpo.plain import parse_json

INK, PAPER = (40, 40, 46), (255, 255, 255)
CELL = 128  # pixels of a small picture in a grid; larger ones keep up to twice as many
NOTE = "g2rpo-grid"  # the text of the PNG that says what is where
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: safe for colour-blind readers


def to_pil(image: Tensor) -> Image.Image:
    """A PIL picture of [3, H, W] in [0, 1]."""
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(pixels)


def save_grid(path: Path, rows: Sequence[Tensor], prompts: Sequence[str], labels: Sequence[str]) -> None:
    """Writes rows of pictures [N, 3, H, W], one column per prompt with the prompt above it and a label before each row.

    The file carries the prompts and its geometry, so that `read_grid` can take it apart again.
    """
    font = ImageFont.load_default(size=12)
    width = min(max(CELL, rows[0].shape[3]), 2 * CELL)
    height = round(width * rows[0].shape[2] / rows[0].shape[3])
    left, top, gap = (64 if any(labels) else 8), 46, 8
    canvas = Image.new("RGB", (left + len(prompts) * (width + gap), top + len(rows) * (height + gap)), PAPER)
    draw = ImageDraw.Draw(canvas)
    boxes = [[(left + c * (width + gap), top + r * (height + gap)) for c in range(len(prompts))] for r in range(len(rows))]
    for prompt, (x, _) in zip(prompts, boxes[0], strict=True):
        lines = textwrap.wrap(prompt, width // 6)
        text = "\n".join([*lines[:2], lines[2] + " ..."] if len(lines) > 3 else lines)
        draw.multiline_text((x, 3), text, fill=INK, font=font, spacing=1)
    for images, label, corners in zip(rows, labels, boxes, strict=True):
        draw.text((8, corners[0][1] + height // 2 - 8), label, fill=INK, font=font)
        for image, corner in zip(images, corners, strict=True):
            canvas.paste(to_pil(image).resize((width, height), Image.Resampling.LANCZOS), corner)
    note = PngInfo()
    note.add_itxt(NOTE, json.dumps({"prompts": list(prompts), "size": [width, height], "boxes": boxes}, ensure_ascii=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path, pnginfo=note)


@dataclass(frozen=True)
class Grid:
    """A grid taken apart: rows of one picture per prompt."""

    prompts: list[str]
    rows: list[list[Image.Image]]


def read_grid(path: Path) -> Grid:
    """What `save_grid` wrote, as it was drawn (so small pictures are enlarged, large ones reduced).

    Raises ValueError for a picture that is no such grid.
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
            return Grid([str(prompt) for prompt in prompts], [[canvas.crop(box) for box in row] for row in boxes])
    except (ValueError, TypeError, KeyError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} {error}") from None


def save_curves(path: Path, rows: Sequence[Row], trained: Sequence[str]) -> None:
    """Writes one panel per reward: held-out evaluations as points on a line, and training batches behind them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    evaluations = [row for row in rows if row["kind"] == "eval"]
    iterations = [row for row in rows if row["kind"] == "train"]
    names = [key.removeprefix("reward/") for key in (evaluations[0] if evaluations else {}) if key.startswith("reward/")]
    columns = min(3, max(1, len(names)))
    lines = -(-max(1, len(names)) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4.2 * columns, 3 * lines), squeeze=False, layout="constrained")
    for axis in list(axes.flat)[len(names) :]:
        axis.remove()
    for axis, name, colour in zip(axes.flat, names, COLOURS * len(names), strict=False):
        key = f"reward/{name}"
        if name in trained:
            axis.plot([r["iteration"] for r in iterations], [r[key] for r in iterations], color=colour, alpha=0.3, linewidth=1)
        axis.plot([r["iteration"] for r in evaluations], [r[key] for r in evaluations], color=colour, marker="o", markersize=4)
        axis.set_title(f"{name} ({'trained on' if name in trained else 'judged only'})", fontsize=10)
        axis.set_xlabel("iteration", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
