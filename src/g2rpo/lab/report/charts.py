"""The charts of the report as inline SVG in the colours and fonts of the page, and its tables by
step and granularity."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import TYPE_CHECKING

from markupsafe import Markup

from g2rpo.core.data import Row
from g2rpo.core.statistics import figures
from g2rpo.lab.report.history import SeedGroup, mean
from g2rpo.train.monitor.curves import (
    FIGURE_PAPER,
    FIGURE_SOFT,
    GRID,
    LINE_COLOURS,
    CurveLine,
    Look,
    Panel,
    draw_line,
    draw_panel,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 360, 208
LEFT, RIGHT, TOP, BOTTOM = 48, 348, 10, 172
"""Pixels of a chart, and of the edges of its axes from the left and the top."""
VARIABLES = {colour: f"c{style}" for style, colour in enumerate(LINE_COLOURS)} | {
    FIGURE_PAPER: "paper",
    FIGURE_SOFT: "soft",
    GRID: "grid",
}
"""Colours of the page's light scheme, by their names in its style sheet."""
CLEANED = (
    (r"</?g\b[^>]*>|\n *|(?<=\d\.\d\d)\d+(?=[^<>]*>)", ""),
    (r'font-[^;"]*; |\stransform="rotate\(-0[^"]*"', ""),
    (
        r'<defs><path id="(\w+)" d="([^"]*)"[^>]*/></defs><use xlink:href="#\1" x="([^"]*)" y="([^"]*)" ([^>]*)/>(?!.*#\1")',
        r'<path d="\2" transform="translate(\3 \4)" \5/>',
    ),
)
"""What a page does not need of matplotlib's SVG, with what stands for it: groups, whose ids repeat
in every figure, the third and further decimals, fonts, and the definition of a mark that is drawn
once."""
POINTS = 300  # of a curve, at most

UPDATE = (
    ("ratio_deviation", "Ratio deviation", "largest |ratio − 1| of an iteration", ""),
    ("clip_fraction", "Clip fraction", "share of ratios outside the clip range", ""),
    ("kl", "KL to the base", "of the step kernels, mean over entries", ""),
    ("grad_norm", "Gradient norm", "before clipping", ""),
    ("loss", "Loss", "what an update makes smaller", ""),
    ("advantage_clipped", "Clipped advantages", "share at the advantage clip", "saturated"),
    (
        "silent_groups",
        "Zero-variance groups",
        "share of groups without a gradient: all advantages 0",
        "silent",
    ),
    ("missing_scores", "Missing scores", "share of scores that are NaN", ""),
    ("masked_groups", "Masked groups", "share of groups without two scores to compare", "masked"),
    (
        "log_prob_drift",
        "Log-prob drift",
        "training pass against rollout; rounding, or something is wrong",
        "drift",
    ),
    ("skipped_updates", "Skipped updates", "with a gradient that was not finite", ""),
    ("seconds", "Seconds an iteration", "all phases, without held-out evaluations", ""),
)
"""Numbers of the update in the log, with titles, notes and alarms."""
LOOKS = {
    "brightness": "mean luma",
    "contrast": "standard deviation of luma within a picture; blank: 0",
    "saturation": "largest minus smallest channel of a pixel",
    "clipped": "share of values that are 0 or 1",
    "detail": "luma of a pixel against its neighbours; noise is high",
    "motion": "of clips: luma of a pixel against the frame before; standing still: 0",
}
"""Statistics of pictures in the log."""


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    tag: str
    svg: Markup


def reward_charts(groups: Sequence[SeedGroup]) -> list[Chart]:
    """A chart per reward: held-out evaluations with the interval of their change, and training
    batches behind them."""
    charts = []
    trained = {name for group in groups for name in group.config.trained}
    refitted = {name for group in groups for run in group.runs for name in run.refitted()}
    names = _union(group.config.all_rewards for group in groups)
    for name in sorted(names, key=lambda name: name not in trained):
        lines = []
        for group in groups:
            batches = thin(*group.series(f"reward/{name}"))
            lines += [
                CurveLine(group.label("training batches"), *batches, group.style, look="faint"),
                group.curve(name),
            ]
        charts += _chart(
            groups,
            name,
            "each value by the head of its time; heads differ in scale" if name in refitted else "",
            lines,
            ("hacking", "decline"),
            "trained on" if name in trained else "judged only",
        )
    return charts


