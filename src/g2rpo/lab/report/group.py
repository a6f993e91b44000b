"""The group of the first iteration that a run kept, for the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from g2rpo.lab.report.embedded import data_uri
from g2rpo.lab.report.history import Run
from g2rpo.lab.report.words import signed
from g2rpo.monitor.grids import Grid, read_grid
from g2rpo.monitor.pictures import figure
from g2rpo.training.first_group import ADVANTAGE

MEMBER = 128  # pixels a side, at most, of a member's picture


def first_group(run: Run) -> dict[str, Any] | None:
    """The group of the first iteration that the run kept, its members from best to worst. None if it kept none; `trouble` is
    the reason if it cannot be shown."""
    path = run.files.first_group
    if not path.is_file():  # of an older version, or all rewards score latents
        return None
    try:
        grid = read_grid(path)
    except (OSError, ValueError) as error:
        return {"trouble": str(error)}
    prompt, _, how = grid.note.partition("\n")
    given = data_uri(grid.inputs[0], MEMBER) if grid.inputs[0] else ""
    return {"trouble": "", "prompt": prompt, "how": how, "input": given, "members": _members(grid)}


def _members(grid: Grid) -> list[dict[str, Any]]:
    advantages = [cell.get(ADVANTAGE) or 0.0 for cell in grid.scores[0]]
    largest = max(map(abs, advantages)) or 1.0
    return [
        {
            "name": grid.prompts[member],
            "pictures": [data_uri(row[member], MEMBER) for row in grid.rows],
            "scores": _member_scores([row[member] for row in grid.scores]),
            "advantage": signed(advantages[member], 2) if advantages[member] else "0",
            "way": "up" if advantages[member] > 0 else "down" if advantages[member] < 0 else "same",
            "width": round(50 * abs(advantages[member]) / largest, 1),
        }
        for member in sorted(range(len(advantages)), key=lambda member: -advantages[member])
    ]


def _member_scores(tails: Sequence[dict[str, float | None]]) -> dict[str, str]:
    """By reward the scores of a member at every tail."""
    names = [name for name in tails[0] if name != ADVANTAGE]
    return {name: " · ".join(figure(math.nan if (v := cell[name]) is None else v) for cell in tails) for name in names}
