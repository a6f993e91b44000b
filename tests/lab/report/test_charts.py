"""Charts: labels and geometry by hand, markup that a page can hold, and colours that can be told
from the paper."""

import math
import re
from importlib.resources import files
from xml.etree import ElementTree

import pytest

from g2rpo.lab.report import charts
from g2rpo.lab.report.charts import (
    HEIGHT,
    RIGHT,
    VARIABLES,
    WIDTH,
    compact,
    key_mark,
    line_chart,
    thin,
)
from g2rpo.monitor.curves import CurveLine, Panel

CSS = (files("g2rpo.lab.report") / "templates" / "style.css").read_text("utf-8")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.83744, "0.8374"), (12345.6, "12,346"), (-0.5, "−0.5"), (1.5e-5, "1.5e-5"), (None, "–")],
)
def test_compact_numbers(value, text):
    assert compact(value) == text


def parsed(svg):
    return ElementTree.fromstring(str(svg).replace("xlink:href", "href"))


def drawn(svg, width):
    """The points of the path with this stroke width, with the letters before them."""
    (path,) = (
        path.get("d")
        for path in svg.iter("path")
        if f"stroke-width: {width};" in path.get("style", "")
    )
    return re.findall("[ML]", path), [
        (float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)
    ]


def test_a_line_goes_where_its_numbers_say():
    """Four points of a straight line are equally spaced; the cut at None starts a new stroke. A
    mark stands at its x."""
    line = CurveLine("a", [0, 1, 2, 3, 4], [0.0, 1.0, None, 3.0, 4.0])
    for _ in range(2):  # the axes are used again
        svg = parsed(
            line_chart(
                Panel("", [line], "iteration"), "rising", [(3, "an alarm"), (9, "out of range")]
            )
        )
        pens, points = drawn(svg, 1.6)
        xs, ys = zip(*points, strict=True)
        assert pens == ["M", "L", "M", "L"]
        # two decimals are written
        assert xs[1] - xs[0] == pytest.approx((xs[-1] - xs[0]) / 4, abs=0.011) and xs[-1] < RIGHT
        assert ys[0] > ys[1] > ys[2] > ys[3] and ys[0] - ys[1] == pytest.approx(
            (ys[0] - ys[-1]) / 4, abs=0.011
        )
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
        (mark,) = (path for path in svg.iter("path") if path.get("class") == "alarm")
        # one decimal
        assert float(re.match(r"M([\d.]+)", mark.get("d"))[1]) == pytest.approx(xs[2], abs=0.06)


@pytest.mark.parametrize(
    "values", [[], [None, None], [2.0], [5.0, 5.0, 5.0], [0.0, 0.0], [1e-12, 1e-12], [1e9, 1e9 + 1]]
)
def test_degenerate_lines_still_draw(values):
    line = CurveLine("flat", list(range(len(values))), values, look="marked")
    text = str(line_chart(Panel("", [line], "x"), "a"))
    parsed(text)
    assert "nan" not in text and "inf" not in text


def test_a_page_can_hold_several_charts():
    """What matplotlib would leave to a file of its own is gone: fonts, styles for the whole page,
    and names that two charts share. Words keep their spaces, quotes and decimals."""
    lines = [
        CurveLine("a", [0, 1, 2], [0.1, 0.2, 0.3], style, [(0.0, 0.4)] * 3, "marked")
        for style in range(7)
    ]
    word = 'drift, 1 < 2 & "so" 0.123456'
    drawings = [str(line_chart(Panel("", lines), alt, [(1, word), (9, word)])) for alt in "ab"]
    ids = [each for chart in drawings for each in re.findall(r' id="([^"]*)"', chart)]
    assert len(ids) == len({*ids}) > 0
    assert {each for chart in drawings for each in re.findall('href="#([^"]*)"', chart)} == {*ids}
    for text in [*drawings, str(key_mark(1)), str(key_mark(0, "range"))]:
        assert not re.search(
            r"font|<style|<g|clip|rotate|#[0-9a-f]{6}\b",
            re.sub('href="[^"]*"| id="[^"]*"', "", text),
        )
    assert [
        mark.find("title").text
        for mark in parsed(drawings[0]).iter("path")
        if mark.get("class") == "alarm"
    ] == [word]


def test_thinning_keeps_means(monkeypatch):
    nan = math.nan
    monkeypatch.setattr(charts, "POINTS", 5)
    x, y = thin(list(range(10)), [0.0, 2.0, nan, 5.0, nan, nan, 1.0, 1.0, 9.0, 9.0])
    assert x == [0.5, 2.5, 4.5, 6.5, 8.5] and y == pytest.approx(
        [1.0, 5.0, nan, 1.0, 9.0], nan_ok=True
    )
    assert thin([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


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
    for name, least in {
        "ink": 4.5,
        "soft": 4.5,
        "up": 4.5,
        "down": 4.5,
        **{f"c{i}": 3.0 for i in range(6)},
    }.items():
        high, low = sorted((luminance(colours[name]), paper), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= least, (name, colours[name])


def test_charts_are_drawn_in_the_colours_of_the_page():
    light = dict(
        re.findall(
            r"--(\w+): (#[0-9a-f]{6})", re.findall(r":root \{(.*?)\}", CSS, flags=re.DOTALL)[0]
        )
    )
    assert {name: light[name] for name in VARIABLES.values()} == {
        name: colour for colour, name in VARIABLES.items()
    }
