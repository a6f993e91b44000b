"""Gradients of the rewards that have one, on tiny weights, against differences of their own
scores."""

import pytest
import torch

from g2rpo.core.plugins import find_class
from g2rpo.rewards.catalogue import REWARDS
from tests.support.tolerances import network

KINDS = {name: find_class("rewards", name, REWARDS) for name in REWARDS}
DIFFERENTIABLE = [name for name, kind in KINDS.items() if kind.differentiable]
PROMPTS = ["a red circle", "two blue squares"]


@pytest.fixture(params=DIFFERENTIABLE)
def reward(request, rewards):
    return rewards.get(request.param) or KINDS[request.param]()


def of_scores(scores):
    """Beside the same pictures in another form."""
    return network(max(1.0, scores.abs().max()))


def pictures():
    return 0.3 + 0.4 * torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_a_score_with_a_gradient_is_the_published_one(reward):
    scores, plain = reward(pictures().requires_grad_(), PROMPTS), reward(pictures(), PROMPTS)
    assert scores.requires_grad and not plain.requires_grad
    torch.testing.assert_close(scores.detach().float(), plain, **of_scores(plain))


def test_a_gradient_is_that_of_the_score_without_rounding(reward, monkeypatch):
    """Central differences along the gradient, of half a level at most, whose curvature leaves one
    hundredth; and float32's rounding of two scores, which is small beside the slope."""
    monkeypatch.setattr("g2rpo.rewards.pixels.with_gradient", lambda value, smooth: smooth)
    images = pictures().requires_grad_()
    (gradient,) = torch.autograd.grad(reward(images, PROMPTS).sum(), images)
    assert all(bool(own.any()) for own in gradient)
    step = gradient * (0.002 / gradient.abs().flatten(1).amax(1)[:, None, None, None])
    low, high = (
        reward((images + sign * step).detach().requires_grad_(), PROMPTS).detach()
        for sign in (-1, 1)
    )
    slope = (gradient * step).flatten(1).sum(1)
    rounded = of_scores(high)["atol"]
    assert slope.min() > 20 * rounded
    torch.testing.assert_close((high - low) / 2, slope, rtol=0.01, atol=rounded)