def look_charts(groups: Sequence[SeedGroup]) -> list[Chart]:
    """A chart for each statistic of the held-out pictures, with the base's range (5 to 95 % of its
    pictures) behind it."""
    charts = []
    for name, note in LOOKS.items():
        lines = []
        for group in groups:
            means, (x, low), (_, high) = (
                group.series(f"image/{name}{end}", "eval") for end in ("", "/low", "/high")
            )
            ends = list(zip(low, high, strict=True))
            lines.append(CurveLine(group.label("base"), x, low, group.style, ends, "range"))
            lines.append(CurveLine(group.label("mean"), *means, group.style, look="marked"))
        charts += _chart(groups, name.capitalize(), note, lines, ("pictures",))
    return charts


def update_charts(groups: Sequence[SeedGroup]) -> tuple[list[Chart], list[str]]:
    """A chart for every number of the update that varies, and text for constant ones."""
    charts, constants = [], []
    for key, title, note, alarm in UPDATE:
        lines = [
            CurveLine(group.label(), *thin(*group.series(key)), group.style) for group in groups
        ]
        seen = {value for line in lines for value in line.y}
        if len(seen) == 1:
            constants.append(f"{title} {compact(seen.pop())}")
        else:
            charts += _chart(groups, title, note, lines, (alarm,))
    return charts, constants


def noise_table(
    groups: Sequence[SeedGroup], axis: str
) -> tuple[list[str], list[tuple[SeedGroup, int, list[str]]]]:
    """What is logged as `axis/INDEX/WHAT`: heads, and rows of (line, index, "first fifth → last
    fifth" of each WHAT)."""
    keys = _union(row for group in groups for run in group.runs for row in run.iterations)
    logged = [key.split("/", 2)[1:] for key in keys if key.startswith(f"{axis}/")]
    kinds, rows = _union([what] for _, what in logged), []
    for group in groups:
        early, late = _fifths(group)
        for index in sorted({int(index) for index, _ in logged}):
            keys = [f"{axis}/{index}/{what}" for what in kinds]
            ends = [
                (mean(row.get(key) for row in early), mean(row.get(key) for row in late))
                for key in keys
            ]
            if any(math.isfinite(end) for both in ends for end in both):
                rows.append(
                    (group, index, [f"{figures(first)} → {figures(last)}" for first, last in ends])
                )
    return [what.replace("/", " of ") for what in kinds], rows


@cache
def key_mark(style: int = 0, look: Look = "marked") -> Markup:
    """The legend symbol of a line."""
    figure, axes = _figure(36, 14, 0, 36, 0, 14)
    axes.set(xlim=(0, 36), ylim=(0, 14))
    axes.set_axis_off()
    ends = ((1, 13),) * 2 if look == "range" else ()
    draw_line(
        axes, CurveLine("", (2, 34), (7, 7), style, ends, "line" if look == "marked" else look)
    )
    if look == "marked":
        draw_line(axes, CurveLine("", (18,), (7,), style))
    return _svg(figure, 'class="key" aria-hidden="true"')


def line_chart(panel: Panel, alt: str, marks: Sequence[tuple[float, str]] = ()) -> Markup:
    """A panel that tells its numbers at the pointer; `alt` describes it in words. `marks` are
    vertical lines at some x with a text each; those outside the range of x are left out."""
    figure, axes = _figure(WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM)
    draw_panel(axes, panel)
    low, high = axes.get_xlim()
    hover = {
        "label": panel.x_label,
        "box": [LEFT, RIGHT],
        "x": [low, high],
        "lines": [
            {"name": line.label, "x": list(line.x), "y": _said(line)} for line in panel.lines
        ],
    }
    more = f'<path class="cursor" d="M0,{TOP}V{BOTTOM}" visibility="hidden"/>'
    for x, word in marks:
        if low <= x <= high:
            at = LEFT + (RIGHT - LEFT) * (x - low) / (high - low)
            more += f'<path class="alarm" d="M{at:.1f},{TOP}V{BOTTOM}"><title>{escape(word)}</title></path>'
    data = escape(json.dumps(hover, ensure_ascii=False, separators=(",", ":")))
    return _svg(
        figure, f'class="chart" role="img" aria-label="{escape(alt)}" data-chart="{data}"', more
    )


