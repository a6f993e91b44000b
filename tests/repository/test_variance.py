"""`benchmarks.variance` against what it should find, and the formulas of docs/algorithm.md that no option uses."""

import math

import pytest
import torch

from benchmarks.variance import VARIANTS, anchor_distance, pair_correlation, price, repeated
from g2rpo.objectives import group_normalize


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rho", [-1.0, -0.3, 0.0, 0.6])
def test_a_pair_correlation_has_no_bias(rho):
    """2000 groups of three pairs around means that must not matter; without the correction 0 would come out as -.2. Within 4 of
    the stated errors, and these within .02."""
    common, own = normal(2000, 3, 1), normal(2000, 3, 2, seed=1)
    sign = torch.tensor([1.0, math.copysign(1, rho)])
    pairs = math.sqrt(abs(rho)) * sign * common + math.sqrt(1 - abs(rho)) * own
    found, error = pair_correlation(pairs.flatten(1) + 9 * normal(2000, 1, seed=2))
    assert abs(found - rho) < 4 * error + 1e-9 and error < 0.02


def test_an_anchors_distance_has_no_bias():
    """Rewards of variance 4 around a mean that is 1 away from the anchor's: 1 / 4. The distance of 5000 means of 6 errs by
    about (2 * 2 / sqrt 6 + 4 / 6) / 4 / sqrt 5000 = .008."""
    anchor = 5 * normal(5000)
    found = anchor_distance(2 * normal(5000, 6, seed=1) + anchor[:, None] + 1, anchor)
    assert found == pytest.approx(0.25, abs=0.032)


def test_what_a_second_group_repeats():
    """Means of length^2 50 and noise of 100 dimensions: a third. Within 4 of the stated errors, and these within .01."""
    mean = normal(400, 100) * math.sqrt(0.5)
    found, error = repeated(mean + normal(400, 100, seed=1), mean + normal(400, 100, seed=2))
    assert abs(found - 1 / 3) < 4 * error and error < 0.01


def test_what_a_variant_costs():
    """Steps 0 and 3 of 6, groups of 4: an anchor of 4 evaluations, fine tails of 5 and 2, published coarse ones of 3 and 1, all
    but one of them common; two latents trained at three evaluations each; the anchor's own tail has two more."""
    cost = {name: price((0, 3), 6, 4, name) for name in VARIANTS}
    anchor, trained = 4, 6
    fine, coarse, both = 4 * (5 + 2), 4 * (3 + 1), 4 * (6 + 2)
    assert list(cost.values()) == [
        anchor + trained + more for more in (fine, fine, fine + 2, coarse, 2 * coarse, both, fine + coarse)
    ]


def worth(advantages, e):
    """The squared signal-to-noise ratio per dimension, relative to |s|^2 / D: signal along dimension 0, noise across."""
    gradients = (advantages[:, :, None] * e).mean(1)
    return float(gradients[:, 0].mean() ** 2 / gradients[:, 1:].square().mean())


@pytest.mark.parametrize("away", [0.0, 0.3, 1.0])
def test_the_anchors_reward_as_a_baseline(away):
    """G / (1 + d^2) beside the group mean's G - 1, for a linear reward of known std. 40,000 groups of 12: the signal errs by
    sqrt(2 / 12 / 40,000) = .002, the noise by less; 4 of those, twice for the square."""
    e = normal(40_000, 12, 8)
    r = e[:, :, 0]
    baseline = away * torch.ones(40_000, 1)
    assert worth(r - baseline, e) == pytest.approx(12 / (1 + away**2), rel=0.02)
    assert worth(r - r.mean(1, keepdim=True), e) == pytest.approx(11, rel=0.02)


@pytest.mark.parametrize("rho", [0.3, 0.8])
def test_noise_of_their_own_is_worth_more_for_two_granularities(rho):
    """(1 + rho)^2 / 2 of a group's own worth, against (1 + rho) / 2 with common noise. The coarse reward's other part has no
    linear component. Errors as above."""
    e, other = normal(40_000, 12, 8), normal(40_000, 12, 8, seed=1)

    def rewards(e):
        nonlinear = (e[:, :, 1].abs() > 0.6744897502) * 2.0 - 1
        return e[:, :, 0], rho * e[:, :, 0] + math.sqrt(1 - rho**2) * nonlinear

    (fine, coarse), (_, own) = rewards(e), rewards(other)
    one = worth(group_normalize(fine), e)
    common = worth(group_normalize(fine) + group_normalize(coarse), e)
    gradient = torch.cat([group_normalize(fine), group_normalize(own)], 1), torch.cat([e, other], 1)
    assert common / one == pytest.approx((1 + rho) / 2, rel=0.04)
    assert worth(*gradient) / one == pytest.approx((1 + rho) ** 2 / 2, rel=0.04)


def test_a_rewards_gradient_leaves_the_noise_of_what_is_not_linear():
    """r = 2 e_0 + b with b = 1 or -1 as |e_1| is large: less its gradient times e, plus that gradient, only b's noise is left,
    1 / G a dimension, where the reward's own has 5 / G."""
    e = normal(20_000, 12, 8)
    nonlinear = (e[:, :, 1].abs() > 0.6744897502) * 2.0 - 1
    r, h = 2 * e[:, :, 0] + nonlinear, torch.tensor([2.0] + [0.0] * 7, dtype=torch.float64)
    plain, controlled = ((r[:, :, None] * e).mean(1), ((r - e @ h)[:, :, None] * e).mean(1) + h)
    for gradients, noise in ((plain, 5 / 12), (controlled, 1 / 12)):
        torch.testing.assert_close(gradients.mean(0), h, atol=4 * math.sqrt(noise * 2 / 20_000) * 1.5, rtol=0)
        assert float(gradients[:, 2:].var(0).mean()) == pytest.approx(noise, rel=0.02)
