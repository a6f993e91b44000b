"""`g2rpo resume`: a run goes on with its own config, and with what its names stood for when it
began."""

import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from g2rpo import api
from g2rpo.core.errors import UserError
from g2rpo.run.run import Run
from tests.support.commands import done, g2rpo, refused
from tests.support.processes import Forked
from tests.support.runs import trainer
from tests.support.variants import few
from tests.training.test_faults import log

REWARD = "def it(images, prompts):\n    return images.flatten(1).mean(1)\n"


@pytest.fixture
def begun(capsys, tmp_path, tiny_config):
    """A run of 2 iterations with overrides and a reward in a file; its directory and what began
    it."""
    (tmp_path / "reward.py").write_text(REWARD)
    reward = f"rewards.it={{kind: function, options: {{target: {tmp_path / 'reward.py'}:it}}}}"
    (tmp_path / "train.txt").write_text("a red circle\na blue square\n")
    command = [
        "train",
        "--plugin",
        tmp_path / "reward.py",
        tiny_config,
        "recipe=mine",
        "algorithm.group_size=4",
        "rewards=",
        reward,
    ]
    command += [f"prompts.train={tmp_path / 'train.txt'}", "--run-dir", tmp_path / "run"]
    done(capsys, *command)
    return tmp_path / "run", command


def test_a_run_goes_on_by_its_directory_alone(capsys, begun, tmp_path):
    run, command = begun
    out = done(capsys, "resume", run, "trainer.iterations=3", "sampling.batch_size=5")
    assert "resuming after iteration 2" in out
    assert (
        Run(run).read_config().algorithm.group_size == 4
        and Run(run).read_config().sampling.batch_size == 5
    )
    assert [start.iteration for start in Run(run).read_starts()] == [0, 2]
    done(capsys, *command[:-1], tmp_path / "straight", "trainer.iterations=3")
    one, two = (
        load_file(folder / "adapter" / "pytorch_lora_weights.safetensors")
        for folder in (run, tmp_path / "straight")
    )
    assert all(torch.allclose(one[name], two[name], atol=1e-6) for name in one)


@pytest.mark.parametrize("words", few([[], ["trainer.iterations=3"]], bool))
def test_the_longer_form_needs_no_recipe_and_no_override_again(capsys, begun, words):
    run, _ = begun
    done(capsys, "train", *words, "--run-dir", run, "--resume")
    assert len(Run(run).read_log()) == (7 if words else 5)


def test_a_recipes_name_needs_no_override_again_if_it_is_the_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    removed = "evaluation.rewards.scene_clip="
    few = [
        "trainer.iterations=1",
        "trainer.prompts_per_iteration=1",
        "evaluation.num_prompts=2",
        "algorithm.group_size=3",
    ]
    done(capsys, "train", "scenes", *few, removed, "--run-dir", "run")
    done(capsys, "train", "scenes", "--run-dir", "run", "--resume")
    err = refused(
        capsys, "train", "scenes", "algorithm.group_size=4", "--run-dir", "run", "--resume"
    )
    assert (
        "algorithm.group_size: 3 there, 4 here" in err
        and "`g2rpo resume run` continues that run" in err
    )
    assert "another config" in refused(
        capsys, "train", "scenes-fast", "--run-dir", "run", "--resume"
    )


