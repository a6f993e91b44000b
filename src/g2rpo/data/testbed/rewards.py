"""Rewards of the testbed, for scenes: a verifiable one, a learned CLIP score and a learned preference
score; for words, judges without a model: is the ink's colour right, is the paper clean, is the
drawing clean? Spelling is judged by the reward `ocr`.

All follow the `Reward` protocol: images [B, 3, 64, 64] of scenes, [B, 3, 32, 96] of words, in
[0, 1] and their prompts to scores [B], float32 on the CPU, higher is better. A prompt that the
grammar cannot parse has no score: NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from g2rpo.core.files import local
from g2rpo.core.rewards import Reward, RewardModel
from g2rpo.data.testbed import assets_dir
from g2rpo.data.testbed.scenes import SIDE, FoundObject, Group, Relation, Scene, detect, kind, parse
from g2rpo.data.testbed.words import (
    INKS,
    LETTERS,
    PAPER_COLOUR,
    WORD_HEIGHT,
    WORD_WIDTH,
    InkColour,
    Word,
    columns_of,
    draw_word,
    parse_word,
)

if TYPE_CHECKING:
    from transformers import CLIPModel, PreTrainedTokenizerFast


def parse_or_none(prompt: str) -> Scene | None:
    """The scene that a prompt asks for, or None for a prompt outside the grammar."""
    try:
        return parse(prompt)
    except ValueError:
        return None


class SceneAccuracy(Reward):
    """Whether the picture shows the asked objects, colours, counts, sizes and relation, and nothing
    else.

    1 if all answers of `check` are 1; otherwise `partial`, in [0, 1], times the mean of the
    answers.
    """

    right = 1.0
    right_in_words = "Draws what {} prompts ask for"

    def __init__(self, *, partial: float = 0.0) -> None:
        if not 0 <= partial <= 1:
            raise ValueError(f"partial is a share between 0 and 1, got {partial}")
        self.partial = partial

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        scores = [
            self._score(image, prompt)
            for image, prompt in zip(images.float().cpu(), prompts, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float32)

    def _score(self, image: Tensor, prompt: str) -> float:
        scene = parse_or_none(prompt)
        if scene is None:
            return float("nan")
        answers = check_scene(scene, detect(image.numpy())).values()
        return self.partial * sum(answers) / len(answers) + (1 - self.partial) * (min(answers) == 1)


class SceneCLIP(Reward):
    """Cosine of the picture and its prompt under the testbed's tiny CLIP, in [-1, 1].

    It is sensitive to counts, colours, shapes and sizes, but hardly to positions: like larger CLIPs
    it treats prompts nearly as bags of words.
    """

    side = SIDE
    folder = "clip"
    scale = 1.0
    differentiable = True

    def __init__(self, path: Path | str | None = None) -> None:
        self.model, self.tokenizer = load_testbed_clip(
            local(path) if path else assets_dir() / self.folder
        )
        # a group's pictures come in several batches, of one prompt
        self._text = lru_cache(maxsize=1024)(self._encode)

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        from transformers import CLIPConfig, CLIPModel

        folder = local(options["path"]) if options["path"] else assets_dir() / cls.folder
        clip = CLIPModel(CLIPConfig.from_pretrained(folder))
        return RewardModel([clip], lambda: image_features(clip, torch.empty(1, 3, SIDE, SIDE)))

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        texts = torch.stack([self._text(prompt) for prompt in prompts])
        return (image_features(self.model, images.float().cpu()) * texts).sum(-1) * self.scale

    def features(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """As `rewards.head.PictureEncoder`."""
        return image_features(self.model, images.float().cpu()), torch.stack(
            [self._text(prompt) for prompt in prompts]
        )

    def _encode(self, prompt: str) -> Tensor:
        """A prompt's features [D], alone so that they depend on nothing else; NaN for one outside
        the grammar."""
        features = text_features(self.model, self.tokenizer, [prompt])[0]
        return (
            features if parse_or_none(prompt) is not None else torch.full_like(features, torch.nan)
        )


class ScenePreference(SceneCLIP):
    """A learned preference for pictures that are right, clean and well drawn. Scaled cosine, as in
    HPSv2."""

    folder = "preference"
    scale = 100.0


@cache
def load_testbed_clip(folder: Path) -> tuple[CLIPModel, PreTrainedTokenizerFast]:
    """A CLIPModel in float32 and its tokenizer; loaded once per process."""
    from transformers import CLIPModel, PreTrainedTokenizerFast

    model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


def image_features(model: CLIPModel, images: Tensor) -> Tensor:
    """Unit features [B, D] of images [B, 3, 64, 64] in [0, 1]."""
    pooled = model.vision_model(pixel_values=images * 2 - 1).pooler_output
    return F.normalize(model.visual_projection(pooled), dim=-1)


def text_features(
    model: CLIPModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]
) -> Tensor:
    """Unit features [B, D] of prompts."""
    tokens = tokenizer(list(prompts), padding=True, truncation=True, return_tensors="pt")
    pooled = model.text_model(
        input_ids=tokens.input_ids, attention_mask=tokens.attention_mask
    ).pooler_output
    return F.normalize(model.text_projection(pooled), dim=-1)


_HOLDS: dict[Relation, Callable[[FoundObject, FoundObject], bool]] = {
    "left of": lambda a, b: a.x < b.x,
    "right of": lambda a, b: a.x > b.x,
    "above": lambda a, b: a.y < b.y,
    "below": lambda a, b: a.y > b.y,
}


def check_scene(scene: Scene, objects: list[FoundObject]) -> dict[str, float]:
    """Answers by question; all are 1 exactly when the picture shows the scene and nothing else.

    For each group: is there such an object (.5 for the right colour or shape alone), the ratio of
    actual and asked count and, if a size is named, the share of objects that have it. For the
    scene: the share of pairs that satisfy the relation, and the share of all objects that belong to
    it.
    """
    members = [[o for o in objects if (o.colour, o.shape) == kind(group)] for group in scene.groups]
    others = [o for o in objects if not any(o in found for found in members)]
    answers: dict[str, float] = {}
    for i, (group, found) in enumerate(zip(scene.groups, members, strict=True)):
        answers[f"object {i}"] = 1.0 if found else _resemblance(group, others)
        answers[f"count {i}"] = min(len(found), group.count) / max(len(found), group.count)
        if group.size is not None:
            answers[f"size {i}"] = sum(o.size == group.size for o in found) / max(len(found), 1)
    if scene.relation is not None:
        holds = [_HOLDS[scene.relation](a, b) for a in members[0] for b in members[1]]
        answers["relation"] = sum(holds) / max(len(holds), 1)
    answers["nothing else"] = 1 - len(others) / len(objects) if objects else 0.0
    return answers


def _resemblance(group: Group, others: list[FoundObject]) -> float:
    """0.5 if another object has the group's colour or shape, else 0."""
    return 0.5 if any(o.colour == group.colour or o.shape == group.shape for o in others) else 0.0


PAPER_TOLERANCE = 0.06  # of clean paper: 15 levels of 255, in any channel
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
        return float(
            ((beside - colour(PAPER_COLOUR)).abs().amax(0) <= PAPER_TOLERANCE).float().mean()
        )


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
