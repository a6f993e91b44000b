"""What an evaluation found: pictures, scores, and which are right; its files, and base against tuned.

Tables of scores have a row of JSON per picture, which other tools read: `pandas.read_json(path,
lines=True)`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from g2rpo.core.distributed import World
from g2rpo.core.errors import UserError, counted, placed, refuse, shown
from g2rpo.core.files import refuse_other, whole_file, write_whole
from g2rpo.core.images import images_of, to_tensor
from g2rpo.core.plain import as_json, read_lines_as
from g2rpo.core.rewards import Reward
from g2rpo.core.statistics import RIGHT, Comparison, in_proportion, or_nan, paired
from g2rpo.train.monitor.pictures import (
    beside,
    clip_of,
    pil_of,
    read_clip,
    read_png,
    reduced,
    save_clip,
    stills,
)

ScoreRow = dict[str, Any]
PUT_BACK = "put the file back, or start again in another folder"
SHOWN = 8
"""Pictures that are kept of an evaluation, or shown of one that keeps all."""
OUTCOMES = {
    (0, 1): "became right",
    (1, 0): "became wrong",
    (1, 1): "stayed right",
    (0, 0): "stayed wrong",
}
"""Outcomes of a picture by its verdicts before and after training."""
UNKNOWN = "have no verdict"

Score = Annotated[float, Field(ge=-3e38, le=3e38)]
"""In float32."""


class Scored(BaseModel):
    """A row of a table: a picture's scores by reward, and whether it is right if a reward defines
    that."""

    index: Annotated[int, Field(ge=0, lt=10**9)]
    prompt: str
    images: list[str] = []
    scores: Annotated[dict[str, Score | None], Field(min_length=1)]
    right: bool | None = None


class Member(Scored):
    """A row of the first iteration's group: how its members are sampled, with how many tails."""

    tails: Annotated[int, Field(ge=1, le=250)]
    how: str


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

    @property
    def values(self) -> dict[str, Tensor]:
        """The scores, and the verdicts as `RIGHT` where there are some."""
        return self.scores if self.right is None else {**self.scores, RIGHT: self.right}

    def at(self, places: Sequence[int]) -> Evaluation:
        """That of some of its prompts."""
        scores = {name: values[places] for name, values in self.scores.items()}
        right = None if self.right is None else self.right[places]
        return Evaluation(
            tuple(self.prompts[i] for i in places), self.images[places], scores, right
        )

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


def load_evaluation(path: Path, prompts: Sequence[str], names: Sequence[str]) -> Evaluation:
    """Reads a file of `save_evaluation` for these prompts and rewards; UserError if it is missing,
    damaged, or another."""
    again = "put it back, or start again in another --run-dir"
    with placed(f"{path}: cannot be read (", OSError, SafetensorError, after=f"); {again}"):
        stored = load_file(refuse_other(path))
    images, right = stored.get("images", torch.empty(0)), stored.get("right")
    scores = {name: stored.get(f"score/{name}", torch.empty(0)) for name in names}
    own = Evaluation(tuple(prompts), images, scores, right)
    refuse(f"{path}: {fault}; {again}" for fault in _faults_of_evaluation(own))
    return own


def _faults_of_evaluation(one: Evaluation) -> Iterator[str]:
    images, count = one.images, len(one.prompts)
    pictures = images.dtype == torch.uint8 and images.ndim in (4, 5) and images.shape[-3] == 3
    if not (pictures and images.numel() and len(images) == count):
        yield f"does not hold {counted(count, 'picture')}"
    for name, values in one.values.items():
        if values.shape != (count,):
            yield f"does not hold {counted(count, 'value')} of {name}"
        elif values.dtype != torch.float32 or values.isinf().any():
            yield f"{name} holds values that are no numbers of float32"
        elif name == RIGHT and not ((values == 0) | (values == 1) | values.isnan()).all():
            yield f"{name} holds values that are neither 0 nor 1"


def compare_evaluations(base: Evaluation, tuned: Evaluation) -> dict[str, Comparison]:
    """Base against tuned by reward; only prompts that both have a score for count."""
    return {name: paired(before, tuned.scores[name]) for name, before in base.scores.items()}


def compare_right(base: Evaluation, tuned: Evaluation) -> Comparison | None:
    """The share of pictures that are right, base against tuned; None if no reward defines it."""
    if base.right is None or tuned.right is None:
        return None
    return paired(base.right, tuned.right, share=True)


def score_rows(
    prompts: Sequence[str],
    scores: Mapping[str, Tensor],
    right: Tensor | None = None,
    first: int = 0,
) -> list[ScoreRow]:
    """A row per prompt, the first of index `first`, of scores [N] by reward and verdicts [N]."""
    return [
        {
            "index": first + place,
            "prompt": str(prompt),
            **({"images": list(images)} if (images := images_of(prompt)) else {}),
            "scores": {name: float(values[place]) for name, values in scores.items()},
            **(
                {}
                if right is None
                else {"right": None if right[place].isnan() else bool(right[place])}
            ),
        }
        for place, prompt in enumerate(prompts)
    ]


