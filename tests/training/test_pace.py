"""Runs whose length follows from a time."""

import itertools
import math
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from g2rpo.app.build import planned_for
from g2rpo.core.errors import UserError
from g2rpo.evaluation.work import work
from g2rpo.policies.embeddings import CachedEncoder, CachedPolicy, EmbeddingStore
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.run.run import Run
from g2rpo.runtime.distributed import World
from g2rpo.training.listeners import clock
from g2rpo.training.pace import (
    EVALUATED,
    EVALUATIONS,
    MEASURED,
    fitted_length,
    planned,
    seconds_in,
    with_length,
)
from g2rpo.training.ranks import divided
from tests.support.commands import refused
from tests.support.runs import brightness, config, cut, resumed, trainer


@pytest.mark.parametrize("left", [1000.0, 800.0, 390.0])
def test_as_many_iterations_as_fit_beside_the_evaluations(left):
    """Ten seconds an iteration, thirty an evaluation; a first iteration that compiles does not
    count."""
    c = config("trainer.iterations=100", "evaluation.every=10")
    found = fitted_length(c, 3, [100.0, 10.0, 10.0], 30.0, left, first=True)
    total = found.trainer.iterations
    for_training = left - 30 * EVALUATIONS
    assert 10 * (total - 3) <= for_training < 10 * (total + 1 - 3)
    assert found.evaluation.every == -(-total // EVALUATIONS)


@pytest.mark.parametrize(
    ("given", "save"),
    [(46, 0), (49, 0), (67, 0), (70, 0), (400, 0), (49, 5), (100, 5), (400, 5)],
)
def test_no_evaluation_begins_that_the_time_has_not_left_room_for(given, save):
    """A second an iteration, twenty an evaluation, the first of the base, and a checkpoint after
    every four. Fitted after iterations, before the evaluations and checkpoints that are due
    then."""
    c = config("trainer.iterations=30", "evaluation.every=10", "trainer.checkpoint_every=4")
    now, done, evaluated, fits = 20, 0, {0}, 0
    while done < c.trainer.iterations:
        now, done = now + 1, done + 1
        if done >= MEASURED:
            c = fitted_length(c, done, [1.0] * done, 20.0, given - now, first=not fits, save=save)
            fits += 1
        if done % c.evaluation.every == 0 or done == c.trainer.iterations:
            now += 20
            evaluated.add(done)
        if done % 4 == 0 or done == c.trainer.iterations:
            now += save
    assert given - 20 - save < now <= given and done in evaluated


@pytest.mark.parametrize("pairs", [0.0, 3.0])
@pytest.mark.parametrize("left", [60.0, 100.0, 1000.0, 1e6])
def test_evaluations_are_planned_to_take_their_share_of_the_time(left, pairs):
    """A second an iteration, .1 s a held-out prompt of 192, and `pairs` in every evaluation."""
    c = config("evaluation.num_prompts=192")
    found = planned(c, 1.0 / work(c, 0), 0.0, 0.1, 192, left, pairs)
    prompts, iterations = found.evaluation.num_prompts, found.trainer.iterations
    looks = 1 + math.ceil(iterations / found.evaluation.every)
    taken, of_a_prompt = looks * (0.1 * prompts + pairs), 0.1 * looks
    assert 16 <= prompts <= 192
    if prompts < 192:
        assert taken <= EVALUATED * left < taken + of_a_prompt
    assert left - 1 < iterations + taken <= left


def test_a_time_in_which_nothing_fits_is_refused_with_the_least():
    """With the 80 s that starting took, and 5 + 2 · 16 · .125 s of the least run, a tenth more;
    held-out pairs take their time with base and tuned model too."""
    c, row = config(), 5.0 / work(config(), 0)
    parts = "starting took 80 s, an iteration takes 5.0 s, and 16 prompts by base and tuned model 4"
    with pytest.raises(UserError, match=f"--within 88s: too short; give 98s or more, .*{parts}.0"):
        planned(c, row, 0.0, 0.125, 64, 8.0, spent=80.0)
    with pytest.raises(UserError, match="give 15s .* 16 prompts and held-out pairs by .* 8.0 s;"):
        planned(c, row, 0.0, 0.125, 64, 12.0, pairs=2.0)
    assert planned(c, row, 0.0, 0.125, 64, 98.0 - 80.0, spent=80.0).trainer.iterations >= 1


def test_a_time_that_is_too_short_leaves_the_folder_to_the_next_try(capsys, tmp_path, tiny_config):
    run = tmp_path / "run"
    assert "give" in refused(capsys, "train", tiny_config, "--within", "0.001s", "--run-dir", run)
    assert not run.exists()


@pytest.mark.parametrize(
    ("name", "pictures"), [("flow_grpo", 2 * 3), ("self_opd", 2 * 2 * 4), ("flow_dpo", 0)]
)
def test_the_pictures_of_an_iteration_are_those_that_are_scored(name, pictures):
    """Two prompts of three members; of two steps with the ODE's own picture; none from files."""
    own = "algorithm.group_size=3" if name != "flow_dpo" else "algorithm.times=1"
    c = config(f"algorithm.name={name}", own, "trainer.prompts_per_iteration=2")
    found = planned(c, 1.0 / work(c, 0), 1.0, 1e-9, 16, 1000.0).trainer.iterations
    assert found == 999 // (1 + pictures)


def test_a_run_ends_by_itself_and_its_config_says_with_how_many_iterations(tmp_path, monkeypatch):
    """As the clock that people and NTP set back and forth changes nothing: only the monotonic one
    decides."""
    hours = itertools.cycle([-1e5, 1e5, 0.0])
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + next(hours))
    often = ["evaluation.every=1000", "evaluation.every_minutes=60"]
    t = trainer(tmp_path, "trainer.iterations=1000", *often)
    Run(tmp_path).claim(t.config)
    t.clock.ends_at = time.monotonic() + 0.5
    evaluated = [row["iteration"] for row in t.train() if row["kind"] == "eval"]
    assert 1 <= t.iteration == t.config.trainer.iterations < 1000
    assert Run(tmp_path).read_config().trainer.iterations == t.iteration
    # of the first fit, and the last one; none by the clock's minutes
    assert (evaluated[0], evaluated[-1]) == (0, t.iteration)
    assert len(evaluated) <= 1 + EVALUATIONS + 1
    assert t.final is not None and t.finish()["bright"].count == len(t.heldout)


