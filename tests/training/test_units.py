"""Ranks that have finished take over the rollouts of those that have not, and nothing else changes."""

import time

import pytest
import torch

from g2rpo.data import Cond, Plan, Rollout, Transition
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.runtime.distributed import ALONE
from g2rpo.training import collector
from g2rpo.training.collector import waited_for
from g2rpo.training.units import Queue, Work, _pack, _pack_cond, _unpack, _unpack_cond
from tests.support import ranks
from tests.support.runs import brightness, trainer

OPTIONS = ("trainer.prompts_per_iteration=8", "sampling.prompts_at_once=1")


class Slow(GaussianPolicy):
    """Its calls without gradient take `seconds` each."""

    seconds = 0.0

    def velocity(self, x, sigma, cond):
        time.sleep(0.0 if torch.is_grad_enabled() else self.seconds)
        return super().velocity(x, sigma, cond)


def train(world, folder):
    """Weights and rewards after two iterations: on rank 0 slow, on neither rank, and with a division that is fixed."""
    found = {}
    for name, slow, fixed in (("slow", 0.1, False), ("even", 0.0, False), ("fixed", 0.0, True)):
        policy, rolled = Slow(), []
        policy.seconds = slow * world.is_main
        t = trainer(None, *OPTIONS, policy=policy, rewards={"bright": brightness}, world=world)
        t.on_evaluations = rolled.append
        if fixed:
            t._prompts_of_all = lambda: None
        rows = [t.iterate(), t.iterate()]
        found[name] = {
            "weights": policy.mean.flatten().tolist(),
            "rows": [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in rows],
            "evaluations": sum(rolled),
        }
    return found


def test_a_fast_rank_takes_over_and_the_run_is_the_same_to_the_bit(tmp_path):
    slow, fast = ranks.run(2, train, tmp_path)
    for one in (slow, fast):
        assert one["slow"]["weights"] == one["even"]["weights"] == one["fixed"]["weights"] == slow["fixed"]["weights"]
        assert one["slow"]["rows"] == one["even"]["rows"] == one["fixed"]["rows"]
    half = slow["fixed"]["evaluations"]
    assert fast["fixed"]["evaluations"] == half and slow["slow"]["evaluations"] <= half / 2
    assert slow["slow"]["evaluations"] + fast["slow"]["evaluations"] == 2 * half


class Nothing(Queue):
    """On rank 0: others take all units before it asks for its first."""

    def take(self):
        return None


def train_idle(world, folder):
    if world.is_main:
        collector.Queue = Nothing
    return trainer(None, *OPTIONS, world=world).iterate()["seconds/rollout"]


def test_a_rank_that_finds_no_unit_has_a_row_that_can_be_read(tmp_path):
    """A row without the seconds of its rollout is refused as damaged."""
    idle, busy = ranks.run(2, train_idle, tmp_path)
    assert 0 < idle < busy


def test_a_rank_by_itself_takes_its_units_in_order():
    queue = Queue(ALONE, [Work(Cond({"x": torch.zeros(5)}), list("abcde"), 0, 2)])
    assert [queue.take() for _ in range(4)] == [(0, 0), (0, 1), (0, 2), None]
    assert Work(Cond({}), list("abcde"), 0, 2).rows(2) == [4]


def test_results_and_conditioning_are_the_same_after_they_were_sent():
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    plans = [
        Plan(branch=0, merge=2, tails=((2, 3),), shared_noise=True),
        Plan(branch=1, merge=2, tails=((2, 3),), shared_noise=True),
    ]
    sent = [
        Rollout(
            3,
            plan,
            tuple(Transition(step, draw(1, 2), draw(4, 2), draw(1, 2), draw(4)) for step in range(plan.branch, 2)),
            draw(1, 4, 2),
        )
        for plan in plans
    ]
    rewards = draw(2, 1, 1, 4)
    rollouts, got = _unpack(_pack(sent, rewards), plans, torch.device("cpu"))
    assert torch.equal(got, rewards)
    for mine, theirs in zip(sent, rollouts, strict=True):
        assert (mine.prompt, mine.plan) == (theirs.prompt, theirs.plan) and torch.equal(mine.finals, theirs.finals)
        for one, other in zip(mine.transitions, theirs.transitions, strict=True):
            assert one.step == other.step
            names = ("x", "x_next", "old_mean", "old_log_prob")
            assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)
    cond = Cond({"pooled": draw(2, 3).bfloat16()}, {"a.b": (draw(4, 2), draw(1, 2)), "c": (draw(1), draw(2))})
    back = _unpack_cond(_pack_cond(cond))
    assert torch.equal(back.tensors["pooled"], cond.tensors["pooled"])
    assert all(torch.equal(x, y) for name in cond.ragged for x, y in zip(back.ragged[name], cond.ragged[name], strict=True))


@pytest.mark.parametrize(
    ("device", "reward", "elsewhere"),
    [
        ("cpu", None, False),
        ("cpu", "cuda", False),
        ("cuda", None, True),
        ("cuda", "cpu", True),
        ("cuda:0", "cuda", False),
        ("cuda:0", "cuda:1", True),
    ],
)
def test_scores_are_waited_for_where_another_device_computes_them(device, reward, elsewhere):
    """A reward that names no device computes on the CPU, where pictures are handed to it."""

    def score(images, prompts):
        raise NotImplementedError

    if reward is not None:
        score.device = torch.device(reward)
    assert waited_for(score, torch.device(device)) == elsewhere
    score.waits = True
    assert waited_for(score, torch.device(device))
