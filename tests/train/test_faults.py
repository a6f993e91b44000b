"""What a run does when something breaks: each fault is made to happen, and the run afterwards is
the one without it."""

import errno
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.distributed_c10d import _set_pg_timeout

import g2rpo.train.run.checkpoint
from g2rpo.core.errors import RewardFailed, Stopped
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.train import listeners
from g2rpo.train.run.checkpoint import checkpoints
from tests.support import ranks
from tests.support.commands import small_files
from tests.support.runs import ADVANTAGES, brightness, log, mean, resumed, smooth, trainer
from tests.support.tolerances import adam, reordered
from tests.support.variants import few
from tests.support.waiting import PATIENCE_S

LONG = (
    "trainer.iterations=10",
    "trainer.checkpoint_every=1",
    "trainer.prompts_per_iteration=4",
    "evaluation.every=3",
)


def go_on(world, folder, fault=lambda t: None, policy=None):
    """Begins or resumes a run and brings it to its end; `fault` is called with the trainer whenever
    pictures are scored."""

    def reward(images, prompts):
        fault(t)
        return brightness(images, prompts)

    t = smooth(trainer(folder, *LONG, rewards={"bright": reward}, policy=policy, world=world))
    t.policy.trainer = t
    t.resume()
    list(t.train())
    if world.is_main:
        save_file({"mean": mean(t)}, folder / "final.safetensors")


def dies(folder, *arguments):
    """Runs a function that takes (world, folder, ...) in a process that SIGKILL ends; False if it
    comes to its end instead."""
    (victim,) = ranks.start(1, arguments[0], folder, *arguments[1:])
    victim.join()
    return victim.exitcode == -signal.SIGKILL


def final(folder):
    return load_file(folder / "final.safetensors")["mean"]


def same(folder, other):
    """Whether two finished runs have the same weights and the same log, bit for bit, but for what
    took how long."""
    return torch.equal(final(folder), final(other)) and log(folder) == log(other)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """Finished runs without a fault, by number of ranks."""
    folders = {size: tmp_path_factory.mktemp(f"untouched{size}") for size in (1, 2)}
    for size, folder in folders.items():
        ranks.run(size, go_on, folder)
    return folders


# --- processes that are killed


def dies_at(world, folder, moment):
    """`go_on`, but SIGKILL comes when the run touches its directory for the moment-th time: opens,
    renames or removes there."""
    touches = count(1)

    def touched(event, arguments):
        here = event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
        if here and str(arguments[0]).startswith(str(folder)) and next(touches) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(touched)
    go_on(world, folder)


def test_a_run_killed_at_random_moments_is_the_run_that_was_not(tmp_path, untouched):
    """Four kills, each at a random one of the next 60 touches of the disk (a whole run makes 188);
    not a bit differs."""
    moments = random.Random(0)
    for _ in range(4):
        assert dies(tmp_path, dies_at, moments.randint(1, 60))
    ranks.run(1, go_on, tmp_path)
    assert same(tmp_path, untouched[1])
    assert not list((tmp_path / "checkpoints").glob(".unfinished*"))


MOMENTS = {
    "weights": (g2rpo.train.run.checkpoint, "save_file"),
    "moments": (torch, "save"),
    "manifest": (Path, "write_text"),
    "rename": (Path, "rename"),
    "rotation": (shutil, "rmtree"),
}


def dies_in_checkpoint(world, folder, moment):
    """Kills itself at one moment of writing the checkpoint of iteration 4, or before the oldest is
    removed."""
    place, name = MOMENTS[moment]
    function = getattr(place, name)

    def deadly(*arguments, **options):
        if (folder / "checkpoints" / "iteration_000003").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    setattr(place, name, deadly)
    go_on(world, folder)


@pytest.mark.parametrize("moment", few(MOMENTS, "manifest".__eq__))
def test_a_kill_within_a_checkpoint_loses_at_most_that_checkpoint(tmp_path, untouched, moment):
    assert dies(tmp_path, dies_in_checkpoint, moment)
    assert checkpoints(tmp_path / "checkpoints")[-1].name == "iteration_000003"
    ranks.run(1, go_on, tmp_path)
    assert same(tmp_path, untouched[1])


