"""curves.png: a panel for each reward, and a band for what is known."""

import math

import pytest
from PIL import Image

from g2rpo.train.monitor.curves import curves, heldout_line, save_figure

LOG = [
    {"kind": kind, "iteration": at, "reward/a": at, "reward/b": 1.0 + at, "stderr/b": 0.1 * at}
    for at in (0, 5, 10)
    for kind in ("eval", "train")
]


def test_bands_are_95_percent_intervals_of_the_change():
    """Of 16 prompts: the quantile of Student's t with 15 degrees of freedom is 2.1314495."""
    trained, judged = curves(LOG, ["a"], 16).axes
    band, points = judged.collections
    corners = {(float(x), round(float(y), 6)) for x, y in band.get_paths()[0].vertices}
    assert {(10.0, round(11 + side * 2.1314495 * 1.0, 6)) for side in (-1, 1)} <= corners
    assert (0.0, 1.0) in corners  # the base has not changed
    assert [list(point) for point in points.get_offsets()] == [[0, 1], [5, 6], [10, 11]]
    assert judged.get_title(loc="left") == "b (judged only)" and len(judged.lines) == 1
    assert len(trained.lines) == 2  # training batches behind


def test_the_band_is_that_of_the_prompts_that_were_scored():
    rows = [
        {"iteration": 1, "reward/a": 0.0, "stderr/a": 1.0, "scored/a": count} for count in (7, 8)
    ]
    (none, some) = heldout_line("", rows, "a", 64).ends
    assert math.isnan(none[0]) and some[1] == pytest.approx(2.3646, abs=1e-4)  # t of 7 degrees


NOTHING = {"kind": "eval", "iteration": 0, "reward/a": None, "stderr/a": math.nan}


@pytest.mark.parametrize("logged", [[], [NOTHING]])
def test_runs_without_scores_are_drawn(tmp_path, logged):
    save_figure(tmp_path / "curves.png", curves(logged, [], 4))
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > 100
