"""Runs whose length follows from a time."""

import time

import pytest

from g2rpo.core.errors import UserError
from g2rpo.runs.lifecycle import claim, read_config
from g2rpo.training.pace import LOOKS, fitted, seconds_in
from tests.support.runs import config, trainer


@pytest.mark.parametrize("left", [1000.0, 800.0, 390.0])
def test_as_many_iterations_as_fit_beside_the_evaluations(left):
    """Ten seconds an iteration, thirty an evaluation; a first iteration that compiles does not count."""
    found = fitted(config(), [100.0, 10.0, 10.0], 30.0, left, first=True)
    total, every = found.trainer.iterations, found.evaluation.every
    assert 10 * (total - 3) + 30 * LOOKS <= left < 10 * (total + 1 - 3) + 30 * LOOKS and every == -(-total // LOOKS)


def test_later_fits_keep_the_evaluations_where_they_are_and_what_is_done():
    before = fitted(config(), [10.0] * 3, 30.0, 1000.0, first=True)
    slower = fitted(before, [10.0, *[20.0] * 3], 30.0, 900.0, first=False)
    assert slower.trainer.iterations < before.trainer.iterations and slower.evaluation.every == before.evaluation.every
    assert fitted(before, [10.0] * 9, 30.0, -5.0, first=False).trainer.iterations == 9


def test_a_run_ends_by_itself_and_its_config_says_with_how_many_iterations(tmp_path):
    t = trainer(tmp_path / "run", "trainer.iterations=1000", "evaluation.every=1000")
    claim(tmp_path / "run", t.config)
    t.ends_at = time.monotonic() + 2
    list(t.train())
    assert 3 <= t.iteration == t.config.trainer.iterations < 1000
    assert read_config(tmp_path / "run").trainer.iterations == t.iteration and t.final is not None
    assert t.finish()["bright"].count == len(t.heldout)


@pytest.mark.parametrize(("text", "seconds"), [("45s", 45), ("90m", 5400), ("1.5h", 5400)])
def test_times_are_read(text, seconds):
    assert seconds_in(text) == seconds


@pytest.mark.parametrize("text", ["3", "h", "-3h", "0s", "3 days", "nan"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UserError, match="--within .*90m"):
        seconds_in(text)
