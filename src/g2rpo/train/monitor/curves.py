"""Charts: a line with its interval, and panels of them, for curves.png, the report and studies.

Lines differ by colour, dash and marker together, so that no reader depends on colour.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Literal

import numpy as np

from g2rpo.core.data import Row
from g2rpo.core.statistics import half_width, or_nan

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE_COLOURS = ("#0067a8", "#c24e00", "#00805e", "#a8447f", "#8a6400", "#4c4f57", "#6240b5")
MARKERS = ("o", "s", "^", "D", "X", "P", "v")
DASHES = ((), (3.5, 2), (1, 2), (4.5, 1.75, 1, 1.75), (6, 2), (2, 1.5), (5, 1.5, 1, 1.5, 1, 1.5))
"""Of line styles 0 to 6, which further ones repeat; dashes in line widths, as stroke, gap, ..."""
FIGURE_PAPER, FIGURE_SOFT, GRID = "#ffffff", "#5d6069", "#ecece8"
ACROSS = 3  # panels beside each other, at most
WIDTH, HEIGHT = 4.2, 3.0
"""Inches of a panel with its margins, in the longest row."""
LEFT, RIGHT, BELOW, ABOVE, BESIDE = 0.6, 0.12, 0.6, 0.3, 0.65
"""Inches around panels, and between those of a row. Matplotlib's own layouts draw everything
twice."""
KEY = "Points: held-out prompts. Band: 95 % interval of their change from the base. Faint: batches that were trained on."

Look = Literal["line", "marked", "faint", "range"]


@dataclass(frozen=True)
class CurveLine:
    """One line of a chart. None or NaN in `y` is a gap; `ends` are those of an interval around each
    y, NaN for none.

    `look`: "line", "marked" (a marker at every point), "faint" (behind the others), "range" (only
    the interval, behind).
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: int = 0
    ends: Sequence[tuple[float, float]] = ()
    look: Look = "line"


@dataclass(frozen=True)
class Panel:
    """Lines over a common x."""

    title: str
    lines: Sequence[CurveLine]
    x_label: str = "iteration"


def draw_line(axes: Axes, line: CurveLine) -> None:
    """Draws the interval, the stroke and the markers of a line."""
    style = line.style % len(LINE_COLOURS)
    colour, y = LINE_COLOURS[style], np.array(line.y, dtype=float)
    if line.ends:
        low, high = np.array(line.ends, dtype=float).T
        axes.fill_between(line.x, low, high, color=colour, alpha=0.14, linewidth=0, clip_on=False)
    if line.look == "range":
        return
    alone = np.isfinite(y).sum() == 1
    if not alone:
        width, alpha = {"line": (1.6, 1.0), "marked": (2.0, 1.0), "faint": (1.0, 0.72)}[line.look]
        (stroke,) = axes.plot(
            line.x, y, color=colour, linewidth=width, alpha=alpha, label=line.label, clip_on=False
        )
        stroke.set(
            dash_capstyle="round", solid_capstyle="round", zorder=1.9 if line.look == "faint" else 2
        )
        if DASHES[style]:
            stroke.set_dashes(DASHES[style])
    if alone or line.look == "marked":
        marks = axes.scatter(
            line.x, y, s=46, marker=MARKERS[style], c=colour, edgecolors=FIGURE_PAPER, clip_on=False
        )
        marks.set(linewidths=1.0, zorder=3, label=line.label if alone else "")


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draws lines over a pale horizontal grid, without a box and tick marks."""
    for line in panel.lines:
        draw_line(axes, line)
    axes.set_frame_on(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=1, clip_on=False)
    axes.tick_params(left=False, bottom=False, labelcolor=FIGURE_SOFT, labelsize=9)
    axes.ticklabel_format(useOffset=False)
    axes.locator_params("x", nbins=6, integer=True)
    axes.locator_params("y", nbins=6)
    axes.set_xlabel(panel.x_label, fontsize=9, color=FIGURE_SOFT)
    # where matplotlib would put it after a search
    axes.set_title(panel.title, fontsize=10, loc="left", y=1)


def small_multiples(
    rows: Sequence[Sequence[Panel]], note: str = "", *, legend: bool = False, zero: bool = False
) -> Figure:
    """Panels in rows, each from edge to edge, and a note below. `legend` names the first panel's
    lines; `zero` draws y = 0."""
    from matplotlib.figure import Figure

    width = WIDTH * max(map(len, rows), default=1)
    words = textwrap.wrap(note, round(18 * width))
    height = HEIGHT * max(1, len(rows)) + 0.15 * len(words)
    figure = Figure((width, height))
    for number, row in enumerate(rows):
        top, bottom = height - HEIGHT * number - ABOVE, height - HEIGHT * (number + 1) + BELOW
        wide = (width - LEFT - RIGHT - BESIDE * (len(row) - 1)) / len(row)
        edges = {
            "left": LEFT / width,
            "right": 1 - RIGHT / width,
            "bottom": bottom / height,
            "top": top / height,
        }
        places = figure.add_gridspec(1, len(row), wspace=BESIDE / wide, **edges)
        for place, panel in enumerate(row):
            axes = figure.add_subplot(places[place])
            draw_panel(axes, panel)
            if zero:
                axes.axhline(0, color=FIGURE_SOFT, linewidth=0.8)
    if legend:
        figure.axes[0].legend(fontsize=8)
    figure.text(0.5, 0.06 / height, "\n".join(words), fontsize=8, color=FIGURE_SOFT, ha="center")
    return figure


def save_figure(path: Path | IO[bytes], figure: Figure) -> None:
    """Writes a figure as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120, pil_kwargs={"compress_level": 1})


def heldout_line(
    label: str, evaluations: Sequence[Row], reward: str, prompts: int, style: int = 0
) -> CurveLine:
    """The means of a reward on `prompts` held-out prompts, with the 95 % interval of their change
    from the base, of those that it scored."""
    rows = [row for row in evaluations if f"reward/{reward}" in row]
    y = [or_nan(row[f"reward/{reward}"]) for row in rows]
    half = [
        half_width(or_nan(row.get(f"stderr/{reward}")), row.get(f"scored/{reward}", prompts))
        for row in rows
    ]
    ends = [(value - width, value + width) for value, width in zip(y, half, strict=True)]
    return CurveLine(label, [row["iteration"] for row in rows], y, style, ends, "marked")


def curves(rows: Sequence[Row], trained: Sequence[str], prompts: int) -> Figure:
    """One panel per reward: evaluations on `prompts` held-out prompts, and training batches behind
    them."""
    evaluations = [row for row in rows if row["kind"] == "eval"]
    iterations = [row for row in rows if row["kind"] == "train"]
    panels = []
    for key in evaluations[0] if evaluations else ():
        if not key.startswith("reward/"):
            continue
        name = key.removeprefix("reward/")
        lines = [heldout_line("held-out", evaluations, name, prompts)]
        if name in trained:
            x, y = [row["iteration"] for row in iterations], [row[key] for row in iterations]
            lines.append(CurveLine("training batches", x, y, look="faint"))
        panels.append(
            Panel(f"{name} ({'trained on' if name in trained else 'judged only'})", lines)
        )
    count = math.ceil(len(panels) / ACROSS)
    ends = [math.ceil(len(panels) * number / count) for number in range(1, count + 1)]
    return small_multiples([panels[start:end] for start, end in pairwise([0, *ends])], KEY)
