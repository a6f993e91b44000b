"""The head of a person's taste: the choice model, its fit, and how far it may be trusted."""

import math

import numpy as np
import pytest
import torch

from g2rpo.core.seeding import generator_for
from g2rpo.rewards import taste
from g2rpo.rewards.taste import Choice, Clicks, Head, features_of, fit

THETA = torch.tensor([2.0, -1.0, 0.0, 0.0])


def choices(count, theta=THETA, seed=0, size=12, slips=0.0):
    """Choices by a Plackett-Luce person with the utility theta . z, a share of them at random; a
    second block is noise."""
    found = []
    for group in range(count):
        generator = generator_for(seed, "group", group)
        z, other = (
            torch.randn(size, 4, generator=generator),
            torch.randn(size, 6, generator=generator),
        )
        gumbel = -torch.log(-torch.log(torch.rand(size, generator=generator)))
        best = int((z @ theta + gumbel).argmax())
        if float(torch.rand((), generator=generator)) < slips:
            best = int(torch.randint(size, (), generator=generator))
        found.append(Choice({"noise": other, "right": z}, (best,)))
    return found


def test_the_head_finds_the_block_and_the_direction_of_a_taste():
    """Of 60 choices among 12 the Fisher information is at least 60 times the variance left within a
    group of a softmax, some .3 for each coordinate: an error of 1 / sqrt(18) = .24 each beside
    |theta| = 2.2, so the cosine is above .97."""
    head = fit(choices(60))
    assert head.block == "right"
    cosine = float(head.direction.float() @ THETA / head.direction.float().norm() / THETA.norm())
    assert cosine > 0.97
    values = [head(one.features) for one in choices(60)]
    assert abs(float(torch.cat(values).mean())) < 1e-5  # float32's sum of 720 values of size 1
    assert float(torch.stack([one.var(correction=0) for one in values]).mean()) == pytest.approx(
        1, abs=1e-5
    )
    assert head.agreement.low > 0.8 and head.trust == (2 * head.agreement.mean - 1) ** 2


def test_a_posterior_mode_has_no_gradient():
    """By finite differences, slips and several liked pictures included."""
    group = choices(8, slips=0.3)
    group[0] = Choice(group[0].features, (2, 5, 7))
    block, everyone = taste._Block.of("right", group), list(range(8))
    theta = block.fit(everyone, 3.0)

    def posterior(theta):
        return block.likelihood(theta, everyone) - theta @ theta / 6

    steps = 1e-5 * np.eye(len(theta))
    gradient = [(posterior(theta + step) - posterior(theta - step)) / 2e-5 for step in steps]
    assert np.abs(gradient).max() < 1e-3 < np.abs(theta).max()


def test_a_likelihood_by_hand():
    """Two groups, one feature: the second liked of three; two of three liked, each against the
    third."""
    features = {"one": torch.tensor([[0.0], [1.0], [3.0]])}
    block = taste._Block(
        [f["one"].double().numpy() for f in (features, features)], np.eye(1), [(1,), (0, 2)]
    )
    share = [math.e / (1 + math.e + math.e**3), 1 / (1 + math.e), math.e**3 / (math.e + math.e**3)]
    expected = sum(math.log(0.9 * p + 0.1 / size) for p, size in zip(share, (3, 2, 2), strict=True))
    assert block.likelihood(np.ones(1), [0, 1]) == pytest.approx(expected, rel=1e-12)


def test_a_head_of_random_clicks_is_not_trusted():
    """The lower end of a 90 % interval is above chance with probability .05, above `TRUSTED` with
    less: of 24 heads, more than 5 with probability .001 (binomial)."""
    nobody = torch.zeros(4)
    trusted = [fit(choices(12, nobody, seed)).trust > 0 for seed in range(24)]
    assert sum(trusted) <= 5


def test_what_cannot_be_fitted():
    one = choices(3)
    everything = Choice(one[0].features, tuple(range(12)))
    nothing = Choice(one[0].features, ())
    assert fit([]) is fit(one[:1]) is fit([everything, nothing, one[0]]) is None
    # pictures without any difference
    alike = [Choice({"flat": torch.ones(4, 2)}, (0,)) for _ in range(4)]
    assert fit(alike).trust == 0


def test_features_of_pictures_by_hand():
    picture = torch.zeros(1, 3, 16, 16)
    picture[0, 0, :, :8] = 1  # the left half is red
    found = features_of(picture, ["x"])
    colour = found["colour"][0]
    assert (
        colour[:3].tolist() == [0.5, 0, 0] and float(colour[6]) == 0.5 and float(colour[7]) == 0.5
    )
    # every pixel's red differs from its mirror image's
    assert float(found["layout"][0, -1]) == pytest.approx(1 / 3)
    assert float(found["layout"][0, -2]) == 0
    clip = torch.stack([picture[0], torch.zeros(3, 16, 16)])[None]
    assert float(features_of(clip, ["x"])["colour"][0, 0]) == 0.25


def test_the_reward_keeps_its_head_in_its_state():
    images = torch.rand(4, 3, 16, 16, generator=generator_for("images"))
    reward, other = Clicks(), Clicks()
    assert reward(images, ["x"] * 4).tolist() == [0, 0, 0, 0] and reward.state == {}
    chosen = [
        Choice(features_of(torch.rand(6, 3, 16, 16, generator=generator_for(i)), ["x"] * 6), (i,))
        for i in range(5)
    ]
    reward.head = fit(chosen)
    other.state = reward.state
    assert (
        torch.equal(reward(images, ["x"] * 4), other(images, ["x"] * 4))
        and reward(images, ["x"] * 4).std() > 0
    )
    assert Head.of(reward.state).agreement == reward.head.agreement
