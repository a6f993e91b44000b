"""Pictures for people: grids of samples, before and after, and curves."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from g2rpo.metrics import Row

INK, PAPER = (40, 40, 46), (255, 255, 255)
CELL = 128
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: safe for colour-blind readers


def to_pil(image: Tensor) -> Image.Image:
    """A PIL picture of [3, H, W] in [0, 1]."""
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(pixels)


def save_grid(path: Path, rows: Sequence[Tensor], prompts: Sequence[str], labels: Sequence[str]) -> None:
    """Writes rows of pictures [N, 3, H, W], one column per prompt with the prompt above it and a label before each row."""
    font = ImageFont.load_default(size=12)
    height = round(CELL * rows[0].shape[2] / rows[0].shape[3])
    left, top, gap = (64 if any(labels) else 8), 46, 8
    canvas = Image.new("RGB", (left + len(prompts) * (CELL + gap), top + len(rows) * (height + gap)), PAPER)
    draw = ImageDraw.Draw(canvas)
    for column, prompt in enumerate(prompts):
        lines = textwrap.wrap(prompt, 21)
        text = "\n".join([*lines[:2], lines[2] + " ..."] if len(lines) > 3 else lines)
        draw.multiline_text((left + column * (CELL + gap), 3), text, fill=INK, font=font, spacing=1)
    for number, (images, label) in enumerate(zip(rows, labels, strict=True)):
        y = top + number * (height + gap)
        draw.text((8, y + height // 2 - 8), label, fill=INK, font=font)
        for column, image in enumerate(images):
            picture = to_pil(image).resize((CELL, height), Image.Resampling.LANCZOS)
            canvas.paste(picture, (left + column * (CELL + gap), y))
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path)


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
