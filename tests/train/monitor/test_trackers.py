"""Trackers: what they are shown, that a resumed run is shown once, and that none of them can harm a
run."""

import importlib.util
import json
import re
import sys
import threading
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from g2rpo.core import plugins
from g2rpo.core.errors import UserError
from g2rpo.train.consistency import complaints_of
from g2rpo.train.monitor.trackers import BACKLOG, Feed, build_trackers, faults_of_tracker, scalars
from g2rpo.train.run.folder import Run
from tests.support.runs import cut, resumed, trainer

STAND_IN = '''
"""The few functions of wandb (or trackio) that are used; what they are told is appended to calls.jsonl."""
import json
from pathlib import Path

CALLS = Path(__file__).parent / "calls.jsonl"


def told(*call):
    with CALLS.open("a") as file:
        file.write(json.dumps(call, default=str) + "\\n")


class Settings:
    def __init__(self, **values):
        self.mode = MODE
        self.__dict__.update(values)


class Image:
    def __init__(self, path):
        self.path = path

    def __str__(self):
        return f"picture {Path(self.path).name}, {Path(self.path).stat().st_size > 100}"


class Run:
    def log(self, values, step=None):
        told("log", values, step)

    def define_metric(self, *names, **options):
        told("define_metric", names, options)

    def finish(self, **options):
        told("finish", options)


MODE = "online"
setup = lambda: type("Setup", (), {"settings": Settings()})
login = lambda **options: LOGGED_IN
LOGGED_IN = True


def init(**options):
    told("init", {**options, "settings": None})
    return Run()
'''


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Installs a stand-in under a library's name; returns a function that reads what it was
    told."""

    def install(name, logged_in=True):
        folder = tmp_path / "library"
        folder.mkdir()
        source = STAND_IN.replace("LOGGED_IN = True", f"LOGGED_IN = {logged_in}")
        (folder / f"{name}.py").write_text(source)
        (folder / "calls.jsonl").touch()
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setitem(sys.modules, name, None)  # so that it is taken back
        del sys.modules[name]

        def calls(kind):
            told = map(json.loads, (folder / "calls.jsonl").open())
            return [call[1:] for call in told if call[0] == kind]

        return calls

    return install


def cut_short(run_dir: Path, **more) -> list[tuple[int, dict]]:
    """A run of four iterations that is killed in the third, after the checkpoint of the second, and
    resumed. Returns the iterations and numbers of its log."""
    cut(trainer(run_dir, **more), "train", 3)
    list(resumed(run_dir, **more).train())
    return [(row["iteration"], scalars(row)) for row in Run(run_dir).read_log()]


def test_tensorboard_shows_every_number_and_picture_once_though_the_run_was_cut_short(tmp_path):
    """As float32."""
    logged = cut_short(tmp_path)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = {(tag, each.step) for tag in board.Tags()["scalars"] for each in board.Scalars(tag)}
    assert shown == {(name, step) for step, numbers in logged for name in numbers}
    losses = [(step, row["train/loss"]) for step, row in logged if "train/loss" in row]
    found = board.Scalars("train/loss")
    assert [each.step for each in found] == [step for step, _ in losses] == [1, 2, 3, 4]
    assert [each.value for each in found] == pytest.approx([loss for _, loss in losses], rel=1e-6)
    pictures = {each.step: each.encoded_image_string for each in board.Images("eval/samples")}
    samples = tmp_path / "samples"
    assert pictures == {
        step: (samples / f"iteration_{step:06d}.png").read_bytes() for step in (0, 2, 4)
    }


@pytest.mark.parametrize(
    ("name", "known_by", "endings"),
    [("wandb", "id", [{"exit_code": 1}, {"exit_code": 0}]), ("trackio", "name", [{}, {}])],
)
def test_a_hosted_run_gets_every_row_once_in_one_run_of_its_own(
    tmp_path, library, name, known_by, endings
):
    """Eval 0, train 1, train 2, eval 2, train 3 (before the kill), train 4, eval 4."""
    calls = library(name)
    logged = cut_short(tmp_path / "run", trackers=build_trackers([name]))
    first, second = (options for (options,) in calls("init"))
    assert first[known_by] == second[known_by] and first["resume"] == second["resume"] == "allow"
    assert (first["project"], first["config"]["optim"]["learning_rate"]) == ("g2rpo", 0.05)
    for (values, step), (iteration, numbers) in zip(calls("log"), logged, strict=True):
        assert (values.pop("iteration") if name == "wandb" else step) == iteration
        drawn = f"picture iteration_{iteration:06d}.png, True"
        expected = {"eval/samples": drawn} if "eval/reward/bright" in numbers else {}
        steady = {key: value for key, value in numbers.items() if "seconds" not in key}
        assert values.items() >= (steady | expected).items()
        assert values.keys() == numbers.keys() | expected.keys()
    assert calls("finish") == [[ending] for ending in endings]


def test_who_is_not_logged_in_is_told_once_and_trains_on(tmp_path, library):
    calls, told = library("wandb", logged_in=False), []
    trackers = build_trackers(["wandb", "tensorboard"])
    t = trainer(tmp_path, trackers=trackers, notify=told.append)
    list(t.train())
    (message,) = [line for line in told if line.startswith("tracker")]
    assert "wandb failed (RuntimeError: not logged in; run `wandb login`" in message
    assert not calls("init")
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert board.Scalars("train/loss")[-1].step == 4


def test_a_library_that_is_not_known_or_not_installed_is_wrong_input(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, said in (
        ("trackio", "trackers: trackio is not installed; `pip install trackio`"),
        ("wandbb", r"unknown tracker 'wandbb'.*wandb"),
    ):
        (complaint,) = complaints_of(faults_of_tracker, name)
        assert re.search(said, complaint)


def test_a_class_that_is_no_tracker_is_refused_before_a_run(tmp_path):
    (tmp_path / "mine.py").write_text("class Mine:\n def log(self, row, pictures): ...\n")
    plugins.allow(str(tmp_path / "mine.py"))
    (complaint,) = faults_of_tracker(f"{tmp_path}/mine.py:Mine")
    assert "is no tracker, it lacks start, finish" in complaint


class Deaf:
    """Takes a row, and never another."""

    def __init__(self):
        self.released, self.rows = threading.Event(), []

    def start(self, run_dir, iteration, config):
        pass

    def log(self, row, pictures):
        self.rows.append(row["iteration"])
        self.released.wait()

    def finish(self, ok):
        self.rows.append(ok)


class Broken(Deaf):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def log(self, row, pictures):
        self.rows.append(row["iteration"])
        raise self.error


def row(iteration):
    return {"kind": "train", "iteration": iteration, "loss": 0.5}


def test_a_tracker_that_hangs_holds_nobody_up_and_is_named(tmp_path):
    told, deaf = [], Deaf()
    with Feed([deaf], tmp_path, 0, {}, told.append, patience=0.05) as feed:
        for iteration in range(3 * BACKLOG):
            feed.log(row(iteration), {})
    assert told == [
        f"tracker Deaf is {BACKLOG} rows behind; training does not wait for it",
        "tracker Deaf is not done after 0.05 s; it may lack rows, metrics.jsonl has them all",
    ]
    deaf.released.set()
    feed.lines[0].join()
    assert deaf.rows == [*range(3 * BACKLOG), True]


@pytest.mark.parametrize("error", [ConnectionError("no network"), SystemExit("no network")])
def test_a_tracker_that_breaks_is_named_once_and_asked_no_more(tmp_path, error):
    told, broken, fine = [], Broken(error), Deaf()
    fine.released.set()
    feed = Feed([broken, fine], tmp_path, 0, {}, told.append)
    for iteration in range(5):
        feed.log(row(iteration), {})
    feed.__exit__(KeyError, KeyError("the run breaks too"), None)
    kind = type(error).__name__
    assert told == [f"tracker Broken failed ({kind}: no network); the run goes on without it"]
    assert broken.rows == [0] and fine.rows == [0, 1, 2, 3, 4, False]


def test_no_tracker_is_begun_for_a_run_whose_log_is_damaged(tmp_path, monkeypatch):
    """It would never be told of an end."""
    (tmp_path / "metrics.jsonl").write_text("damaged\n")
    monkeypatch.setattr("g2rpo.train.listeners.Feed", pytest.fail)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1"):
        next(trainer(tmp_path).train())