def test_the_same_command_again_makes_of_a_killed_run_the_one_that_was_not(tiny_config, tmp_path):
    """What torchrun --max-restarts, Kubernetes and SkyPilot do. Bit for bit, with whatever was
    unfinished."""

    def start(run):
        words = [
            "train",
            str(tiny_config),
            "trainer.iterations=4",
            "--run-dir",
            str(run),
            "--resume=auto",
        ]
        with (tmp_path / "log.txt").open("ab") as out:
            return Forked([sys.executable, "-P", "-m", "g2rpo", *words], stdout=out, env={})

    def trained(run):
        return (
            len([row for row in Run(run).read_log() if row["kind"] == "train"])
            if (run / "metrics.jsonl").exists()
            else 0
        )

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait(200) == 0, (tmp_path / "log.txt").read_text()
    for iterations in (0, 2):  # before anything is trained, and between two iterations
        process, ends = start(killed), time.monotonic() + 200
        while not (killed / "config.yaml").exists() or trained(killed) < iterations:
            assert process.alive and time.monotonic() < ends, (tmp_path / "log.txt").read_text()
            time.sleep(0.01)
        process.kill()
        process.wait(30)
        assert trained(killed) < 4
    for _ in range(2):  # a finished run is left as it is
        assert start(killed).wait(200) == 0, (tmp_path / "log.txt").read_text()
        assert log(killed) == log(whole)
        for path in (whole / "adapter").glob("*.safetensors"):
            assert path.read_bytes() == (killed / "adapter" / path.name).read_bytes()


def test_messages_name_a_command_that_works(capsys, begun, tmp_path):
    run, command = begun
    for words, message in (
        (command, f"`g2rpo resume {run}` continues it"),
        (["resume", run, "algorithm.group_size=3"], "algorithm.group_size: 4 there, 3 here"),
        (["resume", tmp_path], "is no run directory"),
        (["train", "--run-dir", run], "`g2rpo resume RUN` continues a run"),
        (["train"], "name a recipe"),
    ):
        assert message in refused(capsys, *words)


# --- what names stand for


def test_reward_code_that_has_changed_is_refused_and_taken_on_purpose(capsys, begun, tmp_path):
    run, _ = begun
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (tmp_path / "reward.py").write_text(REWARD.replace("mean", "amax"))
    code, _, err = g2rpo(capsys, "resume", run, "trainer.iterations=3")
    assert code == 2 and "rewards.it: reward.py: sha256" in err and "--accept-changes" in err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    out = done(capsys, "resume", run, "trainer.iterations=3", "--accept-changes")
    assert "goes on with rewards.it: reward.py" in " ".join(out.split())
    done(capsys, "resume", run)  # what was accepted is what the run has now


def test_prompts_that_have_changed_are_refused_and_held_out_ones_for_good(capsys, begun, tmp_path):
    run, _ = begun
    (tmp_path / "train.txt").write_text("a red circle\n")
    err = refused(capsys, "resume", run)
    assert "prompts.train: 2 prompts, sha256" in err and "1 prompts, sha256" in err
    done(capsys, "resume", run, "--accept-changes")
    # held out; the same ones in another order
    (tmp_path / "prompts.txt").write_text("two blue squares\na red circle\n")
    err = refused(capsys, "resume", run, "--accept-changes")
    assert "evaluation.prompts: 2 prompts, sha256" in err and "begin another run" in err


def test_objects_are_known_by_their_source(tmp_path, tiny_config):
    def bright(images, prompts):
        return images.flatten(1).mean(1)

    first = bright

    def bright(images, prompts):
        return images.flatten(1).mean(1) * 2

    def made(reward, **more):
        return api.trainer(
            str(tiny_config), run_dir=tmp_path / "run", rewards={"bright": reward}, **more
        )

    made(first)
    assert made(first, resume=True).iteration == 0
    with pytest.raises(
        UserError, match=r"rewards\.bright: source of test_objects.*bright, sha256 \w+ then"
    ):
        made(bright, resume=True)
    said = []
    made(bright, resume=True, accept_changes=True, notify=said.append)
    assert "goes on with rewards.bright" in said[0]


# --- the log


@pytest.mark.parametrize("damage", ["deleted", "cut"])
def test_a_log_that_lacks_rows_is_named(tmp_path, damage):
    t = trainer(tmp_path)
    list(t.train())
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.unlink() if damage == "deleted" else path.write_text("".join(lines[:3]))
    again = trainer(tmp_path, "trainer.iterations=5")
    (complaint,) = again.resume()
    lacking = 5 if damage == "deleted" else 2
    assert f"metrics.jsonl: lacks {lacking} of the 5 rows up to iteration 4" in complaint
    list(again.train())
    assert log(tmp_path)[-1]["iteration"] == 5
