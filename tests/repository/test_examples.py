"""The examples run as a reader would run them, and do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_gaussian_reaches_the_grey_that_is_wanted(tmp_path):
    picture = tmp_path / "gaussian.png"
    command = [sys.executable, EXAMPLES / "gaussian.py", picture]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"MPLBACKEND": "agg", "HOME": str(tmp_path)})
    reached, wanted = map(float, re.search(r"-> (.+); the grey that is wanted lies at (.+)", done.stdout).groups())
    assert reached == pytest.approx(wanted, abs=0.1)  # it began 2.1 away
    assert picture.stat().st_size > 10_000
