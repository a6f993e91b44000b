"""Diagnostics against values worked out by hand."""

import math

import pytest
import torch

from g2rpo.core.statistics import group_std, ranks, spearman
from g2rpo.monitor.diagnostics import diagnose
from tests.support.runs import trainer

NAN = math.nan


def test_ranks_by_hand():
    assert ranks(torch.tensor([3.0, 1.0, 2.0])).tolist() == [3, 1, 2]
    assert ranks(torch.tensor([5.0, 1.0, 5.0, 5.0])).tolist() == [3, 1, 3, 3]  # (2 + 3 + 4) / 3
    one, nothing, two = ranks(torch.tensor([-1.0, NAN, 4.0])).tolist()
    assert (one, two) == (1, 2) and math.isnan(nothing)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 10.0, 100.0], 1.0),
        ([1.0, 2.0, 3.0], [5.0, 4.0, -3.0], -1.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 1.0, 4.0, 3.0, 5.0], 0.8),  # 1 - 6 * (4 * 1) / (5 * 24)
        ([1.0, 2.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0], 4.5 / math.sqrt(4.5 * 5)),  # ranks 1 2.5 2.5 4 against 1 2 3 4
        ([1.0, NAN, 3.0, 2.0], [9.0, 6.0, 5.0, 7.0], -1.0),  # the member without a score is out of both rankings
        ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], NAN),
        ([1.0, NAN, NAN], [1.0, 2.0, 3.0], NAN),
        ([NAN, NAN], [NAN, NAN], NAN),
    ],
)
def test_spearman_by_hand(a, b, expected):
    """Ranks are halves and sums of few of them: float64 is exact up to the root and the quotient."""
    a, b = torch.tensor(a), torch.tensor(b)
    for value in (spearman(a, b), spearman(b, a), spearman(a.exp(), b)):  # symmetric, and blind to what keeps the order
        assert float(value) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_spearman_is_taken_row_by_row():
    a = torch.rand(2, 3, 7, generator=torch.Generator().manual_seed(0))
    b = torch.rand(2, 3, 7, generator=torch.Generator().manual_seed(1))
    rows = torch.stack([torch.stack([spearman(a[i, j], b[i, j]) for j in range(3)]) for i in range(2)])
    assert torch.equal(spearman(a, b), rows)


def test_group_std_leaves_missing_scores_out():
    std = group_std(torch.tensor([[1.0, NAN, 3.0, NAN], [2.0, 2.0, 2.0, 2.0], [1.0, NAN, NAN, NAN]]))
    assert std[:2].tolist() == [pytest.approx(math.sqrt(2)), 0.0] and std[2].isnan()
    values = torch.rand(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(group_std(values), values.std(-1))


def test_diagnose_by_hand():
    """Two groups at step 0, one at step 3; one reward; granularities 2 and 1 (the finest is not the first)."""
    rewards = torch.tensor(
        [
            [[[0.0, 2.0], [0.0, 4.0]]],  # spreads sqrt 2 and 2 sqrt 2; the tails agree
            [[[0.0, 2.0], [4.0, 0.0]]],  # the same spreads; they do not
            [[[1.0, 1.0], [0.0, 2.0]]],  # spreads 0 and sqrt 2; nothing to agree on
        ]
    )
    advantages = torch.tensor([[1.0, -1.0], [2.0, -2.0], [0.5, 0.0]])
    row = diagnose([0, 0, 3], [[2, 1]] * 3, ["r"], rewards, advantages)
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
    assert row == pytest.approx(expected, nan_ok=True)


def test_agreement_of_three_tails_is_over_pairs_and_against_the_finest():
    up, down = [1.0, 2.0, 3.0], [3.0, 2.0, 1.0]
    row = diagnose([5], [[1, 2, 3]], ["r"], torch.tensor([[[up, up, down]]]), torch.ones(1, 3))
    assert row["step/5/agreement"] == pytest.approx((1 - 1 - 1) / 3)
    assert (row["granularity/2/agreement"], row["granularity/3/agreement"]) == (pytest.approx(1), pytest.approx(-1))
    assert "granularity/1/agreement" not in row


def test_a_run_logs_them():
    row = trainer(None).iterate()
    assert {key for key in row if key.startswith(("step/", "granularity/"))} == {
        *(f"step/{k}/{what}" for k in (0, 1, 2) for what in ("spread/bright", "advantage", "agreement")),
        *(f"granularity/{m}/spread/bright" for m in (1, 2)),
        "granularity/2/agreement",
    }
    assert row["step/2/spread/bright"] > 0 and row["granularity/2/agreement"] > 0.9  # the Gaussian's tails hardly differ
    mean = sum(row[f"step/{k}/spread/bright"] for k in (0, 1, 2)) / 3
    assert mean == pytest.approx(row["spread/bright"])
    assert not any("agreement" in key for key in trainer(None, "algorithm.granularities=[1]").iterate())
