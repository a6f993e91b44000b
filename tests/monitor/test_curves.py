"""curves.png: a panel for each reward, a band for what is known, and no hole."""

import itertools
import math

import pytest
from PIL import Image

from g2rpo.monitor.curves import BESIDE, LEFT, RIGHT, curves, save_figure


def rows(count, errors=True):
    names = [f"reward{i}" for i in range(count)]
    out = []
    for iteration in (0, 5, 10):
        scores = {f"reward/{name}": float(i + iteration) for i, name in enumerate(names)}
        spread = {f"stderr/{name}": 0.1 * iteration for name in names} if errors else {}
        out.append({"kind": "eval", "iteration": iteration, **scores, **spread})
        out.append({"kind": "train", "iteration": iteration + 1, "reward/reward0": 1.0})
    return out


@pytest.mark.parametrize(("count", "rows_of"), [(1, [1]), (4, [2, 2]), (5, [3, 2]), (7, [3, 2, 2])])
def test_panels_fill_the_picture(count, rows_of):
    figure = curves(rows(count), ["reward0"], 40)
    boxes = [axis.get_position() for axis in figure.axes]
    wide = figure.get_figwidth()
    lines = [list(own) for _, own in itertools.groupby(boxes, lambda box: round(box.y1, 6))]
    assert [len(own) for own in lines] == rows_of
    for own in lines:  # from edge to edge, none drawn over another
        assert (own[0].x0 * wide, (1 - own[-1].x1) * wide) == pytest.approx((LEFT, RIGHT))
        assert [(b.x0 - a.x1) * wide for a, b in itertools.pairwise(own)] == pytest.approx(
            [BESIDE] * (len(own) - 1)
        )
    assert all(above[0].y0 > below[0].y1 for above, below in itertools.pairwise(lines))


def test_bands_are_95_percent_intervals_of_the_change():
    """Of 16 prompts: the quantile of Student's t with 15 degrees of freedom is 2.1314495."""
    axis = curves(rows(2), ["reward0"], 16).axes[1]
    band, points = axis.collections
    corners = {(float(x), round(float(y), 6)) for x, y in band.get_paths()[0].vertices}
    assert {(10.0, round(11 + side * 2.1314495 * 1.0, 6)) for side in (-1, 1)} <= corners
    assert (0.0, 1.0) in corners  # the base has not changed
    assert [list(point) for point in points.get_offsets()] == [[0, 1], [5, 6], [10, 11]]
    assert axis.get_title(loc="left") == "reward1 (judged only)" and len(axis.lines) == 1
    assert len(curves(rows(2), ["reward0"], 16).axes[0].lines) == 2  # training batches behind


def test_runs_without_errors_or_scores_are_drawn(tmp_path):
    for logged in (
        rows(1, errors=False),
        [],
        [{"kind": "eval", "iteration": 0, "reward/a": None, "stderr/a": math.nan}],
    ):
        save_figure(tmp_path / "curves.png", curves(logged, [], 4))
        with Image.open(tmp_path / "curves.png") as picture:
            assert picture.width > 100
