"""Reads grids of pictures back into single pictures, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from PIL import Image

from g2rpo.core.plain import parse_json
from g2rpo.monitor.clips import read_webp
from g2rpo.monitor.pictures import NOTE

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Moving:
    """A grid's clips: the milliseconds of each frame, and rows of a list of frames per prompt."""

    durations: list[int]
    rows: list[list[list[Image.Image]]]


@dataclass(frozen=True)
class Grid:
    """The contents of a grid: rows of one picture per prompt, its scores by reward (None: no score), and whether it is right
    (None: not known). Older grids have no scores and no verdicts. `inputs` has each prompt's input picture, if it has one."""

    prompts: list[str]
    rows: list[list[Image.Image]]
    scores: list[list[dict[str, float | None]]]
    right: list[list[bool | None]]
    inputs: list[Image.Image | None]
    moving: Moving | None = None
    note: str = ""


def read_grid(path: Path) -> Grid:
    """What `save_grid` wrote, as it was drawn (so small pictures are enlarged, large ones reduced), and what `save_moving_grid`
    wrote beside it under the same name, if it did.

    Raises ValueError for a picture that is no such grid.
    """
    try:
        with Image.open(path, formats=["PNG"]) as canvas:
            if NOTE not in canvas.info:
                raise ValueError("does not say what it shows")
            note = parse_json(canvas.info[NOTE])
            (width, height), prompts, rows = note["size"], note["prompts"], note["boxes"]
            boxes: list[list[Box]] = [[(x, y, x + width, y + height) for x, y in row] for row in rows]
            given = note.get("inputs", [None] * len(prompts))
            inputs: list[Box | None] = [each and (each[0], each[1], each[0] + each[2], each[1] + each[3]) for each in given]
            for x, y, end, bottom in chain(*boxes, filter(None, inputs)):
                if not (0 <= x < end <= canvas.width and 0 <= y < bottom <= canvas.height):
                    raise ValueError("names a place outside of itself")
            if not boxes or any(len(row) != len(prompts) for row in boxes) or len(inputs) != len(prompts):
                raise ValueError("does not hold a picture for every prompt")
            scores = [
                [{str(name): None if v is None else float(v) for name, v in dict(cell).items()} for cell in row]
                for row in note.get("scores", [[{}] * len(prompts)] * len(boxes))
            ]
            right = [
                [None if v is None else bool(v) for v in row] for row in note.get("right", [[None] * len(prompts)] * len(boxes))
            ]
            if any([len(row) for row in table] != [len(row) for row in boxes] for table in (scores, right)):
                raise ValueError("does not hold scores for every picture")
            return Grid(
                [str(prompt) for prompt in prompts],
                [[canvas.crop(box) for box in row] for row in boxes],
                scores,
                right,
                [canvas.crop(box) if box else None for box in inputs],
                _read_moving(path.with_suffix(".webp"), canvas.size, boxes),
                str(note.get("note", "")),
            )
    except (ValueError, TypeError, KeyError, AttributeError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} {error}") from None


def _read_moving(path: Path, size: tuple[int, int], boxes: Sequence[Sequence[Box]]) -> Moving | None:
    """The clips of a moving grid that is as large as its still one; None where there is no such file."""
    if not path.is_file():
        return None
    frames, durations = read_webp(path)
    if frames[0].size != size:
        raise ValueError(f"and {path.name} differ in size")
    return Moving(durations, [[[frame.crop(box) for frame in frames] for box in row] for row in boxes])
