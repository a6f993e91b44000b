"""`g2rpo resume`: a run goes on with its own config, and with what its names stood for when it
began."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from g2rpo import api
from g2rpo.config.read import load_config
from g2rpo.core import plugins
from g2rpo.core.errors import UserError
from g2rpo.core.files import LOCK
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.train import learner
from g2rpo.train.contents import contents_of
from g2rpo.train.found import find
from g2rpo.train.run.folder import Run
from tests.support.commands import adapter_of, done, ended, own_reward, refused, write_tiny
from tests.support.processes import Forked
from tests.support.runs import darkness, log, trainer
from tests.support.tolerances import adam, network
from tests.support.waiting import PATIENCE_S

TEXTS = {
    "reward.py": "def it(images, prompts):\n    return images.flatten(1).mean(1)\n",
    "train.txt": "a red circle\na blue square\n",
    "prompts.txt": "a red circle\ntwo blue squares\n",
}


@pytest.fixture(scope="module", autouse=True)
def epsilon():
    """Adam's, so large that weights may be compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "EPSILON", 1.0)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory, flux_directory):
    """A folder with a run of two iterations that has overrides and a reward in a file; and the
    words that began it."""
    folder = tmp_path_factory.mktemp("begun")
    reward = own_reward(folder / "reward.py", TEXTS["reward.py"])
    (folder / "train.txt").write_text(TEXTS["train.txt"])
    own = ["recipe=mine", "algorithm.group_size=4", f"prompts.train={folder / 'train.txt'}"]
    own += ["optim.learning_rate=1"]
    command = ["train", write_tiny(folder, flux_directory), *own, *reward]
    assert ended(*command, "--run-dir", folder / "run") == 0
    return folder, command


@pytest.fixture
def begun(tmp_path, finished):
    """The directory of a copy of that run as it was after its first iteration, and the folder of
    its reward, which may be imported, and of its prompts. A test may change all of it."""
    folder, _ = finished
    plugins.allow(str(folder / "reward.py"))
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    run = shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "iteration_000002")
    return run, folder


def test_a_run_goes_on_by_its_directory_alone(capsys, begun):
    """Up to the order of float32 additions, for the batches have another size. Scores of pictures
    differ by the network's rounding, and advantages, both mean and deviation, by twice as much over
    the spread of a group."""
    run, folder = begun
    assert "resuming after iteration 1" in done(capsys, "resume", run, "sampling.batch_size=5")
    config = Run(run).read_config()
    assert (config.algorithm.group_size, config.sampling.batch_size) == (4, 5)
    assert [start.iteration for start in Run(run).read_starts()] == [0, 1]
    row = [row for row in log(run) if row["kind"] == "train"][-1]
    apart = row["grad_norm"] * 2 * network(1.0)["atol"] / row["spread/it"]
    allowed = adam(1.0, updates=1, gradient=apart)
    one, two = adapter_of(run), adapter_of(folder / "run")
    torch.testing.assert_close(one, two, **allowed)
    assert max(float(two[name].abs().max()) for name in two if "lora_B" in name) > 0.01  # from 0


DEADLY = """
import os
from pathlib import Path

def it(images, prompts):
    calls = Path(__file__).with_name("calls")
    if calls.exists():
        calls.write_text(str(int(calls.read_text()) - 1))
        if calls.read_text() == "0":
            os.kill(os.getpid(), 9)
    return images.flatten(1).mean(1)
"""


