"""Charts: ticks, labels and geometry by hand, and colours that can be told from the paper."""

import re
from importlib.resources import files
from xml.etree import ElementTree

import pytest

from g2rpo.lab.report.charts import (
    HEIGHT,
    STYLES,
    WIDTH,
    Line,
    compact,
    interval_plot,
    line_chart,
    nice_ticks,
    thin,
    tick_labels,
)

CSS = (files("g2rpo.lab.report") / "templates" / "style.css").read_text("utf-8")


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 100, ["0", "50", "100"]),
        (0.81, 0.93, ["0.82", "0.84", "0.86", "0.88", "0.90", "0.92"]),
        (-1.2, 1.2, ["−1", "0", "1"]),
        (0, 2e-4, ["0", "0.0001", "0.0002"]),
        (0, 25_000, ["0", "10,000", "20,000"]),
    ],
)
def test_ticks(low, high, labels):
    ticks = nice_ticks(low, high, 3)
    assert tick_labels(ticks) == labels
    assert all(low <= tick <= high * (1 + 1e-9) for tick in ticks)


@pytest.mark.parametrize(
    ("value", "text"), [(0.83744, "0.8374"), (12345.6, "12,346"), (-0.5, "−0.5"), (1.5e-5, "1.5e-5"), (None, "–")]
)
def test_compact_numbers(value, text):
    assert compact(value) == text


def parsed(svg):
    return ElementTree.fromstring(str(svg))


def test_a_line_goes_where_its_numbers_say():
    """Four points of a straight line are equally spaced and end at the right edge; the cut at None starts a new stroke."""
    svg = parsed(line_chart([Line("a", [0, 1, 2, 3, 4], [0.0, 1.0, None, 3.0, 4.0])], x_label="iteration", alt="rising"))
    (stroke,) = (path.get("d") for path in svg.iter("path") if path.get("class") == "stroke")
    points = [tuple(map(float, point.split(","))) for point in re.findall(r"[\d.]+,[\d.]+", stroke)]
    xs, ys = zip(*points, strict=True)
    assert re.findall("[ML]", stroke) == ["M", "L", "M", "L"]
    assert xs[-1] == WIDTH - 12 and xs[1] - xs[0] == pytest.approx((xs[-1] - xs[0]) / 4, abs=0.11)  # one decimal is written
    assert ys[0] > ys[1] > ys[2] > ys[3] and ys[0] - ys[1] == pytest.approx((ys[0] - ys[-1]) / 4, abs=0.11)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)


@pytest.mark.parametrize("values", [[], [None, None], [2.0], [5.0, 5.0, 5.0], [0.0, 0.0], [1e-12, 1e-12]])
def test_degenerate_lines_still_draw(values):
    line = Line("flat", list(range(len(values))), values, look="marked")
    text = str(line_chart([line], x_label="x", alt="a"))
    parsed(text)
    assert "nan" not in text and "inf" not in text


def test_intervals_share_a_scale():
    """On a scale that ends at 2, the change 1 sits half way to the right, and its whiskers end at .5 and 1.5."""
    d = parsed(interval_plot(1.0, 0.5, 1.5, 2.0)).find(".//path[@class='whisker']").get("d")
    assert d.startswith("M85.5,9H116.5")  # 70 + 62 * (1 -+ 0.5) / 2
    assert "whisker" not in interval_plot(1.0, float("nan"), float("nan"), 2.0)


def test_thinning_keeps_means():
    x, y = thin(list(range(10)), [0.0, 2.0, None, 5.0, None, None, 1.0, 1.0, 9.0, 9.0], limit=5)
    assert x == [0.5, 2.5, 4.5, 6.5, 8.5] and y == [1.0, 5.0, None, 1.0, 9.0]
    assert thin([1, 2], [3.0, None], limit=2) == ([1, 2], [3.0, None])


def luminance(colour):
    """Relative luminance (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out_from_the_paper(scheme):
    """WCAG 2.2: contrast of at least 4.5 for text and 3 for graphics."""
    blocks = re.findall(r":root \{(.*?)\}", CSS, flags=re.DOTALL)
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", blocks[scheme == "dark"]))
    paper = luminance(colours["paper"])
    for name, least in {"ink": 4.5, "soft": 4.5, "up": 4.5, "down": 4.5, **{f"c{i}": 3.0 for i in range(STYLES)}}.items():
        high, low = sorted((luminance(colours[name]), paper), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= least, (name, colours[name])