def save_rows(path: Path, rows: Iterable[ScoreRow]) -> None:
    """Writes a table, replacing an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(as_json(row) + "\n" for row in rows).encode())


def read_rows(path: Path, kind: type[Scored] = Scored, again: str = PUT_BACK) -> list[ScoreRow]:
    """A table whose rows are of this kind; UserError, which ends with `again`, if it is absent or
    damaged."""
    rows = read_lines_as(kind, path, again)
    refuse(f"{path}{fault}; {again}" for fault in _faults_of_table(rows))
    return [row.model_dump(exclude_unset=True) for row in rows]


def _faults_of_table(rows: Sequence[Scored]) -> Iterator[str]:
    if not rows:
        yield ": has no whole row"
    held = [(row.scores.keys(), "right" in row.model_fields_set) for row in rows]
    for number, own in enumerate(held, 1):
        if own != held[0]:
            yield f", line {number}: has other scores than the first row"


def read_scores(path: Path, names: Collection[str], count: int | None = None) -> dict[str, Tensor]:
    """The scores [N] of a table by reward; UserError also if it lacks those of `names`, or has not
    `count` rows."""
    rows = read_rows(path)
    if lacking := sorted(set(names) - rows[0]["scores"].keys()):
        raise UserError(f"{path}: lacks scores of {', '.join(lacking)}; {PUT_BACK}")
    if count is not None and len(rows) != count:
        has = f"has {counted(len(rows), 'row')} for {counted(count, 'held-out prompt')}"
        raise UserError(f"{path}: {has}; {PUT_BACK}")
    return scores_of(rows)


def scores_of(rows: Sequence[ScoreRow]) -> dict[str, Tensor]:
    """Scores [N] by reward; NaN for none."""
    return {
        name: torch.tensor([or_nan(row["scores"][name]) for row in rows])
        for name in (rows[0]["scores"] if rows else ())
    }


def right_of(rows: Sequence[ScoreRow]) -> Tensor | None:
    """Verdicts [N]: 1, 0, or NaN for none; None where no reward defines right pictures."""
    return (
        torch.tensor([or_nan(row["right"]) for row in rows])
        if rows and "right" in rows[0]
        else None
    )


def values_of(rows: Sequence[ScoreRow]) -> dict[str, Tensor]:
    """The scores, and the verdicts as `RIGHT` where there are some."""
    right = right_of(rows)
    return scores_of(rows) if right is None else {**scores_of(rows), RIGHT: right}


def save_pictures(folder: Path, images: Tensor, indices: Iterable[int], seconds: float) -> None:
    """Writes pictures as NNNNNN.png; of clips the middle frames, and beside them clips of so many
    seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, image, still in zip(indices, images, stills(images), strict=True):
        path = picture_of(folder, index)
        with whole_file(path) as unfinished:
            pil_of(still).save(unfinished)
        if images.ndim == 5:
            with whole_file(clip_of(path)) as unfinished:
                save_clip(unfinished, image, seconds)


def save_inputs(folder: Path, prompts: Sequence[str], indices: Iterable[int]) -> None:
    """Writes the input pictures of prompts that have any, side by side, as NNNNNN_input.png."""
    for index, prompt in zip(indices, prompts, strict=True):
        if (pictures := beside(prompt, 256, 256)) is not None:
            with whole_file(input_of(folder, index)) as unfinished:
                pictures.save(unfinished)


def read_picture(path: Path) -> Tensor:
    """A picture [3, H, W] in 8 bit, or the clip [T, 3, H, W] beside it, reduced; as `kept_picture`
    for none."""
    if clip_of(path).is_file():
        return reduced(read_clip(clip_of(path))[0][None] / 255)[0]
    return to_tensor([read_png(path)])[0]


def picture_of(folder: Path, index: int) -> Path:
    """The file of a picture."""
    return folder / f"{index:06d}.png"


def input_of(folder: Path, index: int) -> Path:
    """The file with the input pictures of its prompt, if that has any."""
    return folder / f"{index:06d}_input.png"


def chosen(right: Sequence[Tensor | None], shown: int, total: int) -> tuple[list[int], str]:
    """The places of `shown` held-out prompts to look at, and how they were chosen: in the
    proportions of all if `right` has the verdicts before and after training, else the first
    ones."""
    before, after = right if len(right) == 2 else (None, None)
    if before is None or after is None:
        places = list(range(min(shown, total)))
        return places, f"The first {len(places)} of {total} held-out prompts, in their order"
    became = [
        OUTCOMES.get(pair, UNKNOWN) for pair in zip(before.tolist(), after.tolist(), strict=True)
    ]
    places = in_proportion(became, shown)
    of_shown = [became[place] for place in places]
    kinds = [*OUTCOMES.values(), *([UNKNOWN] if UNKNOWN in became else [])]
    counts = [
        f"{of_shown.count(kind)} of {n}" if (n := became.count(kind)) else "none" for kind in kinds
    ]
    counted = ", ".join(f"{count} that {kind}" for count, kind in zip(counts, kinds, strict=True))
    return (
        places,
        f"{len(places)} of {total} held-out prompts, in the proportions of all: {counted}",
    )
