"""Lines with intervals, as the report, studies and a run's curves.png draw them.

Lines differ by colour, dash and marker together, so that no reader depends on colour.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from g2rpo.core.data import Row
from g2rpo.core.statistics import half_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE_COLOURS = ("#0067a8", "#c24e00", "#00805e", "#a8447f", "#8a6400", "#4c4f57")
MARKERS = ("o", "s", "^", "D", "X", "P")
DASHES = ((), (3.5, 2), (1, 2), (4.5, 1.75, 1, 1.75), (6, 2), (2, 1.5))
"""Of line styles 0 to 5, which further ones repeat; dashes in line widths, as stroke, gap, ..."""
FIGURE_PAPER, FIGURE_SOFT, GRID = "#ffffff", "#5d6069", "#ecece8"
ACROSS = 3  # panels beside each other, at most
LEFT, RIGHT_INCHES, BELOW, ABOVE_INCHES, BESIDE, BETWEEN = 0.6, 0.12, 0.6, 0.3, 0.65, 0.75
"""Inches beside, below, above and between panels; matplotlib's own layouts draw everything twice."""
KEY = "Points: held-out prompts. Band: 95 % interval of their change from the base. Faint: batches that were trained on."

Look = Literal["line", "marked", "faint", "pale", "range"]


@dataclass(frozen=True)
class CurveLine:
    """One line of a chart. None or NaN in `y` is a gap; `ends` are those of an interval around each y, NaN for none.

    `look`: "line", "marked" (a marker at every point), "faint" (behind the others), "pale" (faded, hollow markers),
    "range" (only the interval, behind the others).
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: int = 0
    ends: Sequence[tuple[float, float]] = ()
    look: Look = "line"


def draw_line(axes: Axes, line: CurveLine) -> None:
    """Draws the interval, the stroke and the markers of a line."""
    style = line.style % len(LINE_COLOURS)
    colour, y = LINE_COLOURS[style], np.array(line.y, dtype=float)
    if line.ends:
        shade = 0.16 if line.look == "range" else 0.13
        low, high = zip(*line.ends, strict=True)
        axes.fill_between(line.x, low, high, color=colour, alpha=shade, linewidth=0, clip_on=False)
    if line.look == "range":
        return
    alone = np.isfinite(y).sum() == 1
    if not alone:
        width, alpha = {"line": (1.6, 1.0), "faint": (1.0, 0.72), "pale": (1.4, 0.55)}.get(line.look, (2.0, 1.0))
        (stroke,) = axes.plot(line.x, y, color=colour, linewidth=width, alpha=alpha, label=line.label, clip_on=False)
        stroke.set(dash_capstyle="round", solid_capstyle="round", zorder=1.9 if line.look == "faint" else 2)
        if DASHES[style]:
            stroke.set_dashes(DASHES[style])
    if alone or line.look in ("marked", "pale"):
        face, edge, rim = (FIGURE_PAPER, colour, 1.5) if line.look == "pale" else (colour, FIGURE_PAPER, 1.0)
        marks = axes.scatter(line.x, y, s=46, marker=MARKERS[style], c=face, edgecolors=edge, linewidths=rim, clip_on=False)
        marks.set(zorder=3, label=line.label if alone else "")


def plain_axes(axes: Axes) -> None:
    """Takes box and tick marks away, and draws a pale horizontal grid."""
    axes.set_frame_on(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=1, clip_on=False)
    axes.tick_params(length=0, labelcolor=FIGURE_SOFT)
    axes.xaxis.label.set_color(FIGURE_SOFT)


def heldout_line(label: str, evaluations: Sequence[Row], reward: str, prompts: int, style: int = 0) -> CurveLine:
    """The means of a reward on `prompts` held-out prompts, with the 95 % interval of their change from the base."""
    rows = [row for row in evaluations if f"reward/{reward}" in row]
    y = [_number(row[f"reward/{reward}"]) for row in rows]
    half = [half_width(_number(row.get(f"stderr/{reward}")), prompts) for row in rows]
    ends = [(value - width, value + width) for value, width in zip(y, half, strict=True)]
    return CurveLine(label, [row["iteration"] for row in rows], y, style, ends, "marked")


def save_curves(path: Path, rows: Sequence[Row], trained: Sequence[str], prompts: int) -> None:
    """Writes `curves` as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = curves(rows, trained, prompts)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120, pil_kwargs={"compress_level": 1})


def curves(rows: Sequence[Row], trained: Sequence[str], prompts: int) -> Figure:
    """One panel per reward: evaluations on `prompts` held-out prompts, and training batches behind them."""
    from matplotlib.figure import Figure

    evaluations = [row for row in rows if row["kind"] == "eval"]
    iterations = [row for row in rows if row["kind"] == "train"]
    names = [key.removeprefix("reward/") for key in (evaluations[0] if evaluations else {}) if key.startswith("reward/")]
    lines = math.ceil(len(names) / ACROSS) or 1
    across = [len(names) // lines + (line < len(names) % lines) for line in range(lines)]
    width, height = 4.2 * max(1, *across), 3 * lines + 0.3
    figure = Figure(figsize=(width, height))
    key = textwrap.wrap(KEY, round(18 * width))
    below = BELOW + 0.15 * len(key)
    tall = (height - below - ABOVE_INCHES - BETWEEN * (lines - 1)) / lines
    places = [(line, place) for line, count in enumerate(across) for place in range(count)]
    for name, (line, place) in zip(names, places, strict=True):
        wide = (width - LEFT - RIGHT_INCHES - BESIDE * (across[line] - 1)) / across[line]
        left, bottom = LEFT + place * (wide + BESIDE), height - ABOVE_INCHES - tall - line * (tall + BETWEEN)
        axes = figure.add_axes((left / width, bottom / height, wide / width, tall / height))
        plain_axes(axes)
        if name in trained:
            x, y = [row["iteration"] for row in iterations], [row[f"reward/{name}"] for row in iterations]
            draw_line(axes, CurveLine("training batches", x, y, look="faint"))
        draw_line(axes, heldout_line("held-out", evaluations, name, prompts))
        title = f"{name} ({'trained on' if name in trained else 'judged only'})"
        axes.set_title(title, fontsize=10, y=1)  # where matplotlib would put it after a search
        axes.set_xlabel("iteration", fontsize=9)
        axes.tick_params(labelsize=9)
        axes.locator_params("x", nbins=6, integer=True)
        axes.locator_params("y", nbins=6)
    figure.text(0.5, 0.06 / height, "\n".join(key), fontsize=8, color=FIGURE_SOFT, ha="center")
    return figure


def _number(value: float | None) -> float:
    return math.nan if value is None else value
