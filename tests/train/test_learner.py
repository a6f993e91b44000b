"""The learning rate, the largest gradient and the old weights by their formulas; the optimizer's
step in one kernel, as on GPUs."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from g2rpo.config.schema import OptimConfig
from g2rpo.core.errors import UserError
from g2rpo.models.sharding import WHOLE
from g2rpo.train.learner import Learner
from tests.support.runs import trainer
from tests.support.watched import Watched


def learner(keep_old=False, **options):
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    return Learner([parameter], OptimConfig(learning_rate=0.1, **options), WHOLE, keep_old)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"warmup_iterations": 3}, [0.025, 0.05, 0.075, 0.1, 0.1, 0.1]),
        (
            {"decay": "cosine"},  # to nothing after the last iteration
            [0.05 * (1 + math.cos(math.pi * part)) for part in (0, 0.25, 0.5, 0.75)],
        ),
    ],
)
def test_the_rate_rises_linearly_and_falls_as_a_cosine(options, expected):
    own = learner(**options)
    rates = [own.set_scheduled_rate(iteration, len(expected)) for iteration in range(len(expected))]
    assert rates == pytest.approx(expected)
    assert own.optimizer.param_groups[0]["lr"] == rates[-1]


def test_old_weights_keep_a_share_of_themselves():
    own = learner(keep_old=True)
    (weight,), (old,) = own.parameters, own.old
    weight.data.copy_(torch.tensor([3.0, 2.0]))
    own.update_old(0.75)
    assert old.tolist() == [1.5, -1.0]
    with own.as_old():
        assert weight.tolist() == [1.5, -1.0] and own.old[0].tolist() == [3.0, 2.0]
    assert weight.tolist() == [3.0, 2.0]


class Called(TorchDispatchMode):
    """The functions that torch calls while it is entered."""

    def __init__(self):
        super().__init__()
        self.functions = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.functions.add(function)
        return function(*args, **(kwargs or {}))


def walk(fused, steps=30):
    """The weights after steps with the same gradients, by AdamW with a config's settings."""
    draws = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=draws)) for shape in ((7, 5), (11,))]
    learner = Learner(weights, OptimConfig(learning_rate=1e-2, weight_decay=0.1), WHOLE)
    assert learner.optimizer.defaults["fused"] is False  # on a CPU
    for group in learner.optimizer.param_groups:
        group["fused"] = fused
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draws)
        learner.optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights])


def test_a_step_in_one_kernel_is_the_same_up_to_rounding():
    """Both decay a weight alike; a step of at most about 1e-2 is rounded some ten times, in another
    order, and may change one rounding of a weight (below 4) a step."""
    with Called() as called:
        one_kernel = walk(True)
    assert torch.ops.aten._fused_adamw_.default in called.functions
    apart = (one_kernel - walk(False)).abs().max()
    assert apart <= 30 * (10 * 1e-2 + 4 / 2) * torch.finfo(torch.float32).eps


def test_memory_that_runs_out_in_a_swap_of_weights_ends_the_run(monkeypatch):
    own = learner(keep_old=True)

    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(nn.Parameter, "clone", full)
    with pytest.raises(UserError, match="while old and trained weights were swapped"):
        own.as_old().__enter__()


@pytest.mark.parametrize(("largest", "clipped"), [(1e-3, True), (1e3, False)])
def test_gradients_are_scaled_to_the_largest_norm(largest, clipped):
    t = trainer(None, f"optim.max_grad_norm={largest}")
    seen = Watched(t)
    norm = t.iterate()["grad_norm"]  # before
    (gradient,) = seen.gradients
    assert (norm > largest) == clipped
    # torch divides by the norm + 1e-6
    assert float(gradient[0].norm()) == pytest.approx(min(norm, largest), rel=2e-3)
