"""`Collector.prompts_at_once`: some prompts' pictures are scored while the next are rolled out; nothing
else changes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from g2rpo.core.errors import RewardFailed, UserError
from g2rpo.core.rewards import as_reward
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rewards.analytic import FunctionReward
from g2rpo.rewards.remote import RemoteReward
from g2rpo.rewards.vlm import VLMJudge
from g2rpo.train.collector import waited_for
from tests.rollout.test_memory import Small, run_out
from tests.support.runs import brightness, trainer, untimed
from tests.support.waiting import PATIENCE_S

THREE = "trainer.prompts_per_iteration=3"


def run(*options, iterations=2, at_once=None, **parts):
    t = trainer(None, THREE, *options, **parts)
    if at_once is not None:
        t.collector.prompts_at_once = lambda spec, every: min(at_once, every)
    rows = [t.iterate() for _ in range(iterations)]
    return t.learner.parameters[0].detach().clone(), rows


@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_parts_do_not_change_a_run(at_once):
    """Bit for bit on the closed-form policy, whose rows do not depend on their batch."""
    (whole, rows), (parts, theirs) = run(), run(at_once=at_once)
    assert torch.equal(parts, whole) and untimed(rows) == untimed(theirs)


def test_scoring_and_the_next_rollout_overlap():
    """The reward of the first pictures and the network's call for the next prompt each wait for the
    other to have begun. What was done meanwhile is not counted twice."""
    scoring, called, first = threading.Event(), threading.Event(), []

    class Watching(GaussianPolicy):
        def velocity(self, x, sigma, cond):
            first.append(float(cond.tensors["shift"][0]))
            if first[-1] != first[0] and not called.is_set():
                assert scoring.wait(PATIENCE_S), "nothing is scored meanwhile"
                called.set()
            return super().velocity(x, sigma, cond)

    def patient(images, prompts):
        scoring.set()
        assert called.wait(PATIENCE_S), "nothing is rolled out meanwhile"
        return brightness(images, prompts)

    _, (row,) = run(at_once=1, iterations=1, policy=Watching(), rewards={"bright": patient})
    assert called.is_set() and row["seconds_overlapped"] > 0
    phases = sum(value for key, value in row.items() if key.startswith("seconds/"))
    assert row["seconds"] == pytest.approx(phases)


@pytest.mark.parametrize(("at_once", "elsewhere"), [(1, 2), (None, 0)])
def test_no_two_threads_ask_a_reward_at_once(at_once, elsewhere):
    busy, threads = threading.Lock(), []

    def alone(images, prompts):
        assert busy.acquire(blocking=False), "asked twice at a time"
        threads.append(threading.current_thread() is threading.main_thread())
        busy.release()
        return brightness(images, prompts)

    run("sampling.decode_batch_size=64", at_once=at_once, iterations=1, rewards={"bright": alone})
    assert threads.count(False) == elsewhere and threads[-1]


def test_a_reward_that_fails_aside_ends_the_iteration():
    def broken(images, prompts):
        raise ValueError("no")

    with pytest.raises(RewardFailed, match="after iteration 0: reward 'bright' failed"):
        run(at_once=1, rewards={"bright": broken})


def test_memory_that_runs_out_aside_halves_the_batch():
    whole, _ = run()
    parts, rows = run("sampling.decode_batch_size=8", at_once=1, policy=Small(decode=5))
    assert rows[-1]["out_of_memory"] == 1 and rows[-1]["decode_batch_size"] == 4
    assert torch.equal(parts, whole)


def test_memory_that_runs_out_in_the_optimizer_is_the_users_problem(monkeypatch):
    t = trainer(None, THREE)
    monkeypatch.setattr(t.learner.optimizer, "step", run_out)
    with pytest.raises(UserError, match="optimizer step: set policy.tuning=lora"):
        t.iterate()


def waiting(images, prompts):
    return brightness(images, prompts)


waiting.waits = True


def test_a_reward_that_waits_is_scored_aside_by_default():
    """Bit for bit the same, and the part that is not the last is scored by another thread."""
    at_a_time = "sampling.batch_size=20"
    whole, rows = run(at_a_time)
    parts, theirs = run(at_a_time, rewards={"bright": waiting})
    assert torch.equal(parts, whole)
    assert rows[0]["seconds_overlapped"] == 0 < theirs[0]["seconds_overlapped"]
    assert run(at_once=3, rewards={"bright": waiting})[1][0]["seconds_overlapped"] == 0
    assert all(reward.waits for reward in (RemoteReward, VLMJudge, FunctionReward(waiting)))


DEVICES = """
cpu cuda False
cuda cpu True
cuda:0 cuda False
cuda:0 cuda:1 True
"""


def test_scores_are_waited_for_where_another_device_computes_them():
    """A reward that names no device computes on the CPU, where pictures are handed to it."""

    def score(images, prompts):
        raise NotImplementedError

    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [waited_for(as_reward(score), device) for device in (cpu, cuda)] == [False, True]
    for device, reward, elsewhere in map(str.split, DEVICES.strip().splitlines()):
        score.device = torch.device(reward)
        assert str(waited_for(as_reward(score), torch.device(device))) == elsewhere
    score.waits = True
    assert waited_for(as_reward(score), cpu)


def test_what_was_submitted_is_not_waited_for_after_a_failure(monkeypatch):
    asked, policy, cancelled = set(), GaussianPolicy(), threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *how, **options):
            if options.get("cancel_futures"):
                super().shutdown(*how, **options)
                cancelled.set()
            super().shutdown(*how, **options)

    def slow(images, prompts):
        asked.update(prompts)
        assert cancelled.wait(PATIENCE_S)
        return brightness(images, prompts)

    def third(x, sigma, cond, velocity=policy.velocity):
        if float(cond.tensors["shift"][0]) == last:
            raise KeyboardInterrupt
        return velocity(x, sigma, cond)

    t = trainer(None, THREE, rewards={"bright": slow}, policy=policy)
    monkeypatch.setattr("g2rpo.train.collector.ThreadPoolExecutor", Pool)
    t.collector.prompts_at_once = lambda spec, every: 1
    (last,) = policy.encode(t.prompts_of(0)[2:]).tensors["shift"].tolist()
    policy.velocity = third
    with pytest.raises(KeyboardInterrupt):
        t.iterate()
    assert len(asked) == 1
