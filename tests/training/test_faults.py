"""What a run does when something breaks: each fault is made to happen, and the run afterwards is
the one without it."""

import errno
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import g2rpo.run.checkpoint
from g2rpo.core.errors import RewardFailed, Stopped
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.run.checkpoint import checkpoints
from g2rpo.training.listeners import early_stop
from tests.support import ranks
from tests.support.commands import small_files
from tests.support.runs import brightness, log, mean, resumed, trainer
from tests.support.variants import few

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

    t = trainer(folder, *LONG, rewards={"bright": reward}, policy=policy, world=world)
    t.policy.trainer = t
    t.resume()
    list(t.train())
    if world.is_main:
        save_file({"mean": mean(t)}, folder / "final.safetensors")


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
    left = moment

    def touched(event, arguments):
        nonlocal left
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and str(
            arguments[0]
        ).startswith(str(folder)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(touched)
    go_on(world, folder)


def test_a_run_killed_at_random_moments_is_the_run_that_was_not(tmp_path, untouched):
    """Up to 8 kills, each at a random one of the next 60 touches of the disk (a whole run makes
    188); not a bit differs."""
    moments, killed = random.Random(0), 0
    while killed < 8:
        (victim,) = ranks.start(1, dies_at, tmp_path, moments.randint(1, 60))
        victim.join()
        if victim.exitcode != -signal.SIGKILL:
            break
        killed += 1
    assert killed >= 3
    ranks.run(1, go_on, tmp_path)
    assert same(tmp_path, untouched[1])
    assert not list((tmp_path / "checkpoints").glob(".unfinished*"))


MOMENTS = {
    "weights": (g2rpo.run.checkpoint, "save_file"),
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


@pytest.mark.parametrize("moment", few(MOMENTS, ("manifest", "rotation").__contains__))
def test_a_kill_within_a_checkpoint_loses_at_most_that_checkpoint(tmp_path, untouched, moment):
    (victim,) = ranks.start(1, dies_in_checkpoint, tmp_path, moment)
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    assert checkpoints(tmp_path / "checkpoints")[-1].name == "iteration_000003"
    ranks.run(1, go_on, tmp_path)
    assert same(tmp_path, untouched[1])


def test_a_checkpoint_that_finds_no_room_ends_the_run_and_leaves_the_one_before(tmp_path):
    t = trainer(tmp_path, *LONG)
    t.iterate()
    t.save()
    t.iterate()
    with (
        small_files(100),
        pytest.raises(Stopped, match=r"iteration_000002: cannot be written \(.*File too large"),
    ):
        t.save()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["iteration_000001"]
    assert resumed(tmp_path, *LONG).iteration == 1


def test_a_checkpoint_that_the_disk_cannot_read_is_named_and_the_one_before_is_used(
    tmp_path, monkeypatch
):
    """A broken disk answers EIO to stat as well as to open."""
    t = trainer(tmp_path, *LONG)
    for _ in range(2):
        t.iterate()
        t.save()

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
        if world.rank == 1 and t.iteration == 2:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "hang":
                time.sleep(1000)
            if how == "raise":
                raise OSError("no space left")

    go_on(world, folder, fault)


@pytest.mark.parametrize("how", ["kill", "raise", "hang", "freeze"])
def test_when_a_rank_breaks_the_others_stop_and_say_why(tmp_path, untouched, how):
    """And the run goes on from its last checkpoint, bit for bit as if nothing had been."""
    launched = ranks.start(
        2,
        breaks_in_iteration_3,
        tmp_path,
        how,
        timeout_s=3.0 if how in ("hang", "freeze") else 60.0,
    )
    launched[0].join(40)
    assert not launched[0].is_alive()
    launched[1].kill()
    left = ranks.finish(launched, tmp_path)
    reason = "another rank died, or did not answer within"
    if how == "raise":
        reason = "rank 1 stopped with RewardFailed: after iteration 2: reward 'bright' failed on .* OSError: no space left"
    assert re.search(f"^RankLost: rank 0 stops: {reason}", left[0]["error"])
    (tmp_path / "0.json").unlink()
    ranks.run(2, go_on, tmp_path)
    assert same(tmp_path, untouched[2])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_resumes_on_another_number_of_ranks(tmp_path, untouched, before, after):
    """Float32 sums in another order (see test_distributed). No row of the log is lost or
    doubled."""
    run = shutil.copytree(untouched[before], tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "iteration_000010")
    ranks.run(after, go_on, run)
    torch.testing.assert_close(final(run), final(untouched[1]), atol=1e-5, rtol=0)
    rows, straight = (
        [(row["kind"], row["iteration"]) for row in log(folder)] for folder in (run, untouched[1])
    )
    assert rows == straight


def short_of_memory_on_rank_1(world, folder):
    class Policy(GaussianPolicy):
        def velocity(self, x, sigma, cond):
            if world.rank == 1 and len(x) > 3:
                raise torch.OutOfMemoryError("pretended")
            return super().velocity(x, sigma, cond)

    go_on(world, folder, policy=Policy())


def test_memory_that_runs_out_on_one_rank_leaves_the_others_waiting_no_longer(tmp_path, untouched):
    ranks.run(2, short_of_memory_on_rank_1, tmp_path)
    torch.testing.assert_close(final(tmp_path), final(untouched[2]), atol=1e-5, rtol=0)
    assert log(tmp_path)[-2]["out_of_memory"] > 0


def not_finite_on_rank_1(world, folder):
    class Policy(GaussianPolicy):
        def velocity(self, x, sigma, cond):
            v = super().velocity(x, sigma, cond)
            return (
                v * float("nan")
                if v.requires_grad and world.rank == 1 and self.trainer.iteration >= 2
                else v
            )

    go_on(world, folder, policy=Policy())


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(tmp_path):
    ranks.run(2, not_finite_on_rank_1, tmp_path)
    assert [row["skipped_updates"] for row in log(tmp_path) if row["kind"] == "train"] == [0, 0] + [
        1
    ] * 8


# --- rewards and gradients


def failing_from(call, failure):
    """Brightness up to some call, the failure from then on."""
    calls = []

    def reward(images, prompts):
        calls.append(1)
        return brightness(images, prompts) if len(calls) < call else failure(images)

    return reward


def raises(images):
    raise KeyError("no such word")


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            raises,
            r"KeyError: 'no such word' \(in raises, .*test_faults\.py:\d+: raise KeyError(.*\n)+.*rank0\.txt",
        ),
        (lambda images: torch.zeros(len(images), 2), "should return .* scores"),
        (lambda images: None, "should return .* scores"),
        (lambda images: "good", "failed on"),
    ],
)
def test_a_reward_that_breaks_is_named_with_the_iteration_and_the_checkpoint_is_good(
    tmp_path, failure, message
):
    """One call for the base model's evaluation and one for each iteration: the fourth is the third
    iteration's."""
    one_call = ("sampling.decode_batch_size=1000", "evaluation.every=100")
    t = trainer(tmp_path, *LONG, *one_call, rewards={"bright": failing_from(4, failure)})
    with pytest.raises(
        RewardFailed, match=f"after iteration 2: reward 'bright' .*{message}"
    ) as failed:
        list(t.train())
    assert (failed.value.__cause__ is None) or "Traceback" in (
        tmp_path / "traceback_rank0.txt"
    ).read_text()
    again = trainer(tmp_path, *LONG, *one_call)
    assert again.resume() == [] and again.iteration == 2
    list(again.train())


