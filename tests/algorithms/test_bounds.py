"""Bounds of advantages and ratios, of every algorithm that has them, with a value at each side of
each bound."""

from dataclasses import fields

import pytest
import torch

from g2rpo.algorithms.epg import EPG
from g2rpo.algorithms.flow_grpo import FlowDPPO
from g2rpo.algorithms.forward_process import DGPO, Noised
from g2rpo.algorithms.reward_gradient import FDFO
from g2rpo.config.algorithms import ALGORITHMS
from tests.algorithms.test_neighbours import steps_of
from tests.support.tolerances import near, rounding


def having(field, *but):
    """The algorithms with such a field."""
    kinds = (kind for kind in ALGORITHMS.values() if not issubclass(kind, but))
    return [kind for kind in kinds if field in {each.name for each in fields(kind)}]


# FDFO has a penalty in place of the clip, and Flow-DPPO a limit
RATIO = having("clip_range", DGPO, FDFO, FlowDPPO)
SIDES = (-1.02, -0.98, 0.98, 1.02)
"""Places of a ratio in units of the clip range, a fiftieth before and behind each bound."""
ADVANTAGES = torch.tensor([2.0] * 4 + [-3.0] * 4)
HELD = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0]).bool()
"""Where a ratio has passed the bound on the side of its advantage."""


@pytest.mark.parametrize("kind", having("advantage_clip", EPG), ids=lambda kind: kind.name)
@pytest.mark.parametrize(("clip", "largest"), [(5.0, 5.0), (6.5, 6.5), (7.5, 6.9)])
def test_an_advantage_is_clipped_at_its_bound(kind, clip, largest):
    """One picture among 49 that is better, or worse, is 48/7 = 6.86 unbiased standard deviations
    from the mean, sqrt(48) = 6.93 biased ones; the others are 1/7 away."""
    one = torch.zeros(49)
    one[7] = 1
    rewards = torch.stack([one, -one])[:, None, None]
    found = kind(advantage_clip=clip).advantages(rewards, torch.ones(1))
    expected = torch.where(one > 0, largest, -1 / 7)
    # the published 1e-4 and the two kinds of a standard deviation are within a hundredth
    torch.testing.assert_close(found, torch.stack([expected, -expected]), rtol=0.015, atol=0)
    assert clip > 7 or float(found.abs().max()) == clip


@pytest.mark.parametrize("kind", RATIO, ids=lambda kind: kind.name)
def test_a_ratio_is_clipped_at_both_bounds(kind):
    algorithm, c = kind(clip_range=0.1), 0.1
    ratio = 1 + c * torch.tensor(SIDES).repeat(2)
    log_ratio = ratio.log().requires_grad_()
    steps = steps_of(8, log_prob=log_ratio, advantages=ADVANTAGES)
    loss = algorithm.policy_loss(steps) / getattr(algorithm, "noise_weight", 1)
    (slope,) = torch.autograd.grad(loss.sum(), log_ratio)
    bound = torch.where(ADVANTAGES > 0, 1 + c, 1 - c)
    torch.testing.assert_close(
        loss.detach(), -ADVANTAGES * torch.where(HELD, bound, ratio), **rounding(10)
    )
    torch.testing.assert_close(slope, torch.where(HELD, 0, -ADVANTAGES * ratio), **rounding(10))


@pytest.mark.parametrize("kind", RATIO, ids=lambda kind: kind.name)
def test_the_logs_share_of_clipped_ratios_is_what_lies_beyond_the_bounds(kind):
    ratio = 1 + 0.1 * torch.tensor([*SIDES, 0.0])
    log = {"log_ratio": ratio.log(), "drift": torch.tensor([0.3, 0.2])}
    told = kind(clip_range=0.1).metrics(log)
    assert told["clip_fraction"] == near(2 / 5, rounding(1))
    assert told["ratio_deviation"] == near(0.102, rounding(2, size=10.0))
    assert told["log_prob_drift"] == near(0.3, rounding(1))


def test_dgpos_gradient_is_the_groups_weight_times_the_advantage_and_none_behind_either_bound():
    """Of exp(e_old - e), where the error e is 1, and d e / dv = 2."""
    c, zero, sums = 0.1, torch.zeros(8, 1), torch.linspace(-2, 3, 8)
    velocity = torch.full((8, 1), 1.5, requires_grad=True)
    old = 0.5 + (1 + (1 + c * torch.tensor(SIDES).repeat(2)).log()).sqrt()[:, None]
    given = Noised(
        image=zero, noise=zero + 0.5, x=zero, sigma=zero[:, 0], advantages=ADVANTAGES,
        velocity=velocity, old=old, group_sum=sums,
    )  # fmt: skip
    (slope,) = torch.autograd.grad(DGPO(clip_range=c).member_loss(given).sum(), velocity)
    expected = torch.where(HELD, 0, 2 * ADVANTAGES * sums.sigmoid())
    torch.testing.assert_close(slope[:, 0], expected, **rounding(20))
