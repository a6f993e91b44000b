"""The learning rate, the largest gradient and the old weights by their formulas."""

import math

import pytest
import torch
from torch import nn

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
