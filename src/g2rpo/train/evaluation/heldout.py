"""What an evaluation found, and base against tuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from g2rpo.core.distributed import World
from g2rpo.core.errors import UserError, counted, placed, refuse, shown
from g2rpo.core.files import refuse_other
from g2rpo.core.statistics import Comparison, paired
from g2rpo.core.types import Reward


@dataclass(frozen=True)
class Evaluation:
    """Pictures [N, 3, H, W] of `prompts`, or clips [N, T, 3, H, W], 8 bit, scores [N] by reward,
    and verdicts [N] if a reward defines right pictures.

    After an evaluation on several ranks, ranks other than 0 have only their own pictures.
    """

    prompts: tuple[str, ...]
    images: Tensor
    scores: dict[str, Tensor]
    right: Tensor | None = None

    def means(self) -> dict[str, float]:
        """Mean score by reward, missing scores left out; NaN where none is valid."""
        return {name: float(values[~values.isnan()].mean()) for name, values in self.scores.items()}


def verdicts(rewards: Mapping[str, Reward], scores: Mapping[str, Tensor]) -> Tensor | None:
    """Whether each picture is right, in the shape of the scores: 1 if the score of every reward with an attribute `right`
    is at least that value, else 0; NaN where one of them has no score. None if no reward has."""
    said = [
        (scores[name] >= value).float().where(~scores[name].isnan(), torch.nan)
        for name, value in least_scores(rewards).items()
    ]
    return torch.stack(said).amin(0) if said else None  # amin propagates NaN


def least_scores(rewards: Mapping[str, Reward]) -> dict[str, float]:
    """The least score of a right picture, for each reward that defines it; UserError if that is no
    number."""
    said = {name: reward.right for name, reward in rewards.items() if reward.right is not None}
    for name, value in said.items():
        _in_words(name, rewards[name])
        if not isinstance(value, int | float):
            raise UserError(
                f"reward '{name}': `right` is the least score of a right picture, a number; it is {shown(value)}"
            )
    return said


def right_in_words(rewards: Mapping[str, Reward]) -> str | None:
    """A description of right pictures, such as "Spells {} texts in the asked colour", with {} for a
    share of so many. None unless every reward that defines right pictures says it by its attribute
    `right_in_words`, and exactly one of these texts has {}."""
    said = dict.fromkeys(_in_words(name, rewards[name]) for name in least_scores(rewards))
    main = [words for words in said if words and "{}" in words]
    if None in said or len(main) != 1:
        return None
    return " ".join(
        [main[0], " and ".join(words for words in said if words and words not in main)]
    ).strip()


def _in_words(name: str, reward: Reward) -> str | None:
    words = reward.right_in_words
    if words is not None and not (isinstance(words, str) and words.count("{}") <= 1):
        raise UserError(
            f"reward '{name}': `right_in_words` is a text with {{}} once or never; it is {shown(words)}"
        )
    return words


def evaluation_of_all(world: World, own: Evaluation, prompts: Sequence[str]) -> Evaluation:
    """The evaluation of `prompts` from all ranks, each of which has its share or all of them. Where
    all have all, scores are rank 0's: a reward may have answered one rank and not another, and
    decisions must be the same."""

    def joined(values: Tensor) -> Tensor:
        return world.gather(values)[: len(prompts)]

    divided = len(own.prompts) < len(prompts)
    images = world.gather_to_main(own.images) if divided else own.images
    scores = {name: joined(values) for name, values in own.scores.items()}
    return Evaluation(
        tuple(prompts), images, scores, None if own.right is None else joined(own.right)
    )


def save_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Writes pictures, scores and verdicts to one safetensors file."""
    scores = {f"score/{name}": values for name, values in evaluation.scores.items()}
    right = {} if evaluation.right is None else {"right": evaluation.right}
    save_file({"images": evaluation.images.contiguous(), **scores, **right}, path)


PUT_BACK = "put it back, or start again in another --run-dir"


def load_evaluation(path: Path, prompts: Sequence[str], names: Sequence[str]) -> Evaluation:
    """Reads a file of `save_evaluation` for these prompts and rewards; UserError if it is missing,
    damaged, or another."""
    stored = _stored(path)
    images = stored.pop("images", torch.empty(0))
    known = {name: values for name, values in stored.items() if name.startswith("score/")}
    asked = [f"score/{name}" for name in names]
    faults = (
        *_faults_of_images(images, len(prompts)),
        *_faults_of_scores(known, asked, len(prompts)),
        *_faults_of_right(stored.get("right"), len(prompts)),
    )
    refuse(f"{path}: {fault}; {PUT_BACK}" for fault in faults)
    scores = {name.removeprefix("score/"): stored[name] for name in asked}
    return Evaluation(tuple(prompts), images, scores, stored.get("right"))


def _stored(path: Path) -> dict[str, Tensor]:
    with placed(f"{path}: cannot be read (", OSError, SafetensorError, after=f"); {PUT_BACK}"):
        return load_file(refuse_other(path))


def _faults_of_images(images: Tensor, count: int) -> Iterator[str]:
    pictures = images.dtype == torch.uint8 and images.ndim in (4, 5) and images.shape[-3] == 3
    if not (pictures and images.numel() and len(images) == count):
        yield f"does not hold {counted(count, 'picture')}"


def _faults_of_scores(
    stored: Mapping[str, Tensor], names: Sequence[str], count: int | None = None
) -> Iterator[str]:
    if lacking := [name for name in names if name not in stored]:
        yield f"does not hold {', '.join(lacking)}"
    shapes = {tuple(values.shape) for values in stored.values()}
    if len(shapes) > 1 or any(len(shape) != 1 or count not in (None, *shape) for shape in shapes):
        yield f"does not hold {counted(count, 'value') if count else 'equally many values'} by each name"
    for name, values in stored.items():
        if not values.is_floating_point() or values.isinf().any():
            yield f"{name} holds values that are no numbers"


def _faults_of_right(right: Tensor | None, count: int) -> Iterator[str]:
    if right is None:
        return
    yield from _faults_of_scores({"right": right}, (), count)
    if not ((right == 0) | (right == 1) | right.isnan()).all():
        yield "right holds values that are neither 0 nor 1"


def compare_evaluations(base: Evaluation, tuned: Evaluation) -> dict[str, Comparison]:
    """Base against tuned by reward; only prompts that both have a score for count."""
    return {name: paired(before, tuned.scores[name]) for name, before in base.scores.items()}


def compare_right(base: Evaluation, tuned: Evaluation) -> Comparison | None:
    """The share of pictures that are right, base against tuned; None if no reward defines it."""
    return None if base.right is None or tuned.right is None else paired(base.right, tuned.right)