def saved_twice(folder):
    """A trainer after two iterations and their checkpoints."""
    t = trainer(folder, *LONG)
    for _ in range(2):
        t.iterate()
        t.save()
    return t


def test_a_checkpoint_that_finds_no_room_ends_the_run_and_leaves_the_one_before(tmp_path):
    t = saved_twice(tmp_path)
    t.iterate()
    full = r"iteration_000003: cannot be written \(.*File too large"
    with small_files(100), pytest.raises(Stopped, match=full):
        t.save()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["iteration_000001", "iteration_000002"]
    assert resumed(tmp_path, *LONG).iteration == 2


def test_a_checkpoint_that_the_disk_cannot_read_is_named_and_the_one_before_is_used(
    tmp_path, monkeypatch
):
    """A broken disk answers EIO to stat as well as to open."""
    saved_twice(tmp_path)

    def broken(method):
        def answered(path, *arguments, **options):
            if path.parent.name == "iteration_000002" and path.suffix == ".safetensors":
                raise OSError(errno.EIO, "Input/output error", str(path))
            return method(path, *arguments, **options)

        return answered

    for name in ("stat", "open"):
        monkeypatch.setattr(Path, name, broken(getattr(Path, name)))
    again = trainer(tmp_path, *LONG)
    complaint, *_ = again.resume()  # and the rows that nothing logged
    assert again.iteration == 1 and "iteration_000002: " in complaint
    assert "cannot be read (Input/output error); falling back to an older one" in complaint


# --- ranks


def breaks_in_iteration_3(world, folder, how):
    def fault(t):
        if t.iteration == 2 and how in ("hang", "freeze"):
            _set_pg_timeout(timedelta(seconds=3))  # of what is to come: the ranks have begun
        if world.rank == 1 and t.iteration == 2:
            if how == "raise":
                raise OSError("no space left")
            if how == "hang":
                time.sleep(1000)
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[how])

    go_on(world, folder, fault)


@pytest.mark.parametrize("how", few(["kill", "raise", "hang", "freeze"], "freeze".__eq__))
def test_when_a_rank_breaks_the_others_stop_and_say_why(tmp_path, untouched, how):
    """And the run goes on from its last checkpoint, bit for bit as if nothing had been."""
    launched = ranks.start(2, breaks_in_iteration_3, tmp_path, how)
    launched[0].join(PATIENCE_S)
    assert not launched[0].is_alive()
    launched[1].kill()
    left = ranks.finish(launched, tmp_path)
    reason = "another rank died, or did not answer within"
    if how == "raise":
        reason = "rank 1 stopped with RewardFailed: after iteration 2: .* OSError: no space left"
    assert re.search(f"^RankLost: rank 0 stops: {reason}", left[0]["error"])
    (tmp_path / "0.json").unlink()
    ranks.run(2, go_on, tmp_path)
    assert same(tmp_path, untouched[2])


@pytest.mark.parametrize(("before", "after"), few([(2, 1), (1, 2)], (2, 1).__eq__))
def test_a_run_resumes_on_another_number_of_ranks(tmp_path, untouched, before, after):
    """Up to float32 sums in another order, as in test_distributed. No row of the log is lost or
    doubled."""
    run = shutil.copytree(untouched[before], tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "iteration_000010")
    ranks.run(after, go_on, run)
    norm = max(row["grad_norm"] for row in log(run) if row["kind"] == "train")
    apart = reordered(144, 0.01)["atol"] + ADVANTAGES * norm
    allowed = adam(1000 * 0.05, updates=10, gradient=apart)
    torch.testing.assert_close(final(run), final(untouched[1]), **allowed)
    rows, straight = (
        [(row["kind"], row["iteration"]) for row in log(folder)] for folder in (run, untouched[1])
    )
    assert rows == straight


class Broken(GaussianPolicy):
    """Its training passes give no numbers once it is `broken`."""

    broken = False

    def velocity(self, x, sigma, cond):
        v = super().velocity(x, sigma, cond)
        return v * float("nan") if v.requires_grad and self.broken else v


@pytest.mark.slow  # two ranks
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(tmp_path):
    ranks.run(2, not_finite_on_rank_1, tmp_path)
    skipped = [row["skipped_updates"] for row in log(tmp_path) if row["kind"] == "train"]
    assert skipped == [0] * 2 + [1] * 8


