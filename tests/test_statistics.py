"""Bootstrap intervals against normal theory and their edges; samples in proportion."""

import math

import numpy as np
import pytest

from g2rpo.statistics import bootstrap_mean, in_proportion


def sample(count, seed=0, scale=2.0):
    return np.random.default_rng(seed).normal(1.0, scale, count)


def test_the_interval_of_a_normal_sample_is_normal_theorys():
    """mean +- 1.96 s / sqrt(N), with s dividing by N (the bootstrap's own). 20,000 resamples: the 2.5 % quantile of a normal
    has standard error sqrt(.025 * .975 / 20000) / density(1.96) = 0.019 of the half-width's sigma; 5 of those are 5 % of it."""
    values = sample(400)
    interval = bootstrap_mean(values, resamples=20_000)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert interval.mean == values.mean() and interval.count == 400
    assert interval.mean - interval.low == pytest.approx(half, rel=0.05)
    assert interval.high - interval.mean == pytest.approx(half, rel=0.05)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """200 samples of 50: 90 % intervals (of which the percentile bootstrap at N = 50 loses about 1.5 points) should hold the
    true mean 177 times; the standard deviation of that count is 4.5, and 4 of those are allowed."""
    held = sum(
        interval.low <= 1.0 <= interval.high
        for interval in (bootstrap_mean(sample(50, seed), level=0.9, resamples=400, seed=seed) for seed in range(200))
    )
    assert 159 <= held <= 195


def test_pairing_removes_what_both_share():
    prompts, noise = sample(100, scale=5.0), sample(100, seed=1, scale=0.1)
    alone, paired = bootstrap_mean(prompts + noise), bootstrap_mean((prompts + noise) - prompts)
    assert paired.high - paired.low < 0.05 * (alone.high - alone.low)


def test_an_interval_is_a_function_of_its_arguments():
    values = sample(30)
    assert bootstrap_mean(values) == bootstrap_mean(values) != bootstrap_mean(values, seed=1)


def test_missing_scores_are_left_out():
    values = sample(30)
    assert bootstrap_mean([*values, math.nan]) == bootstrap_mean(values)


def test_few_values_give_no_interval():
    few, none = bootstrap_mean([1.0, 3.0, 2.0]), bootstrap_mean([math.nan])
    assert (few.mean, few.count) == (2.0, 3) and math.isnan(few.low)
    assert math.isnan(none.mean) and none.count == 0


def test_a_sample_is_in_proportion():
    """5 of 12 with outcomes 6, 3, 2, 1 times: 2.5, 1.25, .83 and .42 of them. Rounded down 2, 1, 0, 0; two remainders are
    largest."""
    stays, gains, fails, loses = (True, True), (False, True), (False, False), (True, False)
    outcomes = [fails, stays, stays, gains, stays, loses, stays, gains, stays, fails, stays, gains]
    assert in_proportion(outcomes, 5) == [0, 1, 2, 3, 4]
    assert in_proportion(outcomes, 12) == in_proportion(outcomes, 20) == list(range(12))
