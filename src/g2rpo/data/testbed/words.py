"""Pictures of one written word: prompts such as 'tiger' in red, which words are held out, and how a
word is drawn, in the middle of a sheet of paper, in DejaVu Sans Mono Bold, which comes with
matplotlib.

Words have three to six letters. The held-out ones are English; those of pretraining are any
letters, and those of training are made of consonants and vowels in turn. Neither of these two is
ever a held-out word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from g2rpo.core.errors import shown

WordSplit = Literal["train", "heldout"]
InkColour = Literal["red", "green", "blue", "orange", "purple", "black"]
INK_COLOURS: tuple[InkColour, ...] = get_args(InkColour)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTHS = (3, 4, 5, 6)
TRAIN_PROMPTS = 2000
CONSONANTS = "bbccddddffgghhjkkllllmmmnnnnnppqrrrrrsssssttttttvwxyz"  # about as often as in English
VOWELS = "aaaeeeeeiiiooouu"

HELDOUT_WORDS = (
    "acorn actor album angel ankle apple april arrow autumn bacon badge bagel baker banjo barn basket beach bear berry bird "
    "bishop blue boat bottle bread bridge brook brush bubble bucket butter cabin cactus camel candle canoe carpet castle "
    "cat cave cedar cello chair chalk cheese cherry circus citrus clock cloud clover coffee comet copper coral cotton cow "
    "crab crane cup daisy dance desert diary doctor dog dollar donkey dragon dream drum duck eagle earth echo elbow ember "
    "engine fabric falcon farmer fern fever field fig finger fire flag flame flower flute forest fox frog frost fruit "
    "galaxy garden garlic giant ginger glass globe glove goat gold goose grape grass guitar hammer harbor hat hazel hero "
    "hill honey horse hotel house iron island ivory jacket jaguar jam jelly jewel jungle kayak kettle king kite kitten "
    "knight ladder lake lamp lemon letter lily lion lizard lotus lunch magic magnet mango maple marble market meadow melon "
    "meteor milk mirror monkey moon mouse music nest night north novel nut oak oasis ocean olive onion orange orchid otter "
    "oven owl oyster paint palace panda paper parrot peach pearl pepper piano picnic pig pilot pirate planet plum pocket "
    "poet pond potato puzzle queen quilt rabbit radio rain raven ribbon rice river robot rocket rose ruby saddle sailor "
    "salt sand school sea shadow sheep ship silk silver sky snake snow spider spoon spring squid star stone storm sugar "
    "summer sun swan table tea temple tiger toast tomato tower train tree tulip tunnel turtle valley velvet violin walnut "
    "water whale wheel window winter wizard wolf wood yacht yellow zebra zero"
)
_PROMPT = re.compile(rf"'([a-z]{{{LENGTHS[0]},{LENGTHS[-1]}}})' in ({'|'.join(INK_COLOURS)})")


@dataclass(frozen=True)
class Word:
    """A word and the colour of its ink: what a prompt means, and what a picture shows."""

    letters: str
    colour: InkColour

    def __str__(self) -> str:
        """The prompt."""
        return f"'{self.letters}' in {self.colour}"


def parse_word(prompt: str) -> Word | None:
    """The word that a prompt asks for, None for a prompt of another form."""
    match = _PROMPT.fullmatch(prompt)
    return Word(match[1], INK_COLOURS[INK_COLOURS.index(match[2])]) if match else None


@cache
def heldout_words() -> frozenset[str]:
    return frozenset(word for word in HELDOUT_WORDS.split() if len(word) in LENGTHS)


def random_word(rng: np.random.Generator, spoken: bool = False) -> Word:
    """A word that is not held out: of any letters, all equally likely, or `spoken`: consonants and
    vowels in turn."""
    length, turn = rng.choice(LENGTHS), int(rng.integers(2))
    kinds = (
        [VOWELS if (i + turn) % 2 else CONSONANTS for i in range(length)]
        if spoken
        else [LETTERS] * length
    )
    word = Word(
        "".join(kind[rng.integers(len(kind))] for kind in kinds),
        INK_COLOURS[rng.integers(len(INK_COLOURS))],
    )
    return word if word.letters not in heldout_words() else random_word(rng, spoken)


@cache
def word_prompts(split: WordSplit) -> tuple[str, ...]:
    """The prompts of a split, each of another word, in a fixed shuffled order."""
    rng = np.random.default_rng(list(split.encode()))
    if split == "heldout":
        words = rng.permutation(sorted(heldout_words()))
        return tuple(
            str(Word(str(word), INK_COLOURS[i]))
            for word, i in zip(words, rng.integers(len(INK_COLOURS), size=len(words)), strict=True)
        )
    if split != "train":
        raise ValueError(
            f"unknown split {shown(split)}, expected one of {', '.join(get_args(WordSplit))}"
        )
    found: dict[str, Word] = {}
    while len(found) < TRAIN_PROMPTS:
        word = random_word(rng, spoken=True)
        found.setdefault(word.letters, word)
    return tuple(map(str, found.values()))


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