def test_groups_whose_members_all_score_alike_teach_nothing():
    t = trainer(
        None,
        "optim.weight_decay=0",
        rewards={"bright": lambda images, prompts: torch.full((len(images),), 0.1)},
    )
    before = mean(t)
    row = t.iterate()
    assert row["silent_groups"] == 1 and row["loss"] == 0 and row["skipped_updates"] == 0
    assert torch.equal(t.policy.mean, before)


@pytest.mark.parametrize("missing", [(torch.nan, torch.nan), (torch.inf, -torch.inf)])
def test_scores_that_are_no_numbers_teach_nothing_and_are_counted(missing):
    def sometimes(images, prompts):
        scores = brightness(images, prompts)
        scores[::4], scores[1::4] = missing
        return scores

    row = trainer(None, rewards={"bright": sometimes}).iterate()
    assert (
        row["missing_scores"] == 0.5 and row["skipped_updates"] == 0 and row["loss"] == row["loss"]
    )


def test_a_reward_without_any_score_ends_the_run_after_a_while(tmp_path, monkeypatch):
    """As an HTTP reward is once its server has gone for good. A single bad iteration does no
    harm."""
    monkeypatch.setattr(early_stop, "UNSCORED", 3)
    silent_after = {1, 2, 4, 5, 6}

    def reward(images, prompts):
        return (
            torch.full((len(images),), torch.nan)
            if t.iteration in silent_after
            else brightness(images, prompts)
        )

    t = trainer(tmp_path, *LONG, "evaluation.every=100", rewards={"bright": reward})
    with pytest.raises(
        Stopped, match="iteration 7: reward 'bright' gave no score at all in 3 iterations in a row"
    ):
        list(t.train())


def test_gradients_that_stay_non_finite_end_the_run_with_the_last_good_weights(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(early_stop, "SKIPPED", 2)

    class Policy(GaussianPolicy):
        broken = False

        def velocity(self, x, sigma, cond):
            v = super().velocity(x, sigma, cond)
            return v * float("nan") if v.requires_grad and self.broken else v

    t = trainer(tmp_path, *LONG, "trainer.checkpoint_every=100", policy=Policy())
    rows = t.train()
    while t.iteration < 4:
        next(rows)
    t.policy.broken, good = True, mean(t)
    with pytest.raises(
        Stopped, match="iteration 6: the gradient was not finite in 2 updates in a row"
    ):
        list(rows)
    again = resumed(tmp_path, *LONG, "trainer.checkpoint_every=100")
    assert again.iteration == 6 and torch.equal(again.policy.mean, good)
