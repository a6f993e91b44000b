"""The examples run as a reader would run them, and do what they say."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_gaussian_reaches_the_grey_that_is_wanted(tmp_path, monkeypatch, capsys):
    picture = tmp_path / "gaussian.png"
    monkeypatch.setattr(sys, "argv", ["gaussian.py", str(picture)])
    monkeypatch.setenv("MPLBACKEND", "agg")
    runpy.run_path(str(EXAMPLES / "gaussian.py"), run_name="__main__")
    said = capsys.readouterr().out
    reached, wanted = map(float, re.search(r"-> (.+); the grey that is wanted lies at (.+)", said).groups())
    assert reached == pytest.approx(wanted, abs=0.1)  # it began 2.1 away
    assert picture.stat().st_size > 10_000
