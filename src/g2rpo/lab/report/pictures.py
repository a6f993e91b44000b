"""The pictures of runs that a report shows, within the page and small enough for it: held-out ones,
and a group of the first iteration."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from g2rpo.config.schema import Config
from g2rpo.core.data import Row
from g2rpo.core.errors import UserError
from g2rpo.core.images import read_inputs, to_pil
from g2rpo.core.statistics import or_nan
from g2rpo.core.types import Policy
from g2rpo.lab.report.history import RunHistory, SeedGroup
from g2rpo.train.evaluation.heldout import (
    SHOWN,
    Member,
    chosen,
    input_of,
    picture_of,
    read_rows,
    right_of,
)
from g2rpo.train.first_group import ADVANTAGE
from g2rpo.train.monitor.pictures import (
    clip_of,
    figure,
    pil_of,
    read_png,
    read_webp,
    seconds_of,
    webp,
)

MOST_EVALUATIONS, PICTURE_BYTES = 9, 3_000_000
"""The largest number of evaluations shown of a run, and approximate bytes of pictures on a page."""
MEMBER = 128  # pixels a side, at most, of a member's picture
DAMAGE = (OSError, ValueError, LookupError, TypeError, UserError)
"""What reading damaged files raises."""


def pictures(runs: Sequence[RunHistory]) -> list[list[dict[str, Any]]]:
    """By run sets of held-out prompts with their pictures, each with `how` it was chosen: base and
    tuned of prompts in the proportions of all where the run could tell; and the first prompts
    during the run.

    `iterations`, the first the base's, and `cards`: a prompt, its input picture, and its picture
    after each iteration from the same noise, as data URIs. Clips move; `still` is shown if the
    browser is set to reduced motion. `trouble` is the reason if a run's pictures cannot be shown.
    """
    shown: list[list[dict[str, Any]]] = []
    for size in (256, 192, 128, 96, 64, 48):
        shown = [_shown(run, size) for run in runs]
        cards = [card for sets in shown for each in sets for card in each["cards"]]
        frames = [frame for card in cards for frame in card["frames"]]
        if sum(len(frame["uri"]) + len(frame["still"]) for frame in frames) <= PICTURE_BYTES:
            break
    return shown


def _shown(run: RunHistory, size: int) -> list[dict[str, Any]]:
    # only then the pictures of both are kept
    after = SeedGroup((run,)).judged_after if run.newest_results else []
    try:
        during, ends = _tables(run, _thinned(run.kept)), _tables(run, [0, *after] if after else [])
        sets = [(during, *chosen([None], SHOWN, run.heldout))] if during else []
        if ends:
            placed = chosen([right_of(rows) for rows in ends.values()], SHOWN, run.heldout)
            if placed[0] != sets[0][1]:
                sets = [(ends, *placed), *(sets if len(during) > 2 else [])]
        return [
            {
                "trouble": "",
                "how": f"{how}.{_by_heads(run) if len(tables) > 2 else ''}",
                "iterations": list(tables),
                "cards": _cards(run, tables, places, size),
            }
            for tables, places, how in sets
        ]
    except DAMAGE as error:
        return [{"trouble": str(error), "cards": []}]


def _by_heads(run: RunHistory) -> str:
    """That scores of rewards which the run fitted again are not of one scale; "" without any."""
    names = run.refitted()
    return f" Scores of {' and '.join(names)} are by the head of their time." if names else ""


def _thinned(iterations: Sequence[int]) -> list[int]:
    """The first and the last of them, and evenly spaced ones between."""
    count = min(MOST_EVALUATIONS, len(iterations))
    return [iterations[round(i * (len(iterations) - 1) / max(1, count - 1))] for i in range(count)]


def _tables(run: RunHistory, iterations: Sequence[int]) -> dict[int, list[Row]]:
    return {iteration: read_rows(run.files.scores(iteration)) for iteration in iterations}


def _cards(
    run: RunHistory, tables: Mapping[int, Sequence[Row]], places: Sequence[int], size: int
) -> list[dict[str, Any]]:
    """By prompt: its input picture, and its pictures after every iteration, each with its scores
    and whether it is right."""
    first, cards = next(iter(tables)), []
    for place in places:
        frames = [
            _frame(picture_of(run.files.pictures(after), place), size, rows[place], run.config)
            for after, rows in tables.items()
        ]
        given = given_to(run.files.pictures(first), place, size)
        cards.append({"prompt": tables[first][place]["prompt"], "input": given, "frames": frames})
    return cards


def given_to(folder: Path, index: int, size: int) -> str:
    """The input picture that was kept beside a picture; "" for none."""
    path = input_of(folder, index)
    return data_uri(read_png(path), size) if path.is_file() else ""


def _frame(path: Path, size: int, row: Row, config: Config) -> dict[str, Any]:
    picture, own = read_png(path), row["scores"]
    scores = {name: figure(or_nan(own[name])) for name in config.rewards if name in own}
    told = {"right": row.get("right"), "scores": scores, "shape": picture.size}
    uri, clip = data_uri(picture, size), clip_of(path)
    if clip.is_file():
        return {"uri": clip_uri(*read_webp(clip), size), "still": uri, **told}
    return {"uri": uri, "still": "", **told}


def first_group(run: RunHistory) -> dict[str, Any] | None:
    """The group of the first iteration that the run kept, its members from best to worst. None if
    it kept none; `trouble` is the reason if it cannot be shown."""
    folder = run.files.first_group
    if not run.files.group_scores.is_file():
        return None
    try:
        rows = read_rows(run.files.group_scores, Member)
        files = [read_png(picture_of(folder, index)) for index in range(len(rows))]
        uris = [data_uri(picture, MEMBER) for picture in files]
        members = _members(rows, uris, len(rows) // rows[0]["tails"])
        told = {name: rows[0][name] for name in ("prompt", "how")}
        return {"trouble": "", "members": members, "input": given_to(folder, 0, MEMBER), **told}
    except DAMAGE as error:
        return {"trouble": str(error)}


def _members(rows: Sequence[Row], uris: Sequence[str], count: int) -> list[dict[str, Any]]:
    """The members from best to worst; `rows` and `uris` are of the pictures of `count` members,
    tail after tail."""
    advantages = [row["scores"].get(ADVANTAGE) or 0.0 for row in rows[:count]]
    names = [name for name in rows[0]["scores"] if name != ADVANTAGE]
    return [
        {
            "number": member + 1,
            "right": rows[member].get("right"),
            "pictures": uris[member::count],
            "scores": {
                name: " · ".join(figure(or_nan(row["scores"][name])) for row in rows[member::count])
                for name in names
            },
            "advantage": advantages[member],
        }
        for member in sorted(range(count), key=lambda member: -advantages[member])
    ]


def data_uri(picture: Image.Image, size: int) -> str:
    """The picture within a page, reduced to at most `size` pixels a side."""
    out = io.BytesIO()
    _reduced(picture, size).save(out, "WEBP", quality=88, method=4)
    return webp_uri(out.getvalue())


def clip_uri(frames: Sequence[Image.Image], milliseconds: int | list[int], size: int) -> str:
    """A clip within a page, that repeats, reduced likewise."""
    return webp_uri(webp([_reduced(frame, size) for frame in frames], milliseconds, quality=70))


def picture_uri(image: Tensor, size: int, policy: Policy) -> str:
    """A picture [3, H, W], or a clip [T, 3, H, W] of this policy, likewise."""
    if image.ndim == 4:
        frames = len(image)
        return clip_uri(to_pil(image), round(1000 * seconds_of(policy, frames) / frames), size)
    return data_uri(pil_of(image), size)


def input_uris(prompt: str, size: int) -> list[str]:
    """The input pictures of a prompt, likewise."""
    return [data_uri(picture, size) for picture in read_inputs(prompt)]


def _reduced(picture: Image.Image, size: int) -> Image.Image:
    reduced = picture.convert("RGB")
    reduced.thumbnail((size, size), Image.Resampling.LANCZOS)
    return reduced


def webp_uri(content: bytes) -> str:
    """A file in WebP within a page."""
    return "data:image/webp;base64," + base64.b64encode(content).decode()
