"""Runs whose length follows from a time."""

import itertools
import math
import time
from types import SimpleNamespace

import pytest

from g2rpo.app.build import planned_for
from g2rpo.core.errors import UserError
from g2rpo.evaluation.work import work
from g2rpo.run.run import Run
from g2rpo.runtime.distributed import World
from g2rpo.training.pace import EVALUATED, EVALUATIONS, fitted_length, planned, seconds_in
from g2rpo.training.ranks import divided
from tests.support.runs import config, cut, resumed, trainer


@pytest.mark.parametrize("left", [1000.0, 800.0, 390.0])
def test_as_many_iterations_as_fit_beside_the_evaluations(left):
    """Ten seconds an iteration, thirty an evaluation; a first iteration that compiles does not
    count."""
    found = fitted_length(
        config("trainer.iterations=100", "evaluation.every=10"),
        3,
        [100.0, 10.0, 10.0],
        30.0,
        left,
        first=True,
    )
    total, every = found.trainer.iterations, found.evaluation.every
    assert 10 * (total - 3) + 30 * EVALUATIONS <= left < 10 * (
        total + 1 - 3
    ) + 30 * EVALUATIONS and every == -(-total // EVALUATIONS)


@pytest.mark.parametrize("left", [60.0, 100.0, 1000.0, 1e6])
def test_evaluations_are_planned_to_take_their_share_of_the_time(left):
    """A second an iteration's evaluations, .1 s a held-out prompt of 192."""
    c = config("evaluation.num_prompts=192")
    row = 1.0 / work(c, 0)
    found = planned(c, row, 0.0, 0.1, 192, left)
    prompts, looks = (
        found.evaluation.num_prompts,
        1 + math.ceil(found.trainer.iterations / found.evaluation.every),
    )
    assert 16 <= prompts <= 192 and (
        prompts == 192 or prompts * 0.1 * looks <= EVALUATED * left < (prompts + 1) * 0.1 * looks
    )
    assert left - 1 < found.trainer.iterations + prompts * 0.1 * looks <= left


def test_a_time_in_which_nothing_fits_is_refused_with_the_least():
    c = config()
    with pytest.raises(UserError, match="at least 9 s: an iteration of 5.0 s, and 16 prompts"):
        planned(c, 5.0 / work(c, 0), 0.0, 0.125, 64, 8.0)


def test_a_run_ends_by_itself_and_its_config_says_with_how_many_iterations(tmp_path):
    t = trainer(tmp_path / "run", "trainer.iterations=1000", "evaluation.every=1000")
    Run(tmp_path / "run").claim(t.config)
    t.clock.ends_at = time.monotonic() + 2
    list(t.train())
    assert 1 <= t.iteration == t.config.trainer.iterations < 1000
    assert (
        Run(tmp_path / "run").read_config().trainer.iterations == t.iteration
        and t.final is not None
    )
    assert t.finish()["bright"].count == len(t.heldout)


def test_a_clock_that_is_set_back_and_forth_changes_nothing(monkeypatch):
    """As by NTP, a suspended machine or a person: only the monotonic clock decides."""
    hours = itertools.cycle([-1e5, 1e5, 0.0])
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + next(hours))
    t = trainer(
        None, "trainer.iterations=1000", "evaluation.every=1000", "evaluation.every_minutes=60"
    )
    began = time.monotonic()
    t.clock.ends_at = began + 2
    evaluated = [row["iteration"] for row in t.train() if row["kind"] == "eval"]
    assert (evaluated[0], evaluated[-1]) == (0, t.iteration) and 1 <= t.iteration < 1000
    # of the first fit, and the last one; none by the clock's minutes
    assert len(evaluated) <= 1 + EVALUATIONS + 1
    assert time.monotonic() - began < 20  # a loaded machine's iterations are slow


@pytest.mark.parametrize(("text", "seconds"), [("45s", 45), ("90m", 5400), ("1.5h", 5400)])
def test_times_are_read(text, seconds):
    assert seconds_in(text) == seconds


@pytest.mark.parametrize("text", ["3", "-3h", "nan"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UserError, match="--within .*90m"):
        seconds_in(text)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_the_work_have_time_for_more_iterations(monkeypatch, size):
    """A clock that stands still but while a rank draws its held-out pictures; as many ranks as do
    an iteration's work."""

    def planned_of(size):
        now = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        world = World(0, size)

        def evaluate(first, on_rows, prompts, *, rewards):
            now[0] += 0.1 * len(world.shard_or_all(prompts))
            on_rows(1)

        prompts = [str(number) for number in range(64)]
        t = trainer(
            None, "trainer.prompts_per_iteration=4", "evaluation.num_prompts=64", prompts=prompts
        )
        t = SimpleNamespace(config=t.config, heldout=prompts, rewards=t.rewards, world=world)
        t.division = divided(t.config, world)
        monkeypatch.setattr(World, "broadcast_text", lambda self, text: text)
        t.evaluator = SimpleNamespace(
            evaluate=evaluate, judged_by={}, sampler=SimpleNamespace(num_steps=6)
        )
        return planned_for(t, now[0] + 4000.0).trainer.iterations

    assert planned_of(size) == pytest.approx(size * planned_of(1), rel=0.05)


def test_a_run_whose_log_was_lost_goes_on_in_its_time():
    t = trainer(None, "trainer.iterations=4")
    t.iterate(), t.iterate()
    t.clock.ends_at = time.monotonic() + 60
    t.alarms.rows = []
    t.clock.fit()
    assert t.config.trainer.iterations == 4
    assert fitted_length(t.config, 2, [1.0], 1.0, 0.5, first=True).trainer.iterations == 2


def test_a_run_that_is_resumed_without_time_left_is_evaluated(tmp_path):
    t = trainer(
        tmp_path, "trainer.iterations=9", "evaluation.every=9", "trainer.checkpoint_every=5"
    )
    cut(t, "train", 6)
    again = resumed(
        tmp_path, "trainer.iterations=9", "evaluation.every=9", "trainer.checkpoint_every=5"
    )
    again.clock.ends_at = time.monotonic() - 1
    assert again.iteration == 5 and [(row["kind"], row["iteration"]) for row in again.train()] == [
        ("eval", 5)
    ]
