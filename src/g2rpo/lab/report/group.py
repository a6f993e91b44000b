"""The group of the first iteration that a run kept, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from g2rpo.core.data import Row
from g2rpo.lab.report.embedded import data_uri
from g2rpo.lab.report.history import RunHistory
from g2rpo.lab.report.pictures import DAMAGE, given_to, open_picture, said
from g2rpo.lab.report.words import signed
from g2rpo.monitor.scores import Member, picture_of, read_rows
from g2rpo.training.listeners.first_group import ADVANTAGE

MEMBER = 128  # pixels a side, at most, of a member's picture


def first_group(run: RunHistory) -> dict[str, Any] | None:
    """The group of the first iteration that the run kept, its members from best to worst. None if it kept none; `trouble` is
    the reason if it cannot be shown."""
    folder = run.files.first_group
    if not run.files.group_scores.is_file():
        return None
    try:
        rows = read_rows(run.files.group_scores, Member)
        uris = [data_uri(open_picture(picture_of(folder, index)), MEMBER) for index in range(len(rows))]
        members = _members(rows, uris, len(rows) // rows[0]["tails"])
        told = {"prompt": rows[0]["prompt"], "how": rows[0]["how"], "input": given_to(folder, 0, MEMBER)}
        return {"trouble": "", "members": members, **told}
    except DAMAGE as error:
        return {"trouble": str(error)}


def _members(rows: Sequence[Row], uris: Sequence[str], count: int) -> list[dict[str, Any]]:
    advantages = [row["scores"].get(ADVANTAGE) or 0.0 for row in rows[:count]]
    largest = max(map(abs, advantages)) or 1.0
    names = [name for name in rows[0]["scores"] if name != ADVANTAGE]
    return [
        {
            "name": f"member {member + 1}",
            "pictures": uris[member::count],
            "scores": {name: " · ".join(said(row["scores"][name]) for row in rows[member::count]) for name in names},
            "advantage": signed(advantages[member], 2) if advantages[member] else "0",
            "way": "up" if advantages[member] > 0 else "down" if advantages[member] < 0 else "same",
            "width": round(50 * abs(advantages[member]) / largest, 1),
        }
        for member in sorted(range(count), key=lambda member: -advantages[member])
    ]
