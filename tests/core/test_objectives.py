"""Advantages and losses against formulas by hand and torch's own distributions."""

import math
from functools import cache

import pytest
import torch
from torch.testing import assert_close

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.noise import Normal
from g2rpo.core.objectives import (
    clipped_surrogate,
    group_normalize,
    kernel_kl,
    mix_rewards,
    without_rounding,
)
from tests.support.tolerances import EXACT, near, rounding

NAN = float("nan")


def test_group_normalize_is_the_z_score_with_unbiased_std():
    r = torch.tensor([1.0, 2.0, 4.0])
    std = math.sqrt(((1 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2) / 2)
    assert_close(group_normalize(r), (r - 7 / 3) / std, **rounding(8, size=3.0))


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 1e6 + 0.1, -3.3])
def test_ties_have_exactly_no_advantage(value):
    """Also in float64, where the mean of three times 0.1 is a bit more than 0.1."""
    for ties in (torch.full((2, 12), value), torch.full((3,), value, dtype=torch.float64)):
        assert torch.equal(group_normalize(ties), torch.zeros_like(ties))


@cache
def reordered_sums(count):
    """Scores of one picture of `count` numbers, each summed in another order, as in another place
    of a batch."""
    generator = torch.Generator().manual_seed(count)
    picture = torch.rand(count, generator=generator)
    orders = [torch.randperm(count, generator=generator) for _ in range(24)]
    return torch.stack([picture[order].mean() for order in orders])


@pytest.mark.parametrize("count", [768, 3 * 64 * 64, 3 * 512 * 512])
@pytest.mark.parametrize("mix", ["advantages", "rewards", "gdpo"])
def test_scores_that_differ_by_rounding_are_a_tie(count, mix):
    """With the published eps of 1e-8 they would be advantages of size 1; in a sum of rewards also
    where the larger parts cancel."""
    scores = reordered_sums(count)
    assert len(scores.unique()) > 1
    rewards = torch.stack([scores, -reordered_sums(count)[torch.randperm(24)]])[None, :, None]
    assert torch.equal(mix_rewards(rewards, torch.tensor([1.0, 1.0]), mix), torch.zeros(1, 24))
    with_gap = torch.where(torch.arange(24) == 3, NAN, scores)
    assert torch.equal(group_normalize(with_gap), torch.zeros(24))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [1.0, -0.3, 1e6])
def test_scores_that_differ_by_more_than_rounding_are_normalised_as_they_are(largest, dtype):
    eps = torch.finfo(dtype).eps
    differing = torch.tensor([largest, largest * (1 - 10 * eps), NAN], dtype=dtype)
    assert_close(without_rounding(differing), differing, **EXACT, equal_nan=True)
    tie = torch.tensor([largest, largest * (1 - 6 * eps), NAN], dtype=dtype)
    assert torch.equal(group_normalize(tie), torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1.0, NAN, 2.0, 3.0], [-1, 0, 0, 1]),
        ([NAN] * 4, [0] * 4),
        ([NAN, NAN, NAN, 3.0], [0] * 4),  # one score teaches nothing
    ],
)
def test_a_missing_score_is_masked_out_of_its_group(scores, expected):
    assert group_normalize(torch.tensor(scores)).tolist() == near(expected, rounding(8))


def test_surrogate_has_the_policy_gradient_at_ratio_one_and_is_flat_beyond_the_clip():
    log_prob = torch.zeros(4, requires_grad=True)
    old = torch.tensor([0.0, 0.0, -0.5, 0.5])  # ratios 1, 1, e^0.5, e^-0.5
    advantages = torch.tensor([2.0, -1.0, 1.0, -1.0])
    clipped_surrogate(log_prob - old, advantages, 0.1).sum().backward()
    assert_close(log_prob.grad, torch.tensor([-2.0, 1.0, 0.0, 0.0]), **EXACT)


def test_the_clipped_surrogate_is_pessimistic():
    old = torch.tensor([-0.5, -0.5])
    loss = clipped_surrogate(-old, torch.tensor([1.0, -1.0]), 0.1)
    assert_close(loss, torch.tensor([-1.1, math.exp(0.5)]), **rounding(4))


def test_kernel_kl_is_torchs_per_entry():
    mean, reference = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    std = torch.tensor([0.2, 0.5, 1.0])
    spread = std[:, None].expand(3, 5)
    theirs = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, spread), torch.distributions.Normal(reference, spread)
    ).mean(1)
    assert_close(
        kernel_kl(Normal(mean, std), Normal(reference, std)), theirs, **rounding(20, size=1.0)
    )


UP = torch.tensor([0.0, 1.0, 2.0])  # normalises to -1, 0, 1
GROUPS = torch.stack([UP, UP, 10 * UP, -10 * UP]).view(1, 2, 2, 3)  # [N, R, M, G]


def test_advantages_sum_over_rewards_and_granularities_then_clamp():
    algorithm = GranularGRPO(group_size=3, granularities=(1, 2), advantage_clip=1.5)
    for weights, largest in (([1.0, 1.0], 1.5), ([0.25, 1.0], 0.5)):
        advantages = algorithm.advantages(GROUPS, torch.tensor(weights))
        assert advantages.tolist() == [near([-largest, 0, largest], rounding(8))]


def test_mixing_rewards_before_normalising_lets_their_scales_matter():
    """Granularity 1: UP + 10 UP rises; granularity 2: UP - 10 UP falls; they cancel. With weight 0
    there is one ramp."""
    for weights, largest in (([1.0, 1.0], 0), ([1.0, 0.0], 2)):
        mixed = mix_rewards(GROUPS, torch.tensor(weights), "rewards")
        assert mixed.tolist() == [near([-largest, 0, largest], rounding(8, size=2.0))]


def test_gdpo_whitens_the_batch_of_summed_advantages():
    groups = torch.randn(4, 2, 1, 6, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([1.0, 0.5])
    summed = mix_rewards(groups, weights, "advantages")
    expected = (summed - summed.mean()) / summed.std()
    assert_close(mix_rewards(groups, weights, "gdpo"), expected, **rounding(2 * 24, size=3.0))


@pytest.mark.parametrize("mix", ["advantages", "rewards", "gdpo"])
def test_missing_scores_are_masked_in_every_mix(mix):
    """Of a member, and of a whole reward whose weight is 0."""
    groups = GROUPS.clone()
    groups[0, :, :, 1] = NAN
    mixed = mix_rewards(groups, torch.tensor([1.0, 0.0]), mix)
    assert mixed[0, 1] == 0 and mixed[0, 0] == -mixed[0, 2] < 0
    rewards = torch.rand(2, 2, 1, 4)
    rewards[:, 1] = NAN
    alone = mix_rewards(rewards[:, :1], torch.ones(1), mix)
    assert torch.equal(mix_rewards(rewards, torch.tensor([1.0, 0.0]), mix), alone)
    assert alone.abs().min() > 0


def test_gdpo_leaves_groups_of_equal_rewards_and_members_without_a_score_at_0():
    rewards = torch.rand(3, 1, 1, 4)
    rewards[0], rewards[1, 0, 0, 0] = 0.3, math.nan
    mixed = mix_rewards(rewards, torch.ones(1), "gdpo")
    assert not mixed[0].any() and mixed[1, 0] == 0 and mixed[2].abs().min() > 0
