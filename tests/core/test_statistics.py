"""Intervals against scipy's and by their coverage; samples in proportion; ranks and their
correlation by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import linregress, t, ttest_1samp

from g2rpo.core.statistics import (
    FEWEST_VALUES,
    Comparison,
    group_std,
    in_proportion,
    interval,
    interval_of_scores,
    paired,
    possible,
    ranks,
    rise,
    spearman,
)
from tests.support.tables import rows

NAN = math.nan


def numbers(text):
    return [*map(float, text.split())]


def sample(count, seed=0, scale=2.0):
    return np.random.default_rng(seed).normal(1.0, scale, count)


def study(seed):
    """Seed effect + prompt effect + noise, 12 seeds by 40 prompts; the true mean is 0."""
    random = np.random.default_rng(seed)
    return (
        random.normal(0, 0.3, (12, 1))
        + random.normal(0, 0.5, (1, 40))
        + random.normal(0, 0.5, (12, 40))
    )


@pytest.mark.parametrize("count", [8, 400])
def test_over_prompts_the_interval_is_students(count):
    values = sample(count)
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    found = interval(values)
    expected = pytest.approx((values.mean(), low, high), rel=1e-12)
    assert (found.mean, found.low, found.high) == expected and found.count == count
    assert interval(values[None]) == found == interval([*values, math.nan])


def test_over_seeds_the_interval_covers_the_truth_as_often_as_it_says():
    """200 studies of 90 % intervals. At 12 seeds their spread is underestimated by 11/12 and the
    noise is counted up to three times, so about 176 should hold the truth; the standard deviation
    of that count is 4.6, and 4 of them are allowed. Intervals over prompts alone hold it far less
    often."""
    studies = [study(seed) for seed in range(200)]
    over_seeds = [
        interval(values, level=0.9, resamples=400, seed=seed) for seed, values in enumerate(studies)
    ]
    over_prompts = [interval(values.mean(0), level=0.9) for values in studies]
    held, alone = (
        sum(each.low <= 0 <= each.high for each in those) for those in (over_seeds, over_prompts)
    )
    assert 158 <= held <= 194 and alone < 158


def test_missing_scores_are_left_out():
    values = np.random.default_rng(0).normal(size=(3, 20))
    wider = np.concatenate([values, np.full((3, 1), np.nan)], 1)
    assert interval(wider).mean == interval(values).mean and interval(wider).count == 60
    values[1] = np.nan
    assert (
        interval(values).mean == pytest.approx(np.nanmean(values)) and interval(values).count == 40
    )


def test_few_values_give_no_interval():
    for few, mean, count in (([1.0, 3.0, 2.0], 2.0, 3), ([1.0], 1.0, 1), ([[NAN] * 3] * 2, NAN, 0)):
        found = interval(np.array(few))
        assert (found.mean, found.count) == pytest.approx((mean, count), nan_ok=True)
        assert math.isnan(found.low)


def test_an_interval_is_shown_where_there_is_one():
    shown = f"{interval([1.0, 3.0])}", f"{interval([0.5] * 8):+}"
    assert shown == ("2.000", "+0.500 ± 0.000")
    assert f"{interval([0.5] * 8).within(0.5, 0.6):+}" == "+0.500 ± 0.000"
    assert f"{interval([0.0, 1.0] * 4).within(0.0, 0.6)}" == "0.500 [0.053, 0.600]"


POSSIBLE = """
0 1 1 -> 0 1
.5 1 nan -> -inf 1
0 .5 -> 0 inf
.2 .3 -> -inf inf
-1 0 1 -> -inf inf
0 1 7 -> -inf inf
nan -> -inf inf
"""
"""Scores, and the ends that are known."""


@pytest.mark.parametrize(("scores", "ends"), rows(POSSIBLE))
def test_intervals_of_scores_from_0_to_1_stay_there(scores, ends):
    """0.938 [0.804, 1.071] of a share, and rises by more than is left."""
    assert [*possible(torch.tensor(numbers(scores)))] == numbers(ends)
    tuned = torch.tensor([1.0] * 15 + [0.0])
    assert interval_of_scores(tuned).high == 1
    assert paired(torch.tensor([1.0, 0.0] * 8), tuned).change.high == 0.5
    assert paired(tuned, 2 * tuned).change.high > 1


def test_a_rise_is_that_of_the_least_squares_line_with_its_interval():
    """float64 sums of 40 numbers."""
    values = 0.5 + 0.02 * np.arange(40) + 0.1 * np.random.default_rng(0).standard_normal(40)
    line = linregress(np.arange(40), values)
    expected = 39 * line.slope, 39 * line.stderr * t.ppf(0.975, 38)
    assert rise(list(values)) == pytest.approx(expected, rel=1e-9)
    assert math.isnan(rise([1.0, 2.0])[0])


def test_a_sample_is_in_proportion():
    """5 of 12 with outcomes 6, 3, 2, 1 times: 2.5, 1.25, .83 and .42 of them. Rounded down 2, 1, 0,
    0; two remainders are largest."""
    stays, gains, fails, loses = (True, True), (False, True), (False, False), (True, False)
    outcomes = [fails, stays, stays, gains, stays, loses, stays, gains, stays, fails, stays, gains]
    assert in_proportion(outcomes, 5) == [0, 1, 2, 3, 4]
    assert in_proportion(outcomes, 12) == in_proportion(outcomes, 20) == list(range(12))


def test_ranks_by_hand():
    assert ranks(torch.tensor([3.0, 1.0, 2.0])).tolist() == [3, 1, 2]
    assert ranks(torch.tensor([5.0, 1.0, 5.0, 5.0])).tolist() == [3, 1, 3, 3]  # (2 + 3 + 4) / 3
    one, nothing, two = ranks(torch.tensor([-1.0, NAN, 4.0])).tolist()
    assert (one, two) == (1, 2) and math.isnan(nothing)


SPEARMAN = """
1 2 3 -> 5 4 -3 -> -1
1 2 3 4 5 -> 2 1 4 3 5 -> 0.8
1 2 2 3 -> 1 2 3 4 -> 0.9486832980505138
1 nan 3 2 -> 9 6 5 7 -> -1
1 nan nan -> 1 2 3 -> nan
"""
"""1 - 6 (4 x 1) / (5 x 24) = .8. Ranks 1 2.5 2.5 4 against 1 2 3 4: 4.5 / sqrt(4.5 x 5). A member
without a score is out of both rankings."""


@pytest.mark.parametrize(("a", "b", "expected"), rows(SPEARMAN))
def test_spearman_by_hand(a, b, expected):
    """Ranks are halves and sums of few of them: float64 is exact up to the root and the
    quotient."""
    a, b = torch.tensor(numbers(a)), torch.tensor(numbers(b))
    # symmetric, and blind to what keeps the order
    for value in (spearman(a, b), spearman(b, a), spearman(a.exp(), b)):
        assert float(value) == pytest.approx(float(expected), abs=1e-12, nan_ok=True)


def test_group_std_leaves_missing_scores_out():
    std = group_std(torch.tensor([[1.0, NAN, 3.0, NAN], [2.0] * 4, [1.0, NAN, NAN, NAN]]))
    assert std[:2].tolist() == [pytest.approx(math.sqrt(2)), 0.0] and std[2].isnan()
    values = torch.rand(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(group_std(values), values.std(-1))


def test_a_paired_comparison_is_of_the_prompts_that_both_have_in_float64():
    """Scores near 20 that differ by a thousandth: float32, which rounds each by 2e-6, keeps three
    digits of the error."""
    random = np.random.default_rng(0)
    before = torch.tensor(20 + random.normal(size=64), dtype=torch.float32)
    after = before + torch.tensor(1e-3 * random.normal(size=64), dtype=torch.float32)
    before[3], after[5] = math.nan, math.nan
    found = paired(before, after)
    base, tuned = (np.delete(values.double().numpy(), [3, 5]) for values in (before, after))
    assert found.count == 62 and found.spread == pytest.approx(base.std(ddof=1), rel=1e-12)
    assert found.error == pytest.approx((tuned - base).std(ddof=1) / math.sqrt(62), rel=1e-12)
    assert (found.base, found.tuned) == pytest.approx((base.mean(), tuned.mean()), rel=1e-14)
    width = interval(tuned - base)
    assert found.change == width
    stored = Comparison(**found.stored).change  # what is read from results.json
    assert (stored.low, stored.high) == pytest.approx((width.low, width.high), rel=1e-9)


def test_too_few_values_have_no_interval_and_no_fall():
    for count in (0, 1, FEWEST_VALUES - 1):
        found = paired(torch.ones(count), torch.zeros(count))
        assert math.isnan(found.change.low) and "±" not in found.cells[2]
        assert (found.chance_of_fall, found.count) == (1, count)
