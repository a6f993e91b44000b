"""Curves of a run's rewards as a picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g2rpo.core.statistics import half_width
from g2rpo.monitor.metrics import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: safe for colour-blind readers
ACROSS = 3  # panels beside each other, at most
LEFT, RIGHT, BELOW, ABOVE, BESIDE, BETWEEN = 0.6, 0.12, 0.6, 0.3, 0.65, 0.75
"""Inches beside, below, above and between panels; matplotlib's own layouts draw everything twice."""
KEY = "Points: held-out prompts. Band: 95 % interval of their change from the base. Faint: batches that were trained on."


def save_curves(path: Path, rows: Sequence[Row], trained: Sequence[str], prompts: int) -> None:
    """Writes `curves` as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = curves(rows, trained, prompts)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120, pil_kwargs={"compress_level": 1})


def curves(rows: Sequence[Row], trained: Sequence[str], prompts: int) -> Figure:
    """One panel per reward: evaluations on `prompts` held-out prompts with the 95 % interval of their change from the base
    (`half_width`), and training batches."""
    from matplotlib.figure import Figure

    evaluations = [row for row in rows if row["kind"] == "eval"]
    iterations = [row for row in rows if row["kind"] == "train"]
    names = [key.removeprefix("reward/") for key in (evaluations[0] if evaluations else {}) if key.startswith("reward/")]
    lines = math.ceil(len(names) / ACROSS) or 1
    across = [len(names) // lines + (line < len(names) % lines) for line in range(lines)]
    width, height, columns = 4.2 * max(1, *across), 3 * lines + 0.3, math.lcm(*(count or 1 for count in across))
    figure = Figure(figsize=(width, height))
    key = textwrap.wrap(KEY, round(18 * width))
    below = BELOW + 0.15 * len(key)
    inside = width - LEFT - RIGHT, height - below - ABOVE
    grid = figure.add_gridspec(
        lines,
        columns,
        left=LEFT / width,
        right=1 - RIGHT / width,
        bottom=below / height,
        top=1 - ABOVE / height,
        wspace=_relative(BESIDE, columns, inside[0]),
        hspace=_relative(BETWEEN, lines, inside[1]),
    )
    places = [(line, place) for line, count in enumerate(across) for place in range(count)]
    for number, (name, (line, place)) in enumerate(zip(names, places, strict=True)):
        span = grid.ncols // across[line]
        axis = figure.add_subplot(grid[line, place * span : (place + 1) * span])
        half = {r["iteration"]: half_width(_number(r.get(f"stderr/{name}")), prompts) for r in evaluations}
        _panel(axis, name, evaluations, iterations, half, COLOURS[number % len(COLOURS)], name in trained)
    figure.text(0.5, 0.06 / height, "\n".join(key), fontsize=8, color="#5d6069", ha="center")
    return figure


def _relative(gap: float, count: int, length: float) -> float:
    """A gap between `count` panels that fill `length`, in units of a panel, as a GridSpec takes it."""
    return gap * count / (length - gap * (count - 1))


def _panel(
    axis: Axes,
    name: str,
    evaluations: Sequence[Row],
    iterations: Sequence[Row],
    half: Mapping[int, float],
    colour: str,
    trained: bool,
) -> None:
    key = f"reward/{name}"
    if trained:
        axis.plot([r["iteration"] for r in iterations], [r[key] for r in iterations], color=colour, alpha=0.3, linewidth=1)
    x, y = [r["iteration"] for r in evaluations], [_number(r.get(key)) for r in evaluations]
    low, high = ([value + side * half[at] for at, value in zip(x, y, strict=True)] for side in (-1, 1))
    curve_with_band(axis, x, y, low, high, colour)
    title = f"{name} ({'trained on' if trained else 'judged only'})"
    axis.set_title(title, fontsize=10, y=1)  # where matplotlib would put it after a search
    axis.set_xlabel("iteration", fontsize=9)
    axis.tick_params(labelsize=9)
    axis.locator_params("x", nbins=6, integer=True)
    axis.locator_params("y", nbins=6)


def curve_with_band(
    axis: Axes,
    x: Sequence[float],
    y: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    colour: str,
    **line: Any,
) -> None:
    """A marked line, and a band around it, on an axis with a pale grid and no box."""
    axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.plot(x, y, color=colour, marker="o", markersize=4, **line)
    axis.grid(visible=True, alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
