"""Charts as inline SVG, drawn by matplotlib. Colours become variables of the page's style sheet, fonts are the page's."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any, cast

from markupsafe import Markup

from g2rpo.lab.report.history import mean
from g2rpo.monitor.curves import FIGURE_PAPER, FIGURE_SOFT, GRID, LINE_COLOURS, CurveLine, Look, draw_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 360, 208
TOP, RIGHT_MARGIN, BOTTOM = 10, 12, 36
ALARM = "#b03a00"
VARIABLES = {colour: f"c{style}" for style, colour in enumerate(LINE_COLOURS)} | {
    FIGURE_PAPER: "paper",
    FIGURE_SOFT: "soft",
    GRID: "grid",
    ALARM: "down",
}
"""Colours of the page's light scheme, by their names in its style sheet."""
CLEANED = (
    (r"""<g id=["']alarm: ([^>]*)["']>\s*<path ([^>]*)/>\s*</g>""", r'<path class="alarm" \2><title>\1</title></path>'),
    (r'\s*\n(?=")|(?<=>)\s*\n\s*', ""),
    (r"\s*\n\s*", " "),
    (r' transform="rotate\(-0 [^"]*"', ""),
    (r"font[-a-z]*: [^;\"]*(; )?|stroke-dashoffset: 0; |<defs/>", ""),
    (r"(?<=\d\.\d\d)\d+(?=[^<>]*>)", ""),
    (r"</?g[^>]*>", ""),
    (
        r'<defs><path id="(\w+)" d="([^"]*)"[^>]*/></defs><use xlink:href="#\1" x="([^"]*)" y="([^"]*)" ([^>]*)/>(?!.*#\1")',
        r'<path d="\2" transform="translate(\3 \4)" \5/>',
    ),
)
"""What a page does not need of matplotlib's SVG, with what stands for it: line breaks, fonts, the third and further decimals,
groups, and the definition of a mark that is drawn once."""


