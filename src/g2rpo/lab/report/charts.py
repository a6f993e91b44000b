"""Charts as inline SVG: pure functions from numbers to markup. Colours come from the page's style sheet, by class.

Runs differ by colour, dash and marker together (its `style`), so that no reader depends on colour.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

from markupsafe import Markup

WIDTH, HEIGHT = 360, 208
TOP, RIGHT, BOTTOM = 10, 12, 36
STYLES = 6
"""Number of styles in the style sheet; further runs repeat them."""
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "bar")

Look = Literal["line", "marked", "faint", "pale", "range"]


@dataclass(frozen=True)
class Line:
    """One line of a chart. A None in `y` is a gap; `error` is the half-width of an interval around y, where it is known, or its
    widths below and above y.

    `look`: "line", "marked" (a marker at every point), "faint" (behind the others), "pale" (faded, hollow markers),
    "range" (only the interval, behind the others).
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: int = 0
    error: Sequence[float | tuple[float, float] | None] = ()
    look: Look = "line"


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    alt: str,
    x_ticks: Sequence[float] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> Markup:
    """A chart of `lines` over a common x; `alt` describes it in words. `x_ticks` replaces the ticks of the x axis.

    `marks` are labelled vertical lines at some x; those outside the range of x are left out.
    """
    xs = [x for line in lines for x in line.x]
    ys = [end for line in lines for ends in _ends(line) if ends for end in ends]
    x_low, x_high = _span(xs or [0, 1], 0.06 if x_ticks else 0)
    y_low, y_high = _span(ys or [0, 1], 0.06)
    y_ticks = nice_ticks(y_low, y_high, 3)
    labels = tick_labels(y_ticks)
    left = 12 + 6.3 * max(len(label) for label in labels)

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + (x - x_low) / (x_high - x_low) * (WIDTH - RIGHT - left)
        return across, HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - BOTTOM - TOP)

    parts = []
    for tick, label in zip(y_ticks, labels, strict=True):
        _, y = at(x_low, tick)
        parts.append(f'<path class="grid" d="M{left:.1f},{y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{left - 7:.1f}" y="{y + 3.8:.1f}" text-anchor="end">{label}</text>')
    ticks = list(x_ticks) or [tick for tick in nice_ticks(x_low, x_high, 4) if float(tick).is_integer()]
    for tick in ticks:
        x, _ = at(tick, y_low)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{compact(tick)}</text>')
    middle = (left + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle:.1f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    for x, word in marks:
        if x_low <= x <= x_high:
            across, _ = at(x, y_low)
            title = f"<title>{escape(word)}</title>"
            parts.append(f'<path class="alarm" d="M{across:.1f},{TOP}V{HEIGHT - BOTTOM}">{title}</path>')
    parts += [_draw(line, at) for line in sorted(lines, key=lambda line: line.look not in ("faint", "range"))]
    parts.append(f'<path class="cursor" d="M0,{TOP}V{HEIGHT - BOTTOM}" visibility="hidden"/>')
    hover = {
        "label": x_label,
        "box": [round(left, 1), WIDTH - RIGHT],
        "x": [x_low, x_high],
        "lines": [{"name": line.label, "style": line.style % STYLES, "x": list(line.x), "y": _values(line)} for line in lines],
    }
    body = "".join(parts)
    data = escape(json.dumps(hover, ensure_ascii=False, separators=(",", ":")))
    size, said = f"0 0 {WIDTH} {HEIGHT}", escape(alt)
    return Markup(f'<svg class="chart" viewBox="{size}" role="img" aria-label="{said}" data-chart="{data}">{body}</svg>')


def key_mark(style: int, look: Look = "marked") -> Markup:
    """The legend symbol of a line."""
    marks = _marker(style, 18, 7) if look in ("marked", "pale") else ""
    stroke = '<path class="band" d="M2,1H34V13H2Z"/>' if look == "range" else '<path class="stroke" d="M2,7H34"/>'
    return Markup(
        f'<svg class="key" viewBox="0 0 36 14" aria-hidden="true"><g class="s{style % STYLES} {look}">{stroke}{marks}</g></svg>'
    )


def interval_plot(change: float, low: float, high: float, reach: float, style: int = 0) -> Markup:
    """A change and its interval beside the zero line, on a scale that ends at +-reach."""
    scale = 62 / reach if reach > 0 else 0.0
    whisker = ""
    if math.isfinite(low) and math.isfinite(high):
        left, right = 70 + low * scale, 70 + high * scale
        whisker = f'<path class="whisker" d="M{left:.1f},9H{right:.1f}M{left:.1f},5.5V12.5M{right:.1f},5.5V12.5"/>'
    return Markup(
        '<svg class="interval" viewBox="0 0 140 18" aria-hidden="true"><path class="zero" d="M70,1V17"/>'
        f'<g class="s{style % STYLES} marked">{whisker}{_marker(style, 70 + change * scale, 9, 4.2)}</g></svg>'
    )


def stacked_bar(parts: Sequence[tuple[str, float]], alt: str) -> Markup:
    """Shares of a whole as one bar; segment i has colour i. Names are shown on hovering and in the table beside it."""
    total, x, out = sum(value for _, value in parts), 0.0, []
    for index, (name, value) in enumerate(parts):
        share = 1000 * value / total if total else 0.0
        title, width = f"<title>{escape(name)}: {share / 10:.1f} %</title>", max(share - 3, min(share, 1.5))
        out.append(f'<rect class="f{index % STYLES}" x="{x:.2f}" width="{width:.2f}" height="20">{title}</rect>')
        x += share
    head = '<svg class="bar" viewBox="0 0 1000 20" preserveAspectRatio="none" role="img"'
    return Markup(f'{head} aria-label="{escape(alt)}">{"".join(out)}</svg>')


def nice_ticks(low: float, high: float, least: int) -> list[float]:
    """The round numbers (1, 2 or 5 times a power of ten apart) within [low, high], as far apart as leaves `least` of them."""
    power = 10.0 ** math.ceil(math.log10(high - low))
    for factor in (1, 0.5, 0.2, 0.1, 0.05, 0.02):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 >= least:
            break
    return [index * step for index in range(first, last + 1)]


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
    return [_mean(x[i : i + size]) or 0.0 for i in bins], [_mean(y[i : i + size]) for i in bins]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _values(line: Line) -> list[str]:
    """What a line says at each of its x: its value or, of a range, its ends."""
    if line.look != "range":
        return [compact(y) for y in line.y]
    return [f"{compact(low)} to {compact(high)}" for low, high in (ends or (None, None) for ends in _ends(line))]


def _ends(line: Line) -> list[tuple[float, float] | None]:
    """The ends of the interval around each y; None for a gap."""
    widths = [each if isinstance(each, tuple) else (each or 0.0, each or 0.0) for each in line.error or [None] * len(line.y)]
    return [None if y is None else (y - below, y + above) for y, (below, above) in zip(line.y, widths, strict=True)]


def _span(values: Sequence[float], margin: float) -> tuple[float, float]:
    """The range of values, widened by a share of it; never empty."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        around = 0.1 * abs(low) or 1.0
        return low - around, high + around
    return low - margin * (high - low), high + margin * (high - low)


def _draw(line: Line, at: Callable[[float, float], tuple[float, float]]) -> str:
    """Band, stroke and markers of one line."""
    known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
    band = ""
    if line.error:
        ends = [(x, each) for x, each in zip(line.x, _ends(line), strict=True) if each]
        edge = [at(x, high) for x, (_, high) in ends] + [at(x, low) for x, (low, _) in reversed(ends)]
        band = f'<path class="band" d="M{" ".join(_point(*p) for p in edge)}Z"/>' if edge else ""
    if line.look == "range":
        return f'<g class="s{line.style % STYLES} range">{band}</g>'
    pen, stroke = "M", []
    for x, y in zip(line.x, line.y, strict=True):
        if y is None:
            pen = "M"
        else:
            stroke.append(f"{pen}{_point(*at(x, y))}")
            pen = "L"
    marks = ""
    if line.look in ("marked", "pale") or len(known) == 1:
        marks = "".join(_marker(line.style, *at(x, y), title=f"{line.label}: {compact(y)} at {compact(x)}") for x, y in known)
    path = f'<path class="stroke" d="{"".join(stroke)}"/>' if len(known) > 1 else ""
    return f'<g class="s{line.style % STYLES} {line.look}">{band}{path}{marks}</g>'


def _point(x: float, y: float) -> str:
    return f"{x:.1f},{y:.1f}"


def _marker(style: int, x: float, y: float, r: float = 3.4, title: str = "") -> str:
    paths = {
        "circle": f"m{-r},0a{r},{r} 0 1 0 {2 * r},0a{r},{r} 0 1 0 {-2 * r},0Z",
        "square": _corners(r, (-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
        "triangle": _corners(r, (0, -1.2), (1.15, 0.8), (-1.15, 0.8)),
        "diamond": _corners(r, (0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        "cross": _corners(r, (-1, -1), (1, 1), (0, 0), (1, -1), (-1, 1), (0, 0)),
        "bar": _corners(r, (-0.35, -1.2), (0.35, -1.2), (0.35, 1.2), (-0.35, 1.2)),
    }
    told = f"<title>{escape(title)}</title>" if title else ""
    return f'<path class="mark" d="M{x:.1f},{y:.1f}{paths[MARKERS[style % len(MARKERS)]]}">{told}</path>'


def _corners(r: float, *corners: tuple[float, float]) -> str:
    """A closed path through corners, given in radii from the current point."""
    steps = [(0.0, 0.0), *corners]
    moves = [f"{(b[0] - a[0]) * r:.2f},{(b[1] - a[1]) * r:.2f}" for a, b in pairwise(steps)]
    return f"m{'l'.join(moves)}Z"
