"""Diagnostics against values worked out by hand."""

import math

import pytest
import torch

from g2rpo.train.rows import noise_metrics, reward_metrics
from tests.support.tolerances import near, rounding

NAN = math.nan


def test_diagnose_by_hand():
    """Two groups at step 0, one at step 3; one reward; granularities 2 and 1 (the finest is not the
    first)."""
    rewards = torch.tensor(
        [
            [[[0.0, 2.0], [0.0, 4.0]]],  # spreads sqrt 2 and 2 sqrt 2; the tails agree
            [[[0.0, 2.0], [4.0, 0.0]]],  # the same spreads; they do not
            [[[1.0, 1.0], [0.0, 2.0]]],  # spreads 0 and sqrt 2; nothing to agree on
        ]
    )
    advantages = torch.tensor([[1.0, -1.0], [2.0, -2.0], [0.5, 0.0]])
    row = noise_metrics([0, 0, 3], [[2, 1]] * 3, ["r"], rewards, advantages)
    root = math.sqrt(2)
    expected = {
        "step/0/spread/r": 1.5 * root,
        "step/0/advantage": 1.5,
        "step/0/agreement": 0.0,
        "step/3/spread/r": 0.5 * root,
        "step/3/advantage": 0.25,
        "step/3/agreement": NAN,
        "granularity/2/spread/r": 2 / 3 * root,
        "granularity/2/agreement": 0.0,
        "granularity/1/spread/r": 5 / 3 * root,
    }
    assert row == near(expected, rounding(10), nan_ok=True)


def test_agreement_of_three_tails_is_over_pairs_and_against_the_finest():
    up, down = [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]
    row = noise_metrics([5], [[1, 2, 3]], ["r"], torch.tensor([[[up, up, down]]]), torch.ones(1, 3))
    found = {name: value for name, value in row.items() if name.endswith("agreement")}
    assert found == pytest.approx(
        {
            "step/5/agreement": (1 - 1 - 1) / 3,
            "granularity/2/agreement": 1,
            "granularity/3/agreement": -1,
        }
    )


def test_reward_metrics_by_hand():
    """Groups with no score, with one, with two, and with one of the first reward and all of the
    second: one reward with two scores is enough to learn from. The last advantage is at the
    clip."""
    some = [1.0, 2.0, 3.0]
    first = [[NAN, NAN, NAN], [1.0, NAN, NAN], [1.0, 3.0, NAN], [5.0, NAN, NAN]]
    rewards = torch.tensor([first, [[NAN] * 3, [NAN] * 3, [NAN] * 3, some]]).transpose(0, 1)[
        :, :, None
    ]
    advantages = torch.tensor(
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [-1.0, 0.0, -2.0]]
    )
    assert reward_metrics(["a", "b"], rewards, advantages, clip=2.0) == near(
        {
            "reward/a": 10 / 4,
            "reward/b": 2.0,
            "spread/a": math.sqrt(2),
            "spread/b": 1.0,
            "missing_scores": 17 / 24,
            "masked_groups": 0.5,
            "silent_groups": 0.5,
            "advantage_size": 5 / 12,
            "advantage_clipped": 1 / 12,
        },
        rounding(10),
    )
