"""Trackers: what they are shown, that a resumed run is shown once, and that none of them can harm a
run."""

import importlib.util
import json
import sys
import threading
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from g2rpo.config.resolve import resolve
from g2rpo.core.errors import UserError
from g2rpo.monitor.trackers import BACKLOG, Feed, build_trackers, check_trackers, scalars
from g2rpo.run.run import Run
from tests.support.commands import done, g2rpo
from tests.support.runs import PLAIN, cut, resumed, trainer

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
def library(tmp_path_factory, monkeypatch):
    """Installs a stand-in under a library's name; returns a function that reads what it was
    told."""

    def install(name, logged_in=True):
        folder = tmp_path_factory.mktemp("library")
        (folder / f"{name}.py").write_text(
            STAND_IN.replace("LOGGED_IN = True", f"LOGGED_IN = {logged_in}")
        )
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, name, raising=False)
        path = folder / "calls.jsonl"
        return lambda kind: (
            [call[1:] for call in map(json.loads, path.open()) if call[0] == kind]
            if path.exists()
            else []
        )

    return install


def cut_short(run_dir: Path, *overrides: str, **more) -> None:
    """A run of four iterations that is killed in the third, after the checkpoint of the second, and
    resumed."""
    run_dir.mkdir()
    cut(trainer(run_dir, *overrides, **more), "train", 3)
    list(resumed(run_dir, *overrides, **more).train())


def test_tensorboard_shows_every_number_and_picture_once_though_the_run_was_cut_short(tmp_path):
    run = tmp_path / "run"
    cut_short(run)
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    shown = {(tag, e.step, e.value) for tag in board.Tags()["scalars"] for e in board.Scalars(tag)}
    logged = {
        (name, row["iteration"], value)
        for row in Run(run).read_log()
        for name, value in scalars(finite(row)).items()
    }
    assert {(tag, step) for tag, step, _ in shown} == {(name, step) for name, step, _ in logged}
    assert [e.step for e in board.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [e.step for e in board.Images("eval/samples")] == [0, 2, 4]
    last = board.Images("eval/samples")[-1]
    assert (
        last.encoded_image_string == (path := run / "samples" / "iteration_000004.png").read_bytes()
    )
    assert (last.width, last.height) == Image.open(path).size
    losses = {
        row["iteration"]: row["loss"] for row in Run(run).read_log() if row["kind"] == "train"
    }
    # float32 there
    assert {e.step: e.value for e in board.Scalars("train/loss")} == pytest.approx(losses, rel=1e-6)


def finite(row):
    return {key: value for key, value in row.items() if value is not None}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_hosted_run_gets_every_row_once_in_one_run_of_its_own(tmp_path, library, name):
    calls = library(name)
    cut_short(tmp_path / "run", trackers=build_trackers([name]))
    first, second = (options for (options,) in calls("init"))
    known_by = "id" if name == "wandb" else "name"
    assert first[known_by] == second[known_by] and first["resume"] == second["resume"] == "allow"
    assert (first["project"], first["config"]["optim"]["learning_rate"]) == ("g2rpo", 0.05)
    sent = [
        (values.pop("iteration") if name == "wandb" else step, values)
        for values, step in calls("log")
    ]
    kept = [(row["iteration"], scalars(finite(row))) for row in Run(tmp_path / "run").read_log()]
    assert [(step, {v.partition("/")[0] for v in values}) for step, values in sent] == [
        (step, {v.partition("/")[0] for v in values}) for step, values in kept
    ]  # eval 0, train 1, train 2, eval 2, train 3 (before the kill), train 4, eval 4
    for (step, values), (_, numbers) in zip(sent, kept, strict=True):
        picture = values.pop("eval/samples", None)
        assert picture == (
            f"picture iteration_{step:06d}.png, True" if "eval/reward/bright" in values else None
        )
        steady = {key for key in numbers if "seconds" not in key}
        assert values.keys() == numbers.keys() and all(
            values[key] == numbers[key] for key in steady
        )
    endings = calls("finish")
    assert endings == (
        [[{"exit_code": 1}], [{"exit_code": 0}]] if name == "wandb" else [[{}], [{}]]
    )


def test_who_is_not_logged_in_is_told_once_and_trains_on(tmp_path, library):
    calls, told = library("wandb", logged_in=False), []
    t = trainer(tmp_path, trackers=build_trackers(["wandb", "tensorboard"]), notify=told.append)
    assert list(t.train())[-1]["iteration"] == 4
    (message,) = [line for line in told if line.startswith("tracker")]
    assert message.startswith(
        "tracker wandb failed (RuntimeError: not logged in; run `wandb login`"
    ) and not calls("init")
    assert (
        EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")[-1].step == 4
    )


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
    def log(self, row, pictures):
        self.rows.append(row["iteration"])
        raise ConnectionError("no network")


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


def test_a_tracker_that_breaks_is_named_once_and_asked_no_more(tmp_path):
    told, broken, fine = [], Broken(), Deaf()
    fine.released.set()
    feed = Feed([broken, fine], tmp_path, 0, {}, told.append)
    for iteration in range(5):
        feed.log(row(iteration), {})
    feed.__exit__(KeyError, KeyError("the run breaks too"), None)
    assert told == [
        "tracker Broken failed (ConnectionError: no network); the run goes on without it"
    ]
    assert broken.rows == [0] and fine.rows == [0, 1, 2, 3, 4, False]


def test_trackers_are_named_in_the_config_and_may_change_when_a_run_goes_on(
    capsys, tmp_path, tiny_config, library
):
    assert (
        resolve(PLAIN, ["trackers=trackio"]).trackers == ["trackio"]
        and resolve(PLAIN, ["trackers=[]"]).trackers == []
    )
    with pytest.raises(UserError, match=r"unknown tracker 'wandbb'.*wandb"):
        check_trackers(resolve(PLAIN, ["trackers=wandbb"]).trackers)
    run, more = tmp_path / "run", ["trainer.iterations=3", "trackers=[trackio]", "--resume"]
    assert (
        g2rpo(capsys, "train", tiny_config, "trackers=[]", "--run-dir", run)[0] == 0
        and not (run / "tensorboard").exists()
    )
    calls = library("trackio")
    done(capsys, "train", tiny_config, *more, "--run-dir", run)
    assert [step for _, step in calls("log")] == [3, 3]


def test_a_library_that_is_not_installed_is_wrong_input(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match="trackers: trackio is not installed; `pip install trackio`"
    ):
        check_trackers(["trackio"])
