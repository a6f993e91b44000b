"""The held-out pictures of runs that a report shows, small enough for one page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g2rpo.lab.report.embedded import clip_uri, data_uri
from g2rpo.lab.report.history import Run
from g2rpo.monitor.grids import Grid, read_grid
from g2rpo.monitor.pictures import figure

FRAMES, PICTURES, PICTURE_BYTES = 9, 8, 3_000_000
"""Largest numbers of evaluations, and of prompts at each, shown of a run, and approximate bytes of pictures on a page."""


def pictures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """By run: `cards`, prompts with their input picture, the base's picture and the tuned one's from the same noise, as data
    URIs, and `how` they were chosen: in the proportions of all where the run could tell, with the first prompts during the run
    as `progress`; else the first prompts.

    Clips move; `still` is shown if the browser is set to reduced motion. `trouble` is the reason if a run's pictures cannot be
    shown.
    """
    found = [_read_shown(run) for run in runs]
    shown: list[dict[str, Any]] = []
    for size in (256, 192, 128, 96, 64, 48):
        shown = [
            {
                "how": each.how,
                "trouble": each.trouble,
                "iterations": [list(each.frames), list(each.progress)],
                "cards": _cards(each.frames, size, each.most),
                "progress": _cards(each.progress, size, PICTURES),
            }
            for each in found
        ]
        if sum(len(frame["uri"]) + len(frame["still"]) for run in shown for frame in frames_of(run)) <= PICTURE_BYTES:
            break
    return shown


Frames = dict[int, tuple[Grid, int]]
"""By iteration a grid, and the row of it."""


@dataclass(frozen=True)
class Shown:
    """Frames, and how their prompts were chosen, of which at most so many are shown; frames during the run, if they are of
    other prompts; or why there are none."""

    how: str
    frames: Frames
    most: int = PICTURES
    progress: Frames = field(default_factory=dict)
    trouble: str = ""


def _read_shown(run: Run) -> Shown:
    first = "The first held-out prompts, in their order."
    try:
        during: Frames = {iteration: (read_grid(path), 0) for iteration, path in _during(run).items()}
        pair = _before_after(run)
    except (OSError, ValueError) as error:  # damaged, or of an older version
        return Shown(first, {}, trouble=str(error))
    if pair is None or any(grid.prompts == pair.prompts for grid, _ in during.values()):
        return Shown(first, during)
    ends: Frames = {0: (pair, 0), run.changes()[0].iteration: (pair, 1)}
    return Shown(pair.note.partition("\n")[0], ends, len(pair.prompts), during if len(during) > 2 else {})


def _during(run: Run) -> dict[int, Path]:
    """The pictures of the first and last evaluation and of evenly spaced ones between, by iteration."""
    paths = {row["iteration"]: run.files.pictures(row["iteration"]) for row in run.evaluations}
    every = [(iteration, path) for iteration, path in paths.items() if path.is_file()]
    count = min(FRAMES, len(every))
    return dict(every[round(i * (len(every) - 1) / max(1, count - 1))] for i in range(count))


def _before_after(run: Run) -> Grid | None:
    """The pictures of base and tuned that a finished run kept; None if it went on since."""
    path = run.files.before_after
    return read_grid(path) if run.newest_results is not None and path.is_file() else None


def frames_of(shown: dict[str, Any]) -> list[dict[str, Any]]:
    """All pictures shown of a run."""
    return [frame for card in [*shown["cards"], *shown["progress"]] for frame in card["frames"]]


def _cards(frames: Frames, size: int, most: int) -> list[dict[str, Any]]:
    """By prompt: its input picture, and its pictures after every iteration, each with its scores and whether it is right."""
    if not frames:
        return []
    grid, _ = next(iter(frames.values()))
    return [
        {
            "prompt": prompt,
            "input": data_uri(given, size) if (given := grid.inputs[i]) else "",
            "frames": [_frame(*frame, i, size) for frame in frames.values()],
            "shape": grid.rows[0][i].size,
        }
        for i, prompt in enumerate(grid.prompts[:most])
    ]


def _frame(grid: Grid, row: int, index: int, size: int) -> dict[str, Any]:
    scores = {name: figure(math.nan if value is None else value) for name, value in grid.scores[row][index].items()}
    picture, still = data_uri(grid.rows[row][index], size), ""
    if grid.moving is not None:
        picture, still = clip_uri(grid.moving.rows[row][index], grid.moving.durations, size), picture
    return {"uri": picture, "still": still, "right": grid.right[row][index], "scores": scores}