def test_the_same_command_again_makes_of_a_killed_run_the_one_that_was_not(tiny_config, tmp_path):
    """What torchrun --max-restarts, Kubernetes and SkyPilot do. Bit for bit, with whatever was
    unfinished."""
    output, whole, killed = (tmp_path / name for name in ("log.txt", "whole", "killed"))
    reward = own_reward(tmp_path / "reward.py", DEADLY)

    def ended_with(run):
        words = ["train", tiny_config, "trainer.iterations=4", *reward, "--resume=auto"]
        command = [sys.executable, "-P", "-m", "g2rpo", *map(str, words), "--run-dir", str(run)]
        with output.open("ab") as out:
            return Forked(command, stdout=out, env={}).wait(PATIENCE_S)

    def trained():
        return sum(row["kind"] == "train" for row in Run(killed).read_log())

    assert ended_with(whole) == 0, output.read_text()
    # in the base's evaluation after the trial of the reward, and in iterations that follow
    for calls, iterations in ((2, 0), (5, 1), (4, 2)):
        (tmp_path / "calls").write_text(str(calls))
        assert ended_with(killed) == -9 and trained() == iterations, output.read_text()
    (tmp_path / "calls").unlink()
    for _ in range(2):  # a finished run is left as it is
        assert ended_with(killed) == 0, output.read_text()
        assert log(killed) == log(whole)
        weights = "adapter/pytorch_lora_weights.safetensors"
        assert (killed / weights).read_bytes() == (whole / weights).read_bytes()


def files_of(folder):
    """Their contents, but for the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    return {path: path.read_bytes() for path in files}


def only(run, *names):
    """Removes all but these files of a run, and its config."""
    kept = [run / name for name in ("config.yaml", "starts.jsonl", *names)]
    for path in sorted(run.rglob("*"), reverse=True):
        if path.is_file() and not any(map(path.is_relative_to, kept)):
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    assert len(files_of(run)) > 2 - (not names)


LEFT = """
adapter
checkpoints/best
export
results.json
scores
scores/iteration_000002.jsonl
samples
samples/before_after.png
samples/first_group.png
metrics.jsonl
"""
OF_BASE = ("baseline.safetensors", "scores/iteration_000000.jsonl", "samples/iteration_000000")


@pytest.mark.parametrize("left", LEFT.split())
@pytest.mark.parametrize("damaged", [False, True], ids=["deleted", "damaged"])
def test_what_training_made_is_never_overwritten(capsys, begun, finished, left, damaged):
    """Whatever is left of a run whose checkpoints were deleted to save room, or are damaged."""
    run, _ = begun
    for made in ("checkpoints/best", "export"):
        shutil.copytree(run / "adapter", run / made, dirs_exist_ok=True)
    only(run, left)
    if damaged:
        (run / "checkpoints/iteration_000001").mkdir(parents=True)
    before = files_of(run)
    named = left.split("/")[-1 if "best" in left else 0]
    said = "No usable checkpoint is left" if damaged else f"{named} of a run"
    for words in (
        ["resume", run],
        ["resume", run, "trainer.iterations=3"],
        [*finished[1], "--run-dir", run, "--resume"],
    ):
        assert said in refused(capsys, *words)
    del before[run / "config.yaml"]
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize("kept", [(), OF_BASE], ids=["config", "base"])
def test_a_run_of_which_nothing_was_trained_begins_again(capsys, begun, kept):
    run, folder = begun
    only(run, *kept)
    assert "nothing to resume: it begins" in done(capsys, "resume", run)
    one, two = adapter_of(run), adapter_of(folder / "run")
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_a_finished_run_says_so_and_how_it_goes_on(capsys, finished):
    """It is neither built nor compared again."""
    run = finished[0] / "run"
    plugins.allow(str(finished[0] / "reward.py"))
    before = files_of(run)
    out = " ".join(done(capsys, "resume", run).split())
    assert "run has finished: all 2 iterations are done" in out
    assert f"`g2rpo resume {run} trainer.iterations=4 --plugin {finished[0] / 'reward.py'}`" in out
    assert files_of(run).keys() == before.keys() and "building" not in out


def test_messages_name_a_command_that_works(capsys, begun, finished, tmp_path):
    run, _ = begun
    for words, message in (
        ([*finished[1], "--run-dir", run], f"`g2rpo resume {run}"),
        (["resume", run, "algorithm.group_size=3"], "algorithm.group_size: 4 there, 3 here"),
        (["resume", tmp_path], "is no run directory"),
        (["resume", finished[0] / "run", "trainer.iterations=1"], "trainer.iterations=2 ends it"),
        (["train", "--run-dir", run], "`g2rpo resume RUN` continues a run"),
        (["train"], "name a recipe"),
    ):
        assert message in refused(capsys, *words)


# --- what names stand for


def test_files_may_be_elsewhere_but_not_others(capsys, begun, tmp_path, flux_directory):
    """As on another machine: the model and the prompts have other paths."""
    run, folder = begun
    there = Path(shutil.copytree(flux_directory, tmp_path / "model"))
    moved = shutil.copy(folder / "train.txt", tmp_path / "moved.txt")
    words = ["resume", run, f"policy.path={there}", f"prompts.train={moved}"]
    before = (run / "config.yaml").read_bytes()
    (there / "more.txt").write_text("another model\n")
    err = refused(capsys, *words)
    assert "policy.path: " in err and "prompts.train" not in err
    assert (run / "config.yaml").read_bytes() == before
    (there / "more.txt").unlink()
    assert "resuming after iteration 1" in done(capsys, *words)


def test_what_has_changed_is_refused_and_taken_on_purpose(capsys, begun):
    """A reward's code and training prompts; held-out prompts, here in another order, for good."""
    run, folder = begun
    before = files_of(run)
    (folder / "reward.py").write_text(TEXTS["reward.py"].replace("mean", "amax"))
    (folder / "train.txt").write_text("a red circle\n")
    err = refused(capsys, "resume", run)
    assert "rewards.it: reward.py: sha256" in err and "--accept-changes" in err
    assert "prompts.train: 2 prompts, sha256" in err and "1 prompts, sha256" in err
    assert files_of(run) == before
    out = done(capsys, "resume", run, "--accept-changes")
    assert "goes on with rewards.it: reward.py" in " ".join(out.split())
    (folder / "prompts.txt").write_text("two blue squares\na red circle\n")
    err = refused(capsys, "resume", run, "--accept-changes")
    assert "evaluation.prompts: 2 prompts, sha256" in err and "begin another run" in err
    assert "rewards.it" not in err  # what was accepted is what the run has now


