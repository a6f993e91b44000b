"""How a word is drawn: in the middle of a sheet of paper, in DejaVu Sans Mono Bold, which comes
with matplotlib."""

from __future__ import annotations

from functools import cache

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from g2rpo.data.testbed.words.language import InkColour, Word

WORD_WIDTH, WORD_HEIGHT = 96, 32
FONT_SIZE = 24
ADVANCE = 14.45  # from one letter to the next
PAPER_COLOUR = (246, 243, 235)
INKS: dict[InkColour, tuple[int, int, int]] = {
    "red": (204, 36, 40),
    "green": (24, 130, 60),
    "blue": (36, 70, 200),
    "orange": (226, 116, 12),
    "purple": (132, 44, 160),
    "black": (28, 28, 32),
}


@cache
def font() -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(
        f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSansMono-Bold.ttf", FONT_SIZE
    )


def columns_of(length: int) -> tuple[int, int]:
    """The first column of a word of so many letters, and the first after it."""
    half = ADVANCE * length / 2
    return round(WORD_WIDTH / 2 - half), round(WORD_WIDTH / 2 + half)


def draw_word(word: Word) -> NDArray[np.uint8]:
    """The picture [32, 96, 3] of a word."""
    image = Image.new("RGB", (WORD_WIDTH, WORD_HEIGHT), PAPER_COLOUR)
    left = WORD_WIDTH / 2 - ADVANCE * len(word.letters) / 2
    for i, letter in enumerate(word.letters):
        place = (round(left + ADVANCE * (i + 0.5)), WORD_HEIGHT // 2 + 7)
        ImageDraw.Draw(image).text(place, letter, fill=INKS[word.colour], font=font(), anchor="ms")
    return np.asarray(image)
