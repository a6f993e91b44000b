"""The held-out pictures of runs that a report shows, small enough for one page."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from g2rpo.core.data import Row
from g2rpo.core.errors import UserError
from g2rpo.lab.report.embedded import clip_uri, data_uri
from g2rpo.lab.report.history import RunHistory
from g2rpo.monitor.clips import clip_of, read_webp
from g2rpo.monitor.pictures import figure
from g2rpo.monitor.scores import SHOWN, chosen, input_of, picture_of, read_rows, right_of

FRAMES, PICTURE_BYTES = 9, 3_000_000
"""The largest number of evaluations shown of a run, and approximate bytes of pictures on a page."""
DAMAGE = (OSError, ValueError, LookupError, TypeError, UserError)
"""What reading damaged files raises."""


def pictures(runs: Sequence[RunHistory]) -> list[dict[str, Any]]:
    """By run: `cards`, prompts with their input picture, the base's picture and the tuned one's from the same noise, as data
    URIs, and `how` they were chosen: in the proportions of all where the run could tell, with the first prompts during the run
    as `progress`; else the first prompts.

    Clips move; `still` is shown if the browser is set to reduced motion. `trouble` is the reason if a run's pictures cannot be
    shown.
    """
    shown: list[dict[str, Any]] = []
    for size in (256, 192, 128, 96, 64, 48):
        shown = [_shown(run, size) for run in runs]
        if sum(len(frame["uri"]) + len(frame["still"]) for run in shown for frame in frames_of(run)) <= PICTURE_BYTES:
            break
    return shown


def frames_of(shown: dict[str, Any]) -> list[dict[str, Any]]:
    """All pictures shown of a run."""
    return [frame for card in [*shown["cards"], *shown["progress"]] for frame in card["frames"]]


def open_picture(path: Path) -> Image.Image:
    """A PNG; ValueError or OSError for anything else."""
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            return picture.convert("RGB")
    except (SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} {error}") from None


def _shown(run: RunHistory, size: int) -> dict[str, Any]:
    shown = {"how": "", "trouble": "", "iterations": [[], []], "cards": [], "progress": []}
    try:
        return shown | _read_shown(run, size)
    except DAMAGE as error:
        return shown | {"trouble": str(error)}


def _read_shown(run: RunHistory, size: int) -> dict[str, Any]:
    evaluated = [row["iteration"] for row in run.evaluations]
    tables = [iteration for iteration in evaluated if run.files.scores(iteration).is_file()]
    if not tables:
        return {}
    during = {iteration: read_rows(run.files.scores(iteration)) for iteration in _thinned(tables)}
    first, how = chosen([None], SHOWN, len(during[tables[0]]))
    cards = _cards(run, during, first, size)
    shown = {"how": f"{how}.", "iterations": [list(during), []], "cards": cards}
    if run.newest_results is None or not {0, last := run.changes()[0].iteration} <= set(tables):
        return shown
    ends = {iteration: read_rows(run.files.scores(iteration)) for iteration in (0, last)}
    places, how = chosen([right_of(rows) for rows in ends.values()], SHOWN, len(ends[0]))
    if places == first:
        return shown
    further = cards if len(during) > 2 else []
    return {"how": f"{how}.", "iterations": [list(ends), list(during)], "cards": _cards(run, ends, places, size)} | {
        "progress": further
    }


def _thinned(iterations: list[int]) -> list[int]:
    """The first and the last of them, and evenly spaced ones between."""
    count = min(FRAMES, len(iterations))
    return [iterations[round(i * (len(iterations) - 1) / max(1, count - 1))] for i in range(count)]


def _cards(run: RunHistory, tables: Mapping[int, Sequence[Row]], places: Sequence[int], size: int) -> list[dict[str, Any]]:
    """By prompt: its input picture, and its pictures after every iteration, each with its scores and whether it is right."""
    first = next(iter(tables))
    return [
        {
            "prompt": tables[first][place]["prompt"],
            "input": given_to(run.files.pictures(first), place, size),
            "frames": [
                _frame(picture_of(run.files.pictures(iteration), place), size, rows[place], run.config.rewards)
                for iteration, rows in tables.items()
            ],
        }
        for place in places
    ]


def given_to(folder: Path, index: int, size: int) -> str:
    """The input picture that was kept beside a picture; "" for none."""
    path = input_of(folder, index)
    return data_uri(open_picture(path), size) if path.is_file() else ""


def said(value: float | None) -> str:
    """A score, or that there is none."""
    return figure(math.nan if value is None else value)


def _frame(path: Path, size: int, row: Row, names: Collection[str]) -> dict[str, Any]:
    picture = open_picture(path)
    scores = {name: said(row["scores"][name]) for name in names if name in row["scores"]}
    uri, still, clip = data_uri(picture, size), "", clip_of(path)
    if clip.is_file():
        uri, still = clip_uri(*read_webp(clip), size), uri
    return {"uri": uri, "still": still, "right": row.get("right"), "scores": scores, "shape": picture.size}