def line_chart(
    lines: Sequence[CurveLine],
    *,
    x_label: str,
    alt: str,
    x_ticks: Sequence[float] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> Markup:
    """A chart of `lines` over a common x; `alt` describes it in words. `x_ticks` replaces the ticks of the x axis.

    `marks` are vertical lines at some x with a text each; those outside the range of x are left out.
    """
    from matplotlib.ticker import MaxNLocator

    axes = _axes(WIDTH, HEIGHT)
    axes.autoscale()
    axes.margins(x=0.06 if x_ticks else 0, y=0.06)
    for line in lines:
        draw_line(axes, line)
    (x_low, x_high), (y_low, y_high) = axes.get_xlim(), axes.get_ylim()
    axes.set(xlim=(x_low, x_high), ylim=(y_low, y_high))
    ticks = _within(y_low, y_high, MaxNLocator(nbins=5, steps=[1, 2, 5, 10], min_n_ticks=3).tick_values(y_low, y_high))
    labels = tick_labels(ticks)
    left = 12 + 6.3 * max(len(label) for label in labels)
    width, height = WIDTH - RIGHT_MARGIN - left, HEIGHT - BOTTOM - TOP
    axes.set_position((left / WIDTH, BOTTOM / HEIGHT, width / WIDTH, height / HEIGHT))
    axes.hlines(ticks, x_low, x_high, color=GRID, linewidth=1, zorder=0, clip_on=False)
    across, up = axes.get_xaxis_transform(), axes.get_yaxis_transform()  # the other coordinate is a share of the axes
    text: dict[str, Any] = {"color": FIGURE_SOFT, "size": 11}
    for tick, label in zip(ticks, labels, strict=True):
        axes.text(-7 / width, tick, label, **text, ha="right", va="center", transform=up)
    for tick in _within(x_low, x_high, x_ticks or MaxNLocator(nbins=6, integer=True).tick_values(x_low, x_high)):
        axes.text(tick, -8 / height, compact(tick), **text, ha="center", va="top", transform=across)
    axes.text(0.5, -BOTTOM / height, x_label, **text, ha="center", va="bottom", transform=axes.transAxes)
    for x, word in marks:
        if x_low <= x <= x_high:
            axes.axvline(x, color=ALARM, linewidth=1.5, gid=f"alarm: {word}", clip_on=False)
    hover = {
        "label": x_label,
        "box": [round(left, 1), WIDTH - RIGHT_MARGIN],
        "x": [x_low, x_high],
        "lines": [{"name": line.label, "x": list(line.x), "y": _said(line)} for line in lines],
    }
    data = escape(json.dumps(hover, ensure_ascii=False, separators=(",", ":")))
    cursor = f'<path class="cursor" d="M0,{TOP}V{HEIGHT - BOTTOM}" visibility="hidden"/>'
    return _svg(axes, f'class="chart" role="img" aria-label="{escape(alt)}" data-chart="{data}"', cursor)


@cache
def key_mark(style: int = 0, look: Look = "marked") -> Markup:
    """The legend symbol of a line."""
    axes = _axes(36, 14)
    strokes: dict[Look, Look] = {"marked": "line"}
    draw_line(axes, CurveLine("", (2, 34), (7, 7), style, ((1, 13),) * 2 if look == "range" else (), strokes.get(look, look)))
    if look in strokes:
        draw_line(axes, CurveLine("", (18,), (7,), style, look=look))
    return _svg(axes, 'class="key" aria-hidden="true"')


def alarm_mark() -> Markup:
    """The legend symbol of an alarm."""
    axes = _axes(36, 14)
    axes.vlines(18, 0, 14, color=ALARM, linewidth=1.5, clip_on=False)
    return _svg(axes, 'class="key" aria-hidden="true"')


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Labels of the ticks of one axis, all with the decimals that their distance needs."""
    largest, step = max(abs(tick) for tick in ticks), ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) or 1.0
    if largest < 1e-3:
        return [compact(tick) for tick in ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{tick:,.{decimals}f}".replace("-", "−") for tick in ticks]


def compact(value: float | None, digits: int = 4) -> str:
    """A number in few characters: 0.8374, 81.05, 12,345, 1.5e-5; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", "−")
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return mantissa.replace("-", "−") + (f"e{int(exponent)}" if exponent else "")


def thin(x: Sequence[float], y: Sequence[float | None], limit: int = 300) -> tuple[list[float], list[float | None]]:
    """At most `limit` points: means of equally many neighbours, at their mean x; None where a bin has no value."""
    size = -(-len(x) // limit)
    if size <= 1:
        return list(x), list(y)
    bins = range(0, len(x), size)
    return [mean(x[i : i + size]) or 0.0 for i in bins], [mean(y[i : i + size]) for i in bins]


def _said(line: CurveLine) -> list[str]:
    """What a line says at each of its x: its value or, of a range, its ends."""
    if line.look == "range":
        return [f"{compact(low)} to {compact(high)}" for low, high in line.ends]
    return [compact(y) for y in line.y]


def _within(low: float, high: float, ticks: Iterable[float]) -> list[float]:
    return [float(tick) for tick in ticks if low <= tick <= high]


def _axes(width: int, height: int) -> Axes:
    """Axes in pixels from the lower left corner that fill a figure, and are not drawn."""
    from matplotlib.figure import Figure

    axes = Figure((width / 72, height / 72), dpi=72, frameon=False).add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return axes


def _svg(axes: Axes, attributes: str, more: str = "") -> Markup:
    """The figure of these axes as an element of a page, with further elements at its end."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import RendererSVG

    figure, out = cast("Figure", axes.figure), io.StringIO()
    size = figure.bbox.width, figure.bbox.height
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": attributes}):  # else marks of two charts have one id
        renderer = RendererSVG(*size, out, image_dpi=72)
        figure.draw(renderer)
        renderer.finalize()
    drawn = out.getvalue()
    drawn = drawn[drawn.index('<g id="figure_1">') : drawn.rindex("</svg>")]
    for pattern, replacement in CLEANED:
        drawn = re.sub(pattern, replacement, drawn)
    for colour, name in VARIABLES.items():
        drawn = drawn.replace(colour, f"var(--{name})")
    return Markup(f'<svg viewBox="0 0 {size[0]:g} {size[1]:g}" {attributes}>{drawn}{more}</svg>')
