"""What the pictures of the pages share: fonts, colours, and words with a tick or a cross. At twice
the pixels of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from g2rpo.train.monitor.pictures import (
    PAGE_COLOUR,
    RIGHT_COLOUR,
    SOFT_COLOUR,
    TEXT_COLOUR,
    WRONG_COLOUR,
)

TINT = {True: (226, 240, 250), False: (253, 233, 220)}  # behind a word that is right, or wrong
WORD = (192, 64)  # pixels of a word in a picture: twice its own


@dataclass(frozen=True)
class Word:
    """A drawn word, the letters that were asked for, and whether the picture shows them."""

    picture: Image.Image
    letters: str
    right: bool


@cache
def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib and has ticks and crosses."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size)


def draw_word(canvas: Image.Image, word: Word, x: int, y: int) -> int:
    """The word's picture, and below it a tick or a cross with the letters asked for; returns the
    height."""
    draw, (width, height) = ImageDraw.Draw(canvas), WORD
    draw.rounded_rectangle((x, y, x + width, y + height + 36), 8, fill=TINT[word.right])
    canvas.paste(word.picture.convert("RGB").resize(WORD, Image.Resampling.BICUBIC), (x, y))
    text, colour = (
        f"{'✓' if word.right else '✗'} {word.letters}",
        RIGHT_COLOUR if word.right else WRONG_COLOUR,
    )
    draw.text(
        (x + width // 2, y + height + 18), text, fill=colour, font=font(22, bold=True), anchor="mm"
    )
    return height + 36


def before_and_after(sides: Sequence[tuple[str, str, Sequence[Word]]], columns: int) -> Image.Image:
    """Panels beside each other, each a heading, a line below it and words in rows."""
    gap, between, top = 14, 52, 104
    panel = columns * (WORD[0] + gap) - gap
    rows = -(-len(sides[0][2]) // columns)
    canvas = Image.new(
        "RGB",
        (len(sides) * (panel + between) - between + 2 * gap, top + rows * (100 + gap)),
        PAGE_COLOUR,
    )
    draw = ImageDraw.Draw(canvas)
    for number, (heading, below, words) in enumerate(sides):
        left = gap + number * (panel + between)
        draw.text((left, 10), heading, fill=TEXT_COLOUR, font=font(40, bold=True))
        draw.text((left, 62), below, fill=SOFT_COLOUR, font=font(24))
        for i, word in enumerate(words):
            draw_word(
                canvas, word, left + i % columns * (WORD[0] + gap), top + i // columns * (100 + gap)
            )
    return canvas
