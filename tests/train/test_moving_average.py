"""The moving average of the weights: once an iteration, or by optimizer steps as Flow-GRPO's code
does it."""

import pytest
import torch

from tests.support.runs import mean, trainer
from tests.support.tolerances import rounding

FLOW_GRPO = ("optim.ema_decay=0.9", "optim.ema_every=8", "optim.ema_warmup=true")
# three optimizer steps an iteration
STEPS = ("algorithm.update_every=branch", "optim.learning_rate=0.02")


def watched(t):
    """Every weight that an optimizer step left, as the run goes."""
    history = []
    t.learner.optimizer.register_step_post_hook(lambda *_: history.append(mean(t).double()))
    return history


BLENDED = rounding(4 * 3, size=0.5)
"""Four times d a + (1 - d) w, of weights up to 1/2."""


def published(start, history, decay=0.9, every=8):
    """From its formula: after step t, where 8 divides t + 1, a = d a + (1 - d) w with d = min((1 +
    t) / (10 + t), 0.9)."""
    average = start.clone()
    for step, weights in enumerate(history, 1):
        d = min((1 + step) / (10 + step), decay)
        if (step + 1) % every == 0:
            average = d * average + (1 - d) * weights
    return average


def average(t):
    return next(iter(t.learner.average.module.parameters())).detach().double()


@pytest.mark.parametrize("decay", [0.9, 0.5])
def test_the_average_is_flow_grpos(decay):
    """33 optimizer steps: four updates of the average, whose decay is still rising (0.47, 0.64,
    0.73, 0.78)."""
    t = trainer(None, *FLOW_GRPO, f"optim.ema_decay={decay}", *STEPS, "trainer.iterations=11")
    start, history = mean(t).double(), watched(t)
    for _ in range(11):
        t.iterate()
        if t.learner.steps == 6:  # no update yet: the untrained weights
            assert torch.equal(average(t), start)
    torch.testing.assert_close(average(t), published(start, history, decay), **BLENDED)
    assert float((average(t) - history[-1]).norm()) > 0.05 * float(history[-1].norm())
    assert t.learner.steps == 33 and t.learner.ema_decay == min(34 / 43, decay)


def test_the_warm_up_alone_averages_once_an_iteration():
    """Of three steps each, by the formula."""
    t = trainer(None, "optim.ema_decay=0.9", "optim.ema_warmup=true", *STEPS)
    expected = mean(t).double()
    for step in (3, 6, 9):
        t.iterate()
        d = (1 + step) / (10 + step)
        expected = d * expected + (1 - d) * mean(t).double()
    torch.testing.assert_close(average(t), expected, **BLENDED)