def test_code_counts_however_it_is_named(tmp_path, monkeypatch):
    """As rewards.NAME.kind and policy.kind, a file or a module."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("own_code.py").write_text(TEXTS["reward.py"])
    kinds = {"file": "own_code.py:it", "module": "own_code:it"}
    settings = [f"rewards.{name}.kind={kind}" for name, kind in kinds.items()]
    config = load_config("scenes", [*settings, "policy.kind=own_code.py:it"])
    found = contents_of(find(config))
    assert found["rewards.module"].startswith("source of it, sha256")
    assert found["rewards.file"] == found["policy.kind"]
    assert found["rewards.file"].startswith("own_code.py: sha256")
    Path("own_code.py").write_text(TEXTS["reward.py"].replace("mean", "amax"))
    changed = contents_of(find(config))
    assert changed["rewards.file"] == changed["policy.kind"] != found["rewards.file"]


def test_objects_are_known_by_their_source(tmp_path):
    parts = {"policy": GaussianPolicy(), "prompts": ["0", "0.1"], "heldout": ["0.2"]}
    parts |= {"judges": {"dark": darkness}, "run_dir": tmp_path / "run"}

    def made(reward, **more):
        return api.trainer("scenes", rewards={"bright": reward}, **parts, **more)

    def bright(images, prompts):
        return images.flatten(1).mean(1)

    made(bright)
    assert made(bright, resume=True).iteration == 0

    def bright(images, prompts):
        return images.flatten(1).mean(1) * 2

    changed = r"rewards\.bright: source of test_objects.*bright, sha256 \w+ then"
    with pytest.raises(UserError, match=changed):
        made(bright, resume=True)
    said = []
    made(bright, resume=True, accept_changes=True, notify=said.append)
    assert any("goes on with rewards.bright" in line for line in said)


# --- the log


def test_a_log_that_lacks_rows_is_named(tmp_path):
    list(trainer(tmp_path).train())
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    again = trainer(tmp_path, "trainer.iterations=5")
    (complaint,) = again.resume()
    assert "metrics.jsonl: lacks 2 of the 5 rows up to iteration 4" in complaint
    list(again.train())
    assert log(tmp_path)[-1]["iteration"] == 5
