"""Batch sizes: found by measuring, halved when memory runs out, and without influence on what a run
computes."""

import gc

import pytest
import torch

from g2rpo.core.errors import UserError, out_of_memory
from g2rpo.core.noise import generator_for
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.memory import (
    CPU_ROWS,
    SAFETY_MARGIN,
    BatchSizes,
    batch_sizes,
    bounded_by,
    largest_batch,
)
from g2rpo.train.evaluation.sampler import Sampler
from tests.support.runs import brightness, mean, trainer
from tests.support.tolerances import near, rounding


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect():
    """Garbage is collected whenever memory runs out; after other files' tests there is much to look
    at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def run_out():
    raise torch.OutOfMemoryError("CUDA out of memory")


class Small(GaussianPolicy):
    """Runs out of memory above so many rows, of each kind of call; `grad_calls` names training
    passes that always do, once."""

    def __init__(self, rollout=10**6, decode=10**6, train=10**6, grad_calls=()):
        super().__init__()
        self.limits, self.grad_calls, self.passes = (rollout, decode, train), grad_calls, 0

    def velocity(self, x, sigma, cond):
        learns = torch.is_grad_enabled()
        self.passes += learns
        if len(x) > self.limits[2 if learns else 0] or (learns and self.passes in self.grad_calls):
            run_out()
        return super().velocity(x, sigma, cond)

    def decode(self, x):
        if len(x) > self.limits[1]:
            run_out()
        return super().decode(x)


def run(policy, *options):
    """Two iterations: weights, rows, messages and held-out pictures."""
    said = []
    t = trainer(None, *options, policy=policy)
    t.sizes.notify = said.append
    pictures = t.score_heldout().images
    rows = [t.iterate() for _ in range(2)]
    return mean(t), rows, said, pictures


BATCH, DECODE, MICRO = (
    "sampling.batch_size",
    "sampling.decode_batch_size",
    "trainer.micro_batch_size",
)
LIMITS = [
    ({"rollout": 10}, f"{BATCH}=32", f"{BATCH}=8", 2),
    ({"decode": 5}, "", f"{DECODE}=4", 4),
    ({"train": 3}, "", f"{MICRO}=2", 5),
    # in the middle of an update
    ({"grad_calls": (2,)}, f"{MICRO}=2", f"{MICRO}=1", 1),
    (
        {"rollout": 3, "decode": 3, "train": 1},
        f"{BATCH}=5 {DECODE}=3 {MICRO}=2",
        f"{BATCH}=2 {DECODE}=3 {MICRO}=1",
        2,
    ),
]


@pytest.mark.parametrize(("limits", "asked", "small", "halvings"), LIMITS, ids=str)
def test_a_run_that_runs_out_of_memory_equals_one_that_began_small(limits, asked, small, halvings):
    """Bit for bit: what was done before the failure and after it is the same elementwise float32
    arithmetic.

    Only the logged loss of an update made before the failure is summed in another order, of two
    terms, advantages of 1.6.
    """
    weights, rows, said, pictures = run(Small(**limits), *asked.split())
    expected, their_rows, silence, their_pictures = run(GaussianPolicy(), *small.split())
    assert torch.equal(weights, expected) and torch.equal(pictures, their_pictures)
    assert len(said) == rows[-1]["out_of_memory"] == halvings and not silence
    own = {"kind", "out_of_memory"} | ({"decode_batch_size"} if "rollout" in limits else set())
    for mine, theirs in zip(rows, their_rows, strict=True):
        names = {name for name in mine if not name.startswith("seconds")} - own
        close = near({name: theirs[name] for name in names}, rounding(4, size=1.6))
        assert {name: mine[name] for name in names} == close


def test_metrics_of_an_abandoned_pass_are_abandoned_too():
    """The fifth pass is the second of the second iteration, where the policy has left its base: a
    KL counted twice shows. It is a sum of 36 terms, none negative."""
    options = ("trainer.micro_batch_size=2", "algorithm.kl_weight=0.5")
    _, rows, said, _ = run(Small(grad_calls=(5,)), *options)
    _, theirs, _, _ = run(GaussianPolicy(), *options)
    assert said and theirs[1]["kl"] > 0
    assert rows[1]["kl"] == near(theirs[1]["kl"], rounding(2 * 36))


def test_progress_counts_nothing_twice():
    t, seen = trainer(None, policy=Small(rollout=10)), []
    t.on_evaluations = seen.append
    row = t.iterate()
    assert sum(seen) == row["evaluations"] and min(seen) < 0
    t, seen = trainer(None, policy=Small(decode=1)), []
    t.score_heldout(seen.append)
    assert t.sizes.halved and sum(seen) == len(t.heldout) * t.config.sampling.num_steps


@pytest.mark.parametrize(
    ("call", "setting"), [("rollout", BATCH), ("decode", DECODE), ("train", MICRO)]
)
def test_a_single_row_that_does_not_fit_is_the_users_problem(call, setting):
    t = trainer(None, policy=Small(**{call: 0}))
    before = mean(t)
    with pytest.raises(UserError, match=f"out of memory with {setting}=1, the smallest"):
        t.iterate()
    assert torch.equal(mean(t), before) and t.iteration == 0 and not t.learner.optimizer.state


class Hungry:
    """Brightness that runs out of memory above so many pictures; `sizes` are how many it was
    given."""

    def __init__(self, limit):
        self.limit, self.sizes = limit, []

    def __call__(self, images, prompts):
        self.sizes.append(len(images))
        if len(images) > self.limit:
            run_out()
        return brightness(images, prompts)


def test_a_reward_that_runs_out_of_memory_sees_fewer_pictures():
    """In an iteration, and in an evaluation, whose scores stay."""
    reward = Hungry(20)
    trainer(None, rewards={"bright": reward}).iterate()
    assert reward.sizes[:3] == [64, 32, 16] and max(reward.sizes[2:]) == 16
    reward = Hungry(1)
    t = trainer(None, f"{DECODE}=8", rewards={"bright": reward})
    scores = t.score_heldout().scores["bright"]
    assert reward.sizes == [3, 3, 2, 1, 1, 1] and t.sizes.halved == 3
    assert torch.equal(scores, trainer(None).score_heldout().scores["bright"])


def test_where_nothing_halves_what_to_lower_is_named():
    sampler = Sampler(policy=GaussianPolicy(), shift=1.0, num_steps=4)
    with pytest.raises(UserError, match="--batch-size of g2rpo sample and g2rpo evaluate"):
        sampler.evaluate(["0"] * 2, {"bright": Hungry(1)})


@pytest.mark.parametrize(
    ("peak", "limit", "most", "expected"),
    [
        (lambda n: 100 + 7 * n, 1000, 10**6, 128),  # (1000 - 100) / 7
        (lambda n: 100 + 7 * n, 1000, 50, 50),
        (lambda n: 100 + 7 * n, 107, 50, 1),
        (lambda n: 100 + 7 * n, 100, 50, 1),  # one row is too much already
        (lambda n: 100, 1000, 50, 50),  # rows cost nothing
        (lambda n: n * n, 1000, 10**6, range(16, 32)),
    ],
)
def test_the_largest_batch_is_found_by_measuring(peak, limit, most, expected):
    """Exact where memory is linear; where it grows faster, the line through two measurements
    overshoots, never the result."""
    found = largest_batch(peak, limit, most)
    assert found in expected if isinstance(expected, range) else found == expected


def test_auto_is_settled_by_the_memory_of_the_device():
    """A gauge that says what a device would: 1000 bytes, 30 of them a row; a fifth is left."""
    policy, said = Small(decode=6), []

    class Gauge:
        def available(self):
            return 1000

        def peak(self, call, rows):
            return 30 * len(call(rows))

    sizes = BatchSizes(rollout=1, decode=1, micro=1, notify=said.append, auto={"rollout", "decode"})
    sizes.find(policy, policy.encode(["0"]), policy.noise([generator_for(0)]), 10**4, Gauge())
    assert sizes.rollout == int((1 - SAFETY_MARGIN) * 1000 / 30) and sizes.decode == 4
    assert len(said) == 2 and "sampling.batch_size: 26 rows" in said[1] and not sizes.auto


def test_auto_on_a_cpu_is_what_the_documentation_says():
    sizes = batch_sizes("auto", "auto", 3, torch.device("cpu"), print)
    assert (sizes.rollout, sizes.decode, sizes.micro) == (32, 8, 3) and not sizes.auto
    assert CPU_ROWS == {"rollout": 32, "decode": 8}
    on_gpu = batch_sizes("auto", 5, 3, torch.device("cuda"), print)
    assert on_gpu.auto == {"rollout"} and on_gpu.decode == 5
    row = trainer(None, "sampling.batch_size=auto", "sampling.decode_batch_size=auto").iterate()
    assert row["decode_batch_size"] == 8


def test_a_batch_size_is_a_number_or_auto():
    for value in ("car", "0", "1.5"):
        with pytest.raises(UserError, match=r"sampling\.batch_size"):
            trainer(None, f"sampling.batch_size={value}")


NO_ROOM = """
CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
cuDNN error: CUDNN_STATUS_ALLOC_FAILED
cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
MPS backend out of memory (MPS allocated: 8.85 GB, max allowed: 9.07 GB).
"""
OTHERS = ["CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", "CUDA error: device-side assert triggered"]


def test_libraries_that_find_no_room_for_their_workspace_halve_the_batch_and_nothing_else_does():
    def attempt(message):
        with bounded_by("rollout"):
            if sizes.rollout > 4:
                raise RuntimeError(message)

    for message in NO_ROOM.strip().splitlines():
        sizes = BatchSizes(rollout=8, decode=8, micro=8, notify=lambda words: None)
        sizes.fit(lambda message=message: attempt(message))
        assert sizes.rollout == 4 and not out_of_memory(ValueError(message))
    sizes = BatchSizes(rollout=8, decode=8, micro=8, notify=lambda words: None)
    for message in OTHERS:
        with pytest.raises(RuntimeError, match=message):
            sizes.fit(lambda message=message: attempt(message))
    assert sizes.rollout == 8