def test_prompts_of_a_longer_run_are_encoded_many_at_once(tmp_path, monkeypatch):
    """At its start those of the recipe's four iterations, and later those of all that fit."""
    monkeypatch.setattr(clock, "fitted_length", lambda config, *_, **__: with_length(config, 9, 9))
    working, alone = [False], []

    class Encoders(GaussianPolicy):
        @contextmanager
        def at_work(self):
            working[0] = True
            yield
            working[0] = False

        def encode(self, prompts):
            if not working[0]:
                alone.extend(prompts)
            return super().encode(prompts)

    store = EmbeddingStore(tmp_path / "store", {}, reserve=0)
    policy = CachedPolicy(GaussianPolicy(), CachedEncoder(Encoders(), store, notify=print))
    prompts = [str(number) for number in range(90)]
    t = trainer(None, "trainer.iterations=4", policy=policy, prompts=prompts)
    policy.encode_ahead(t.heldout)
    t.clock.ends_at = time.monotonic() + 1e6
    list(t.train())
    assert t.iteration == 9 and alone == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("90m", 5400), ("1.5h", 5400), ("3", None), ("-3h", None), ("nan", None)],
)
def test_times_are_read_or_refused(text, seconds):
    if seconds is not None:
        assert seconds_in(text) == seconds
    else:
        with pytest.raises(UserError, match="--within .*90m"):
            seconds_in(text)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_the_work_have_time_for_more_iterations(monkeypatch, size):
    """A clock that stands still but while a rank draws its held-out pictures; as many ranks as do
    an iteration's work."""
    now, prompts, pairs = [0.0], [str(number) for number in range(64)], 0
    c = config("trainer.prompts_per_iteration=4", "evaluation.num_prompts=64")
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(World, "broadcast_text", lambda self, text: text)

    def planned_of(world):
        def evaluate(first, on_rows, prompts, *, rewards):
            now[0] += 0.1 * len(world.shard_or_all(prompts))
            on_rows(1)

        parts = {"sampler": SimpleNamespace(num_steps=6), "judged_by": {}, "evaluate": evaluate}
        t = SimpleNamespace(config=c, heldout=prompts, world=world, rewards={"bright": brightness})
        t.held_out_pairs = [*range(32)] * pairs
        t.division, t.evaluator = divided(c, world), SimpleNamespace(**parts)
        return planned_for(t, 4000.0, now[0] + 4000.0).trainer.iterations

    alone, shared = planned_of(World(0, 1)), planned_of(World(0, size))
    assert shared == pytest.approx(size * alone, rel=0.05)
    pairs = 1
    assert planned_of(World(0, 1)) < alone


def test_a_run_that_is_resumed_without_time_left_is_evaluated(tmp_path):
    options = ["trainer.iterations=9", "evaluation.every=9", "trainer.checkpoint_every=2"]
    cut(trainer(tmp_path, *options), "train", 3)
    again = resumed(tmp_path, *options)
    again.clock.ends_at = time.monotonic() - 1
    assert [(row["kind"], row["iteration"]) for row in again.train()] == [("eval", 2)]
