"""The head: the choice model, its fit, and how far it may be trusted."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from g2rpo.core.noise import generator_for
from g2rpo.rewards import head as heads
from g2rpo.rewards.head import Choice, Head, agreement_interval, features_of, fit
from g2rpo.rewards.pairs import Pairs
from tests.support.pictures import noise
from tests.support.tolerances import near, reordered, rounding

THETA = torch.tensor([2.0, -1.0, 0.0, 0.0])


def choices(count, theta=THETA, seed=0, size=12, slips=0.0):
    """Choices by a Plackett-Luce person with the utility theta . z, a share of them at random; a
    second block is noise."""
    found = []
    for group in range(count):
        generator = generator_for(seed, "group", group)
        z, other = (torch.randn(size, width, generator=generator) for width in (4, 6))
        gumbel = -torch.log(-torch.log(torch.rand(size, generator=generator)))
        best = int((z @ theta + gumbel).argmax())
        if float(torch.rand((), generator=generator)) < slips:
            best = int(torch.randint(size, (), generator=generator))
        found.append(Choice({"noise": other, "right": z}, (best,), group))
    return found


def test_the_head_finds_the_block_and_the_direction_of_a_taste():
    """Of 60 choices among 12 the Fisher information is at least 60 times the variance left within a
    group of a softmax, some .3 for each coordinate: an error of 1 / sqrt(18) = .24 each beside
    |theta| = 2.2, so the cosine is above .97."""
    clicks = choices(60)
    head = fit(clicks)
    assert head.block == "right"
    assert torch.nn.functional.cosine_similarity(head.direction.float(), THETA, dim=0) > 0.97
    values = [head(one.features) for one in clicks]
    every = torch.cat(values)
    rounded = reordered(len(every), size=float(every.abs().mean()))["atol"]
    assert abs(float(every.mean())) < rounded
    spread = torch.stack([one.var(correction=0) for one in values]).mean()
    assert float(spread) == near(1, reordered(len(every), size=1.0))
    assert head.agreement.low > 0.8 and head.trusted
    assert not replace(head, agreement=replace(head.agreement, low=0.5)).trusted
    three = replace(head, agreement=agreement_interval([1.0, 0.5, 0.6]))
    assert three.agreed == pytest.approx(0.7) and three.agreement.mean == pytest.approx(0.65)


def posterior_of(block):
    """The log-posterior of all choices at a prior deviation of sqrt(3), but for a constant."""
    everyone = range(len(block.groups))
    return lambda theta: block.likelihood(theta, everyone) - theta @ theta / 6


def test_a_posterior_mode_has_no_gradient():
    """By finite differences, slips and several liked pictures included. All is float64, whose
    rounding of values near 30 is 1e-9 of such a difference."""
    group = choices(8, slips=0.3)
    group[0] = Choice(group[0].features, (2, 5, 7), 0)
    block, everyone = heads._Block.of("right", group), list(range(8))
    theta, posterior = block.fit(everyone, 3.0), posterior_of(block)
    steps = 1e-5 * np.eye(len(theta))
    gradient = [(posterior(theta + step) - posterior(theta - step)) / 2e-5 for step in steps]
    assert np.abs(gradient).max() < 1e-3 < np.abs(theta).max()


def test_the_curvature_is_the_second_derivative_of_choices_that_are_meant(monkeypatch):
    """By finite differences, without slips, which it leaves out: an error of step^2, 1e-8, times
    fourth derivatives, and of rounding of four values near 30, 7e-7."""
    monkeypatch.setattr(heads, "SLIP_SHARE", 0.0)
    group = choices(6)
    group[0] = Choice(group[0].features, (2, 5), 0)
    block, everyone = heads._Block.of("right", group), list(range(6))
    theta, steps = np.array([0.5, -0.2, 0.1, 0.3]), 1e-4 * np.eye(4)
    posterior = posterior_of(block)

    def second(one, other):
        sides = [(1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)]
        return sum(c * posterior(theta + a * one + b * other) for a, b, c in sides) / 4e-8

    found = [[-second(one, other) for other in steps] for one in steps]
    np.testing.assert_allclose(block.curvature(theta, everyone, 3.0), found, rtol=0, atol=1e-5)


def test_the_error_of_a_rise_is_what_it_says():
    """Of 30 people with 20 choices, for a change in one direction: the sum of squared errors in
    posterior deviations is chi-squared, and between 11.6 and 59.7 in 99.8 %."""
    squares = 0.0
    for seed in range(30):
        change = torch.randn(4, generator=generator_for(seed, "c"))
        change /= change.norm()
        clicks = choices(20, seed=seed)
        shown = [one.features["right"] @ THETA for one in clicks]
        unit = torch.stack([one.var(correction=0) for one in shown]).mean().sqrt()
        head = fit([replace(one, features={"right": one.features["right"]}) for one in clicks])
        rise, deviation = head.rise({"right": torch.zeros(2, 4)}, {"right": change.expand(2, 4)})
        squares += ((rise - float(change @ THETA / unit)) / deviation) ** 2
    assert 11.6 < squares < 59.7


def test_what_is_about_the_same_is_left_out_together():
    """Where all are, each counts for itself."""
    about = ["a", "b", "a", "b", "a"]
    folds = heads._folds(range(5), about)
    assert sorted(folds) == [([0, 2, 4], [1, 3]), ([1, 3], [0, 2, 4])]
    alike = [replace(one, about="a") for one in choices(12)]
    assert fit(alike).agreement == fit(choices(12)).agreement


def test_a_likelihood_by_hand():
    """Two groups, one feature: the second liked of three; two of three liked, each against the
    third."""
    features = np.array([[0.0], [1.0], [3.0]])
    block = heads._Block([features, features], np.eye(1), [(1,), (0, 2)])
    share = [math.e / (1 + math.e + math.e**3), 1 / (1 + math.e), math.e**3 / (math.e + math.e**3)]
    expected = sum(math.log(0.9 * p + 0.1 / size) for p, size in zip(share, (3, 2, 2), strict=True))
    assert block.likelihood(np.ones(1), [0, 1]) == pytest.approx(expected, rel=1e-12)


def test_a_head_of_random_clicks_is_not_trusted():
    """The lower end of a 90 % interval is above chance with probability .05, above `TRUSTED` with
    less: of 12 heads, more than 3 with probability .002 (binomial)."""
    nobody = torch.zeros(4)
    trusted = [fit(choices(12, nobody, seed, size=6)).trusted for seed in range(12)]
    assert sum(trusted) <= 3


def test_what_cannot_be_fitted():
    one = choices(3)
    everything, nothing = (Choice(one[0].features, liked, 0) for liked in (tuple(range(12)), ()))
    assert fit([]) is fit(one[:1]) is fit([everything, nothing, one[0]]) is None
    # pictures without any difference
    alike = [Choice({"flat": torch.ones(4, 2)}, (0,), place) for place in range(4)]
    assert not fit(alike).trusted


def test_features_of_pictures_by_hand():
    picture = torch.zeros(1, 3, 16, 16)
    picture[0, 0, :, :8] = 1  # the left half is red
    found = features_of(picture, ["x"])
    assert found["colour"][0, [0, 1, 2, 6, 7]].tolist() == [0.5, 0, 0, 0.5, 0.5]
    # every pixel's red differs from its mirror image's
    assert found["layout"][0, -2:].tolist() == [0, near(1 / 3, rounding(2))]
    clip = torch.stack([picture[0], torch.zeros(3, 16, 16)])[None]
    assert float(features_of(clip, ["x"])["colour"][0, 0]) == 0.25


def test_the_reward_keeps_its_head_in_its_state():
    images, prompts = noise(6, 16, 16), ["x"] * 6
    reward, other = Pairs(), Pairs()
    assert not reward(images, prompts).any() and reward.state == {}
    reward.head = fit([Choice(features_of(noise(6 + i)[:6], prompts), (i,), i) for i in range(5)])
    other.state = reward.state
    assert torch.equal(reward(images, prompts), other(images, prompts))
    assert reward(images, prompts).std() > 0
    assert Head.of(reward.state).agreement == reward.head.agreement