def compact(value: float | None, digits: int = 4) -> str:
    """A number in few characters: 0.8374, 81.05, 12,345, 1.5e-5; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", "−")
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return mantissa.replace("-", "−") + (f"e{int(exponent)}" if exponent else "")


def thin(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most `POINTS` points: means of equally many neighbours, at their mean x; NaN where none
    has a value."""
    size = max(1, -(-len(x) // POINTS))
    bins = [slice(first, first + size) for first in range(0, len(x), size)]
    return [mean(x[each]) for each in bins], [mean(y[each]) for each in bins]


def _chart(
    groups: Sequence[SeedGroup],
    title: str,
    note: str,
    lines: Sequence[CurveLine],
    alarms: Sequence[str],
    tag: str = "",
) -> list[Chart]:
    """The chart, with the iterations at which these alarms were raised, or nothing if no line has a
    point."""
    said, shown = [f"{title}, {tag}." if tag else f"{title}."], []
    for line in lines:
        points = [
            (x, y)
            for x, y in zip(line.x, line.y, strict=True)
            if y is not None and math.isfinite(y)
        ]
        if points:
            shown.append(line)
            (x0, y0), (x1, y1) = points[0], points[-1]
            begins = f"{line.label or 'From'}: {compact(y0)} at iteration {compact(x0)}"
            said.append(f"{begins}, {compact(y1)} at {compact(x1)}.")
    if not shown:
        return []
    marks = [
        (one.first, f"{group.label('alarm')}: {one.name}, {one.said}")
        for group in groups
        for one in group.alarms()
        if one.name in alarms
    ]
    said += [f"Alarm at iteration {x}." for x, _ in marks]
    return [Chart(title, note, tag, line_chart(Panel("", shown), " ".join(said), marks))]


def _said(line: CurveLine) -> list[str]:
    """What a line says at each of its x: its value or, of a range, its ends."""
    if line.look == "range":
        return [f"{compact(low)} to {compact(high)}" for low, high in line.ends]
    return [compact(y) for y in line.y]


def _fifths(group: SeedGroup) -> tuple[list[Row], list[Row]]:
    """The first and the last fifth of each run's iterations, at least one each."""
    counts = [(run.iterations, max(1, len(run.iterations) // 5)) for run in group.runs]
    return [row for rows, n in counts for row in rows[:n]], [
        row for rows, n in counts for row in rows[-n:]
    ]


def _union(many: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(item for each in many for item in each))


def _figure(
    width: float, height: float, left: float, right: float, top: float, bottom: float
) -> tuple[Figure, Axes]:
    """A figure of a pixel a unit, and its axes between these pixels."""
    from matplotlib.figure import Figure

    figure = Figure((width / 72, height / 72), dpi=72, frameon=False)
    return figure, figure.add_axes(
        (left / width, 1 - bottom / height, (right - left) / width, (bottom - top) / height)
    )


def _svg(figure: Figure, attributes: str, more: str = "") -> Markup:
    """The figure as an element of a page, with further elements at its end."""
    from matplotlib import rc_context

    out = io.StringIO()
    # else marks of two charts have one id
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": attributes}):
        figure.savefig(out, format="svg", dpi=72)
    drawn = out.getvalue()
    drawn = drawn[drawn.index('<g id="figure_1">') : drawn.rindex("</svg>")]
    for pattern, replacement in CLEANED:
        drawn = re.sub(pattern, replacement, drawn)
    for colour, name in VARIABLES.items():
        drawn = drawn.replace(colour, f"var(--{name})")
    width, height = figure.bbox.width, figure.bbox.height
    return Markup(f'<svg viewBox="0 0 {width:g} {height:g}" {attributes}>{drawn}{more}</svg>')
