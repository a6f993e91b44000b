"""Charts: geometry by hand, markup that a page can hold, and colours that can be told from the
paper."""

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
    line_chart,
    thin,
)
from g2rpo.train.monitor.curves import CurveLine, Panel
from tests.support.tables import rows

CSS = (files("g2rpo.lab.report") / "templates" / "style.css").read_text("utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
    for block in re.findall(r":root \{(.*?)\}", CSS, flags=re.DOTALL)
)


NUMBERS = """
0.83744 -> 0.8374
12345.6 -> 12,346
-0.5 -> −0.5
1.5e-5 -> 1.5e-5
nan -> –
"""


@pytest.mark.parametrize(("value", "text"), rows(NUMBERS))
def test_compact_numbers(value, text):
    assert compact(float(value)) == text


def parsed(svg):
    return ElementTree.fromstring(str(svg).replace("xlink:href", "href"))


def alarms(svg):
    return [path for path in svg.iter("path") if path.get("class") == "alarm"]


def test_a_line_goes_where_its_numbers_say():
    """Four points of a straight line are equally spaced; the cut at None starts a new stroke. A
    mark stands at its x. Two decimals of a pixel are written, of a mark one."""
    panel = Panel("", [CurveLine("a", [0, 1, 2, 3, 4], [0.0, 1.0, None, 3.0, 4.0])], "iteration")
    svg = parsed(line_chart(panel, "rising", [(3, "an alarm"), (9, "out of range")]))
    styles = [(path.get("style", ""), path.get("d")) for path in svg.iter("path")]
    (path,) = [points for style, points in styles if "stroke-width: 1.6;" in style]
    assert re.findall("[ML]", path) == ["M", "L", "M", "L"]
    points = re.findall(r"([\d.]+) ([\d.]+)", path)
    xs, ys = ([float(point[axis]) for point in points] for axis in (0, 1))
    assert xs[1] - xs[0] == pytest.approx((xs[-1] - xs[0]) / 4, abs=0.011)
    assert ys[0] - ys[1] == pytest.approx((ys[0] - ys[-1]) / 4, abs=0.011)
    assert 0 <= xs[0] < xs[-1] < RIGHT < WIDTH and 0 <= ys[-1] < ys[0] <= HEIGHT
    (mark,) = alarms(svg)
    at = float(re.match(r"M([\d.]+)", mark.get("d"))[1])
    assert at == pytest.approx(xs[2], abs=0.06)


@pytest.mark.parametrize(
    "values", ["", "nan nan", "2", "5 5 5", "0 0", "1e-12 1e-12", "1000000000 1000000001"]
)
def test_degenerate_lines_still_draw(values):
    y = [*map(float, values.split())]
    line = CurveLine("flat", list(range(len(y))), y, look="marked")
    text = str(line_chart(Panel("", [line], "x"), "a"))
    parsed(text)
    assert "nan" not in text and "inf" not in text


def test_thinning_keeps_means(monkeypatch):
    nan = math.nan
    monkeypatch.setattr(charts, "POINTS", 5)
    x, y = thin(list(range(10)), [0.0, 2.0, nan, 5.0, nan, nan, 1.0, 1.0, 9.0, 9.0])
    assert x == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert y == pytest.approx([1.0, 5.0, nan, 1.0, 9.0], nan_ok=True)
    assert thin([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


def test_charts_are_drawn_in_the_colours_of_the_page():
    assert {LIGHT[name]: name for name in VARIABLES.values()} == VARIABLES
