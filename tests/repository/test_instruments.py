"""The instruments of a study by hand and against known shares."""

import math

import numpy as np
import pytest
import torch

from studies.credit import alignment_of, explained
from studies.directions import correlation_parts, cosine_parts, ratio


def test_an_alignment_is_with_the_direction_of_the_others():
    """A prompt's own vector is taken out."""
    random = torch.Generator().manual_seed(0)
    vectors, common = torch.randn(2, 3, 4, generator=random, dtype=torch.float64)
    by_hand = [float(vectors[i] @ (common.sum(0) - common[i])) for i in range(3)]
    scale = float(vectors.square().sum(1).mean().sqrt() * common.sum(0).norm())
    assert alignment_of(vectors, common)[0] == pytest.approx(sum(by_hand) / 3 / scale)
    assert alignment_of(torch.zeros(3, 4), common) == (0, 0)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_explained_is_the_intraclass_correlation(share):
    """100 prompts of 40 by 4 normal values around means that must not matter. The interval is of 95
    %, about 4 standard errors wide; 5 of them are allowed."""
    random = np.random.default_rng(1)
    rows = random.normal(0, math.sqrt(share), (100, 40, 1))
    rest = random.normal(0, math.sqrt(1 - share), (100, 40, 4))
    found = explained(random.normal(0, 9, (100, 1, 1)) + rows + rest)
    assert abs(found.mean - share) < 5 / 4 * (found.high - found.low) < 0.12
    assert math.isnan(explained(np.ones((2, 3, 3))).mean)


@pytest.mark.slow  # 15 seconds each
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_correlations_and_cosines_are_those_of_rewards_that_are_linear_in_the_noise(share):
    """200 prompts of 60 scores in 5 dimensions; a share of the reward's variance is linear in the
    first. A's correlation with it is the root of the share. 12 scores of a group give an update with
    |G|^2 = share and, beside it, five variances of about 1/12 each."""
    random = np.random.default_rng(2)
    sums = []
    for _ in range(200):
        scores = random.normal(size=(60, 5))
        rest = random.normal(0, math.sqrt(1 - share), 60)
        rewards = torch.tensor(math.sqrt(share) * scores[:, 0] + rest)
        k = scores @ scores.T
        sums.append((correlation_parts(k, rewards), cosine_parts(k, rewards, rewards[None], 12)))
    correlation, cosine = (float(ratio(np.sum(own, 0))) for own in zip(*sums, strict=True))
    assert 0.9 * math.sqrt(share) - 0.1 < correlation < 1.02 * math.sqrt(share)
    assert cosine == pytest.approx(math.sqrt(share / (share + 5 / 12)), abs=0.05)
    silent = correlation_parts(k, torch.ones(60, dtype=torch.float64))
    assert silent.tolist() == [0, 0, 0, 1]
