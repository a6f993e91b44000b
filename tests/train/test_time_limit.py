"""`trainer.max_hours` stops a run in time for its last evaluation and checkpoint."""

import time
from types import SimpleNamespace

import pytest

from g2rpo.cli.options import max_hours
from g2rpo.core.errors import Preempted, UserError
from g2rpo.train.listeners import Ask, TimeLimit
from tests.support.runs import config, log, trainer

TRAINED = {"kind": "train", "seconds": 2.0, "iteration": 3}


def looked(iteration):
    return {"kind": "eval", "seconds": 5.0, "iteration": iteration}


@pytest.mark.parametrize(
    ("left", "rows", "asked"),
    [
        (8.1, [looked(0), TRAINED], Ask.NOTHING),
        (7.9, [looked(0), TRAINED], Ask.EVALUATE),
        (0.0, [TRAINED, looked(3)], Ask.LEAVE),
        (0.0, [looked(3)], Ask.NOTHING),  # a start that has trained nothing yet
    ],
)
def test_it_asks_while_an_iteration_an_evaluation_and_a_checkpoint_still_fit(
    monkeypatch, left, rows, asked
):
    """Two seconds, five and one, of an hour that began at 100."""
    monkeypatch.setattr(time, "monotonic", lambda: 100 + 3600 - left)
    run = SimpleNamespace(
        config=config("trainer.max_hours=1", "trainer.iterations=9"),
        iteration=3,
        alarms=SimpleNamespace(rows=rows),
        checkpoints=SimpleNamespace(seconds=1.0),
        began=100.0,
    )
    limit = TimeLimit(run)
    for row in rows:
        limit.hear(row, None)
    assert limit.asks() == asked


def test_a_run_without_time_trains_once_is_evaluated_and_saved_and_goes_on(tmp_path):
    """Every start trains at least one iteration, so that restarts come to an end."""
    options = ("trainer.iterations=3", "trainer.max_hours=1e-9", "evaluation.every=9")
    for done in (1, 2):
        t = trainer(tmp_path, *options)
        t.resume()
        with pytest.raises(Preempted, match=f"after iteration {done}, as asked"):
            list(t.train())
        looks = [row["iteration"] for row in log(tmp_path) if row["kind"] == "eval"]
        assert looks == [*range(done + 1)]
    t = trainer(tmp_path, *options)
    t.resume()
    assert [row["kind"] for row in t.train()] == ["train", "eval"] and t.iteration == 3


def test_times_are_read_or_refused():
    assert max_hours("36s") + max_hours("90m") == [
        "trainer.max_hours=0.01",
        "trainer.max_hours=1.5",
    ]
    for text in ("3", "-3h", "nan"):
        with pytest.raises(UserError, match="--within .*90m"):
            max_hours(text)
