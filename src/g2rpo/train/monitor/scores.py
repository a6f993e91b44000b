"""Pictures of an evaluation as files, and a table of their scores with a row of JSON per picture,
which other tools read: `pandas.read_json(path, lines=True)`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from g2rpo.core.errors import UserError, counted, refuse
from g2rpo.core.files import whole_file, write_whole
from g2rpo.core.images import images_of, to_tensor
from g2rpo.core.plain import as_json, read_lines_as
from g2rpo.core.statistics import in_proportion, or_nan
from g2rpo.train.monitor.pictures import (
    beside,
    clip_of,
    pil_of,
    read_clip,
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
    """A row of the group of the first iteration, `how` whose members are sampled, with so many
    `tails`."""

    tails: Annotated[int, Field(ge=1, le=250)]
    how: str


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
    """A picture [3, H, W] in 8 bit, or the clip [T, 3, H, W] beside it, reduced; ValueError or
    OSError for none."""
    from PIL import Image

    if clip_of(path).is_file():
        return reduced(read_clip(clip_of(path))[0][None] / 255)[0]
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            return to_tensor([picture.convert("RGB")])[0]
    except (SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from None


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