# --- rewards and gradients


def raises(images):
    raise KeyError("no such word")


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (raises, r"KeyError: 'no such word' \(in raises, .*faults\.py:\d+: raise"),
        (lambda images: torch.zeros(len(images), 2), "should return .* scores"),
        (lambda images: "good", "failed on"),
    ],
)
def test_a_reward_that_breaks_is_named_with_the_iteration_and_the_checkpoint_is_good(
    tmp_path, failure, said
):
    def reward(images, prompts):
        return brightness(images, prompts) if t.iteration < 2 else failure(images)

    t = trainer(tmp_path, *LONG, "evaluation.every=100", rewards={"bright": reward})
    with pytest.raises(RewardFailed, match=f"after iteration 2: reward 'bright' .*{said}"):
        list(t.train())
    if failure is raises:
        assert "Traceback" in (tmp_path / "traceback_rank0.txt").read_text()
    again = trainer(tmp_path, *LONG)
    assert again.resume() == [] and again.iteration == 2


def test_scores_that_are_no_numbers_teach_nothing_and_are_counted():
    def sometimes(images, prompts):
        scores = brightness(images, prompts)
        scores[::4], scores[1::4] = torch.nan, torch.inf
        return scores

    t = trainer(None, rewards={"bright": sometimes})
    looked = t.evaluate()  # on three prompts
    assert looked["scored/bright"] == 1 and "scored/dark" not in looked
    row = t.iterate()
    assert (row["missing_scores"], row["skipped_updates"]) == (0.5, 0)
    assert math.isfinite(row["loss"])


def test_a_reward_without_any_score_ends_the_run_after_a_while(monkeypatch):
    """As an HTTP reward is once its server has gone for good. Two bad iterations in a row do no
    harm."""
    monkeypatch.setattr(listeners, "UNSCORED", 3)

    def reward(images, prompts):
        scores = brightness(images, prompts)
        return scores * torch.nan if t.iteration in {1, 2, 4, 5, 6} else scores

    def never(images, prompts):
        return torch.full([len(prompts)], torch.nan)

    rewards = {"bright": reward, "spare": never}  # which is logged alone
    t = trainer(None, *LONG, "evaluation.every=100", "rewards.spare.weight=0", rewards=rewards)
    said = "iteration 7: reward 'bright' gave no score at all in 3 iterations in a row"
    with pytest.raises(Stopped, match=said):
        list(t.train())


def test_iterations_without_any_score_count_over_starts(tmp_path, monkeypatch):
    """Of a job that is requeued after every few."""
    monkeypatch.setattr(listeners, "UNSCORED", 3)

    def reward(images, prompts):
        scores = brightness(images, prompts)
        return scores * torch.nan if t.iteration else scores

    how = [*LONG, "evaluation.every=100", "trainer.checkpoint_every=1"]
    t = trainer(tmp_path, *how, rewards={"bright": reward})
    rows = t.train()
    while t.iteration < 3:
        next(rows)
    rows.close()
    t = resumed(tmp_path, *how, rewards={"bright": reward})
    assert t.iteration == 2
    with pytest.raises(Stopped, match="iteration 4: reward 'bright' gave no score at all in 3"):
        list(t.train())


def test_gradients_that_stay_non_finite_end_the_run_with_the_last_good_weights(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(listeners, "SKIPPED", 2)
    t = trainer(tmp_path, *LONG, "trainer.checkpoint_every=100", policy=Broken())
    rows = t.train()
    while t.iteration < 2:
        next(rows)
    t.policy.broken, good = True, mean(t)
    said = "iteration 4: the gradient was not finite in 2 updates in a row"
    with pytest.raises(Stopped, match=said):
        list(rows)
    again = resumed(tmp_path, *LONG)
    assert again.iteration == 4 and torch.equal(again.policy.mean, good)
    norms = [row["grad_norm"] for row in log(tmp_path) if row["kind"] == "train"]
    assert min(norms[:2]) > 0 and norms[2:] == [None, None]


def not_finite_on_rank_1(world, folder):
    def fault(t):
        t.policy.broken = world.rank == 1 and t.iteration >= 2

    go_on(world, folder, fault, policy=Broken())
