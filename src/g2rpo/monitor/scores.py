"""Pictures of an evaluation as files, and a table of their scores with a row of JSON per picture, which other tools read:
`pandas.read_json(path, lines=True)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from g2rpo.core.errors import UserError
from g2rpo.core.files import whole_file, write_whole
from g2rpo.core.images import to_tensor
from g2rpo.core.input_pictures import images_of
from g2rpo.core.plain import as_json, read_json_lines
from g2rpo.core.statistics import in_proportion
from g2rpo.monitor.clips import read_clip, reduced, save_clip, stills
from g2rpo.monitor.pictures import beside, to_pil
from g2rpo.runs.directory import clip_of

Row = dict[str, Any]
SHOWN = 8
"""Pictures that are kept of an evaluation, or shown of one that keeps all."""
OUTCOMES = {(0, 1): "became right", (1, 0): "became wrong", (1, 1): "stayed right", (0, 0): "stayed wrong"}
"""Outcomes of a picture by its verdicts before and after training."""
UNKNOWN = "have no verdict"


def score_rows(prompts: Sequence[str], scores: Mapping[str, Tensor], right: Tensor | None = None, first: int = 0) -> list[Row]:
    """A row per prompt, the first of index `first`, of scores [N] by reward and verdicts [N]."""
    return [
        {
            "index": first + place,
            "prompt": str(prompt),
            **({"images": list(images)} if (images := images_of(prompt)) else {}),
            "scores": {name: float(values[place]) for name, values in scores.items()},
            **({} if right is None else {"right": None if right[place].isnan() else bool(right[place])}),
        }
        for place, prompt in enumerate(prompts)
    ]


def save_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes a table, replacing an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(as_json(row) + "\n" for row in rows).encode())


def read_rows(path: Path) -> list[Row]:
    """A table, or instead of one that is absent the scores that releases before 0.3 kept beside it; UserError if it is damaged
    or there is neither."""
    old = path.with_suffix(".safetensors")
    try:
        if not path.exists() and old.exists():
            scores = load_file(old)
            return score_rows([""] * len(next(iter(scores.values()))), scores)
        rows = read_json_lines(path, dict)
        if not rows:
            raise ValueError("it has no whole row")
        scores_of(rows)  # refuses what cannot be scores
        return rows
    except (ValueError, TypeError, LookupError, AttributeError, OSError, SafetensorError, StopIteration) as error:
        again = "put it back, or start again in another folder"
        raise UserError(f"{path}: cannot be read ({error}); {again}") from None


def has_rows(path: Path) -> bool:
    """Whether `read_rows` finds a file."""
    return path.is_file() or path.with_suffix(".safetensors").is_file()


def scores_of(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Scores [N] by reward; NaN for none."""
    return {name: torch.tensor([_or_nan(row["scores"][name]) for row in rows]) for name in (rows[0]["scores"] if rows else ())}


def right_of(rows: Sequence[Row]) -> Tensor | None:
    """Verdicts [N]: 1, 0, or NaN for none; None where no reward defines right pictures."""
    return torch.tensor([_or_nan(row["right"]) for row in rows]) if rows and "right" in rows[0] else None


def save_pictures(folder: Path, images: Tensor, indices: Iterable[int], seconds: float) -> None:
    """Writes pictures as NNNNNN.png; of clips the middle frames, and beside them clips of so many seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, image, still in zip(indices, images, stills(images), strict=True):
        path = picture_of(folder, index)
        with whole_file(path) as unfinished:
            to_pil(still).save(unfinished)
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
    """A picture [3, H, W] in 8 bit, or the clip [T, 3, H, W] beside it, reduced; ValueError or OSError for none."""
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
    """The places of `shown` held-out prompts to look at, and how they were chosen: in the proportions of all if `right` has the
    verdicts before and after training, else the first ones."""
    before, after = right if len(right) == 2 else (None, None)
    if before is None or after is None:
        places = list(range(min(shown, total)))
        return places, f"The first {len(places)} of {total} held-out prompts, in their order"
    became = [OUTCOMES.get(pair, UNKNOWN) for pair in zip(before.tolist(), after.tolist(), strict=True)]
    places = in_proportion(became, shown)
    of_shown = [became[place] for place in places]
    kinds = [*OUTCOMES.values(), *([UNKNOWN] if UNKNOWN in became else [])]
    counts = [f"{of_shown.count(kind)} of {n}" if (n := became.count(kind)) else "none" for kind in kinds]
    counted = ", ".join(f"{count} that {kind}" for count, kind in zip(counts, kinds, strict=True))
    return places, f"{len(places)} of {total} held-out prompts, in the proportions of all: {counted}"


def _or_nan(value: Any) -> float:
    return float("nan" if value is None else value)
