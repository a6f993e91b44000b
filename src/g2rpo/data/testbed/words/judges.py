"""Judges of a written word that need no model: is the ink's colour right, is the paper clean, is
the drawing clean?

All follow the `Reward` protocol: images [B, 3, 32, 96] in [0, 1] and their prompts to scores [B],
float32 on the CPU, higher is better; NaN for prompts of another form. Spelling is judged by the
reward `ocr`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from g2rpo.core.types import Reward
from g2rpo.data.testbed.words.drawing import (
    INKS,
    PAPER_COLOUR,
    WORD_HEIGHT,
    WORD_WIDTH,
    columns_of,
    draw_word,
)
from g2rpo.data.testbed.words.language import LETTERS, InkColour, Word, parse_word

TOLERANCE = 0.06  # of clean paper: 15 levels of 255, in any channel
INK_DISTANCE = 0.35  # least distance of ink from the paper, in any channel
LEAST_INK = 20  # pixels; a thin letter has more
WORD_MARGIN = 3  # pixels around the word that are not judged as paper


class _Judge(Reward):
    """Scores each picture for the word that its prompt asks for."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        words = map(parse_word, prompts)
        pairs = zip(images.float().cpu(), words, strict=True)
        return torch.tensor(
            [float("nan") if word is None else self.score(image, word) for image, word in pairs]
        )

    def score(self, image: Tensor, word: Word) -> float:
        """Of one picture [3, 32, 96]."""
        raise NotImplementedError


class WordColour(_Judge):
    """How close the ink's mean colour is to the asked one: 1 minus their distance in RGB, in units
    of the asked ink's distance from the paper; 0 on an empty sheet. Ink of another of the six
    colours scores at most .73."""

    right = 0.85  # half-way to the nearest of the other colours
    right_in_words = "in the asked colour"

    def score(self, image: Tensor, word: Word) -> float:
        asked, ink = colour(INKS[word.colour]).flatten(), ink_of(image)
        return (
            0.0
            if ink is None
            else 1 - float((ink - asked).norm() / (colour(PAPER_COLOUR).flatten() - asked).norm())
        )


class WordPaper(_Judge):
    """The share of the sheet, outside the place of the word, that has the colour of paper: no
    speckles, no letters too many."""

    def score(self, image: Tensor, word: Word) -> float:
        left, right = columns_of(len(word.letters))
        beside = torch.cat(
            [image[..., : max(left - WORD_MARGIN, 0)], image[..., right + WORD_MARGIN :]], dim=-1
        )
        return float(((beside - colour(PAPER_COLOUR)).abs().amax(0) <= TOLERANCE).float().mean())


class WordDrawing(_Judge):
    """How cleanly letters are drawn, right or wrong ones: PSNR in dB to the clean drawing of the
    nearest ones, at most 60."""

    def score(self, image: Tensor, word: Word) -> float:
        shown = Word(letters_of(image, word), word.colour)
        return float(-10 * torch.log10((image - picture(shown)).pow(2).mean().clamp(min=1e-6)))


class WordLetters(_Judge):
    """The share of letters whose nearest clean letter is the asked one."""

    def score(self, image: Tensor, word: Word) -> float:
        return sum(
            a == b for a, b in zip(letters_of(image, word), word.letters, strict=True)
        ) / len(word.letters)


def colour(rgb: tuple[int, int, int]) -> Tensor:
    """[3, 1, 1] in [0, 1]."""
    return torch.tensor(rgb).view(3, 1, 1) / 255


@lru_cache(maxsize=512)
def picture(word: Word) -> Tensor:
    """The clean drawing [3, 32, 96] in [0, 1]."""
    return torch.from_numpy(np.array(draw_word(word))).permute(2, 0, 1).float() / 255


def ink_of(image: Tensor) -> Tensor | None:
    """The mean colour [3] of the half of the ink that differs most from the paper, which leaves out
    letters' edges; None on an empty sheet."""
    far = (image - colour(PAPER_COLOUR)).abs().amax(0)
    ink = far[far > INK_DISTANCE]
    return None if len(ink) < LEAST_INK else image[:, far >= ink.median()].mean(1)


def letters_of(image: Tensor, word: Word) -> str:
    """The letter nearest to each place of `word` in the picture, by mean absolute difference."""
    left, right = columns_of(len(word.letters))
    places, own = image[..., left:right], _alphabet(len(word.letters), word.colour)
    nearest = [
        torch.cdist(places[..., a:b].reshape(1, -1), letters, p=1).argmin()
        for (a, b), letters in own.items()
    ]
    return "".join(LETTERS[int(letter)] for letter in nearest)


@cache
def _alphabet(length: int, ink: InkColour) -> dict[tuple[int, int], Tensor]:
    """By place, its first column in the word and the first after it, all letters as they are drawn
    there: [26, 3 * 32 * columns]."""
    left, right = columns_of(length)
    pictures = torch.stack([picture(Word(letter * length, ink)) for letter in LETTERS])
    assert pictures.shape[-2:] == (WORD_HEIGHT, WORD_WIDTH)
    edges = np.linspace(0, right - left, length + 1).round().astype(int).tolist()
    return {(a, b): pictures[..., left + a : left + b].flatten(1) for a, b in pairwise(edges)}
