"""Batch sizes: found by measuring, halved when memory runs out, and without influence on what a run
computes."""

import gc
from functools import partial

import pytest
import torch

from g2rpo.core.errors import UserError, out_of_memory
from g2rpo.core.seeding import generator_for
from g2rpo.evaluation.sampler import Sampler
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.runtime.memory import (
    CPU_ROWS,
    SAFETY_MARGIN,
    BatchSizes,
    batch_sizes,
    bounded_by,
    largest_batch,
)
from tests.support.runs import brightness, trainer


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect():
    """Garbage is collected whenever memory runs out; after other files' tests there is much to look
    at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Small(GaussianPolicy):
    """Runs out of memory above so many rows, of each kind of call; `grad_calls` names training
    passes that always do, once."""

    def __init__(self, rollout=10**6, decode=10**6, train=10**6, grad_calls=()):
        super().__init__()
        self.limits, self.grad_calls, self.passes = (rollout, decode, train), grad_calls, 0

    def velocity(self, x, sigma, cond):
        if torch.is_grad_enabled():
            self.passes += 1
        if len(x) > self.limits[2 if torch.is_grad_enabled() else 0] or (
            torch.is_grad_enabled() and self.passes in self.grad_calls
        ):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().velocity(x, sigma, cond)

    def decode(self, x):
        if len(x) > self.limits[1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().decode(x)


def run(policy, *options, iterations=2):
    said = []
    t = trainer(None, *options, policy=policy)
    t.sizes.notify = said.append
    evaluation = t.score_heldout()
    rows = [t.iterate() for _ in range(iterations)]
    return t.learner.parameters[0].detach().clone(), rows, said, evaluation


CASES = {
    "rollout": (Small(rollout=10), ("sampling.batch_size=32",), ("sampling.batch_size=8",), 2),
    "decode": (Small(decode=5), (), ("sampling.decode_batch_size=4",), 4),
    "training pass": (Small(train=3), (), ("trainer.micro_batch_size=2",), 5),
    "in the middle of an update": (
        Small(grad_calls=(2,)),
        ("trainer.micro_batch_size=2",),
        ("trainer.micro_batch_size=1",),
        1,
    ),
    "everywhere": (
        Small(rollout=3, decode=3, train=1),
        ("sampling.batch_size=5", "sampling.decode_batch_size=3", "trainer.micro_batch_size=2"),
        ("sampling.batch_size=2", "sampling.decode_batch_size=3", "trainer.micro_batch_size=1"),
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_runs_out_of_memory_equals_one_that_began_small(name):
    """Bit for bit: what was done before the failure and after it is the same elementwise float32
    arithmetic.

    Only the logged loss of an update made before the failure is summed in another order, of two
    terms.
    """
    policy, asked, small, halvings = CASES[name]
    weights, rows, said, evaluation = run(policy, *asked)
    expected, their_rows, silence, their_evaluation = run(GaussianPolicy(), *small)
    assert torch.equal(weights, expected)
    assert torch.equal(evaluation.images, their_evaluation.images)
    assert len(said) == rows[-1]["out_of_memory"] == halvings and not silence
    for mine, theirs in zip(rows, their_rows, strict=True):
        numbers = {key for key in mine if key != "kind" and not key.startswith("seconds")}
        differing = {
            key for key in numbers if mine[key] != pytest.approx(theirs[key], rel=1e-6, abs=1e-6)
        }
        assert differing <= {"out_of_memory"} | (
            {"decode_batch_size"} if name == "rollout" else set()
        )


def test_metrics_of_an_abandoned_pass_are_abandoned_too():
    """The fifth pass is the second of the second iteration, where the policy has left its base: a
    KL counted twice shows."""
    options = ("trainer.micro_batch_size=2", "algorithm.kl_weight=0.5")
    (_, rows, said, _), (_, theirs, _, _) = (
        run(policy, *options) for policy in (Small(grad_calls=(5,)), GaussianPolicy())
    )
    assert (
        said and rows[1]["kl"] == pytest.approx(theirs[1]["kl"], rel=1e-4) and theirs[1]["kl"] > 0
    )


def test_progress_counts_nothing_twice():
    t = trainer(None, policy=Small(rollout=10))
    seen = []
    t.on_evaluations = seen.append
    row = t.iterate()
    assert sum(seen) == row["evaluations"] and min(seen) < 0


SETTINGS = {
    "rollout": "sampling.batch_size",
    "decode": "sampling.decode_batch_size",
    "train": "trainer.micro_batch_size",
}


@pytest.mark.parametrize("call", SETTINGS)
def test_a_single_row_that_does_not_fit_is_the_users_problem(call):
    t = trainer(None, policy=Small(**{call: 0}))
    before = t.learner.parameters[0].detach().clone()
    with pytest.raises(UserError, match=f"out of memory with {SETTINGS[call]}=1, the smallest"):
        t.iterate()
    assert (
        torch.equal(t.learner.parameters[0], before)
        and t.iteration == 0
        and not t.learner.optimizer.state
    )


def hungry(limit):
    """Brightness that runs out of memory above so many pictures, and how many it was given at a
    time."""
    sizes = []

    def reward(images, prompts):
        sizes.append(len(images))
        if len(images) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return brightness(images, prompts)

    return reward, sizes


def test_a_reward_that_runs_out_of_memory_sees_fewer_pictures():
    reward, sizes = hungry(20)
    trainer(None, rewards={"bright": reward}).iterate()
    assert sizes[:3] == [64, 32, 16] and max(sizes[2:]) == 16


def test_a_reward_that_runs_out_of_memory_in_an_evaluation_sees_fewer_pictures_too():
    reward, sizes = hungry(1)
    t = trainer(None, "sampling.decode_batch_size=8", rewards={"bright": reward})
    evaluation = t.score_heldout()
    assert sizes == [3, 3, 2, 1, 1, 1] and t.sizes.decode == 1 and t.sizes.halved == 3
    assert torch.equal(evaluation.scores["bright"], trainer(None).score_heldout().scores["bright"])
    # where nothing halves
    with pytest.raises(UserError, match="--batch-size of g2rpo sample and g2rpo evaluate"):
        Sampler(policy=GaussianPolicy(), shift=1.0, num_steps=4).evaluate(
            ["0"] * 2, {"bright": reward}
        )
    reward.group = True  # sees two pictures at once, whatever the batch size is
    with pytest.raises(UserError, match="--batch-size of g2rpo sample and g2rpo evaluate"):
        Sampler(policy=GaussianPolicy(), shift=1.0, num_steps=4).evaluate(
            ["0"] * 2, {"bright": reward}
        )


@pytest.mark.parametrize(
    ("peak", "limit", "most", "expected"),
    [
        (lambda n: 100 + 7 * n, 1000, 10**6, 128),  # (1000 - 100) / 7
        (lambda n: 100 + 7 * n, 1000, 50, 50),
        (lambda n: 100 + 7 * n, 107, 50, 1),
        (lambda n: 100 + 7 * n, 100, 50, 1),  # one row is too much already
        (lambda n: 100, 1000, 50, 50),  # rows cost nothing
        (lambda n: n * n, 1000, 10**6, 31),
    ],
)
def test_the_largest_batch_is_found_by_measuring(peak, limit, most, expected):
    """Exact where memory is linear; where it grows faster, the line through two measurements
    overshoots, never the result."""
    found = largest_batch(peak, limit, most)
    assert peak(found) <= limit or found == 1
    assert found == expected or (expected == 31 and 16 <= found <= 31)


def test_auto_is_settled_by_the_memory_of_the_device():
    """A gauge that says what a device would: 1000 bytes, 30 of them a row; a fifth is left."""

    class Rows(Small):
        last = 0

        def velocity(self, x, sigma, cond):
            self.last = len(x)
            return super().velocity(x, sigma, cond)

        def decode(self, x):
            self.last = len(x)
            return super().decode(x)

    policy, said = Rows(decode=6), []

    class Gauge:
        def available(self):
            return 1000

        def peak(self, call):
            call()
            return 30 * policy.last

    sizes = BatchSizes(rollout=1, decode=1, micro=1, notify=said.append, auto={"rollout", "decode"})
    sizes.find(policy, policy.encode(["0"]), policy.noise([generator_for(0)]), 10**4, Gauge())
    assert (
        sizes.rollout == int((1 - SAFETY_MARGIN) * 1000 / 30)
        and sizes.decode == 4
        and not sizes.auto
    )
    assert len(said) == 2 and "sampling.batch_size: 26 rows" in said[1]


def test_auto_on_a_cpu_is_what_the_documentation_says():
    sizes = batch_sizes("auto", "auto", 3, torch.device("cpu"), print)
    assert (
        (sizes.rollout, sizes.decode, sizes.micro)
        == (CPU_ROWS["rollout"], CPU_ROWS["decode"], 3)
        == (64, 8, 3)
    )
    assert not sizes.auto
    on_gpu = batch_sizes("auto", 5, 3, torch.device("cuda"), print)
    assert on_gpu.auto == {"rollout"} and on_gpu.decode == 5
    assert (
        trainer(None, "sampling.batch_size=auto", "sampling.decode_batch_size=auto").iterate()[
            "decode_batch_size"
        ]
        == 8
    )


@pytest.mark.parametrize("value", ["car", "0", "-1", "1.5"])
def test_a_batch_size_is_a_number_or_auto(value):
    with pytest.raises(UserError, match=r"sampling\.batch_size"):
        trainer(None, f"sampling.batch_size={value}")


NO_ROOM = (
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "MPS backend out of memory (MPS allocated: 8.85 GB, other allocations: 88.12 MB, max allowed: 9.07 GB).",
)
OTHERS = ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", "CUDA error: device-side assert triggered")


def test_libraries_that_find_no_room_for_their_workspace_halve_the_batch_and_nothing_else_does():
    sizes = BatchSizes(rollout=8, decode=8, micro=8, notify=lambda words: None)

    def attempt(message):
        with bounded_by("rollout"):
            if sizes.rollout > 4:
                raise RuntimeError(message)

    for message in NO_ROOM:
        sizes.rollout = 8
        sizes.fit(partial(attempt, message))
        assert sizes.rollout == 4 and out_of_memory(RuntimeError(message))
    sizes.rollout = 8
    for message in OTHERS:
        with pytest.raises(RuntimeError, match=message):
            sizes.fit(partial(attempt, message))
    assert sizes.rollout == 8 and not out_of_memory(ValueError(NO_ROOM[0]))
