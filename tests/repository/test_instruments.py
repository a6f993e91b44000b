"""The study's instruments against what they should find: known signal, closed forms, known shares
of variance."""

import math

import numpy as np
import pytest
import torch

from g2rpo.algorithms.flow_grpo import window
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.flow import ode_step, sigma_grid
from g2rpo.core.noise import generator_for
from g2rpo.core.objectives import group_normalize
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.engine import Engine
from studies.credit import alignment_of, explained, gradients, repeat_the_rest, signal_of
from tests.support.runs import trainer
from tests.support.tolerances import reordered, rounding

SIGMAS = sigma_grid(6, 3.0)


@pytest.mark.parametrize("signal", [0.0, 0.05, 0.6])
def test_the_signal_and_its_error_are_what_they_should_be(signal):
    """12 vectors of 200 entries, |mean|^2 = signal and E|g|^2 = 1, 600 times. Their mean may miss
    the truth by 4 standard errors (the ratio's own bias is of the order 1/(12 * 200)); their
    spread, known to 1 / sqrt(2 * 600) = 3 %, is to agree with the mean of the stated variances,
    themselves noisy at n = 12, to 15 %; without signal zeta_1's cut at 0 makes the stated ones
    larger, by a fifth here."""
    random = np.random.default_rng(0)
    mean = random.normal(size=200)
    mean *= math.sqrt(signal) / np.linalg.norm(mean)
    found = []
    for _ in range(600):
        vectors = mean + random.normal(size=(12, 200)) * math.sqrt((1 - signal) / 200)
        found.append(signal_of(vectors @ vectors.T))
    shares = np.array([one.share for one in found])
    assert abs(shares.mean() - signal) < 4 * shares.std() / math.sqrt(600) + 1 / (12 * 200)
    stated = math.sqrt(np.mean([one.error**2 for one in found]))
    # where it is large, the error of |g|^2, which is not stated, makes part of the spread up for
    if signal < 0.5:
        assert 0.85 < stated / shares.std() < (1.15 if signal else 1.3)


def test_a_cosine_is_with_the_sum_of_all_others():
    vectors = np.random.default_rng(0).normal(size=(5, 7)) + 0.5
    found = signal_of(vectors @ vectors.T)
    others = vectors.sum(0) - vectors
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(others, axis=1)
    cosines = (vectors * others).sum(1) / lengths
    assert found.cosine == pytest.approx(cosines.mean()) and found.groups(0.2) == pytest.approx(4)
    vectors[:2] = 0
    assert signal_of(vectors @ vectors.T).silent == 0.4
    nothing = signal_of(np.zeros((4, 4)))
    assert nothing.silent == 1 and nothing.groups() == math.inf


def test_an_alignment_is_with_the_direction_of_the_others():
    """0.3 along a direction and unit noise in 100 dimensions, against that direction itself: 0.3 /
    sqrt(1.09), by the stated error; against its own noise none is left, because a prompt's own
    vector is taken out."""
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(400, 100, generator=random, dtype=torch.float64) / 10
    direction = torch.zeros(100, dtype=torch.float64)
    direction[3] = 1
    found, error = alignment_of(0.3 * direction + noise, direction.expand(400, -1))
    expected = 0.3 / math.sqrt(1.09) * 399 / 400
    assert abs(found - expected) < 4 * error
    assert error == pytest.approx(0.1 / math.sqrt(1.09) / 20, rel=0.2)
    found, error = alignment_of(noise, noise)
    assert abs(found) < 4 * error
    vectors, common = torch.randn(2, 3, 4, generator=random, dtype=torch.float64)
    by_hand = [float(vectors[i] @ (common.sum(0) - common[i])) for i in range(3)]
    scale = float(vectors.square().sum(1).mean().sqrt() * common.sum(0).norm())
    assert alignment_of(vectors, common)[0] == pytest.approx(sum(by_hand) / 3 / scale)
    assert alignment_of(torch.zeros(3, 4), common) == (0, 0)


def mean_slope(sigma, sigma_next, g, std):
    """d mean / d policy.mean of one SDE step, entry by entry, by hand."""
    variance = (1 - sigma) ** 2 * std**2 + sigma**2
    velocity = -(1 - sigma) / variance * (sigma - (1 - sigma) * std**2) - 1
    return (1 + g**2 * (1 - sigma) / (2 * sigma)) * (sigma_next - sigma) * velocity


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 2])
def test_gradients_and_their_signal_are_the_gaussians(step):
    """Where rewards are linear in the latent, r = <w, x'> + const, all is known. Each gradient is
    the mean over members of A z slope / (std D), exactly. Along u = w / |w| its mean is c4 (G - 1)
    / G, c4 that of a normal sample's std, and its mean square ((G - 1) / G)^2; across it the D - 1
    other entries have mean square (G - 1) / G^2 each. 5 standard errors."""
    policy, size, groups, entries = GaussianPolicy(size=2), 12, 300, 12
    kernel = GranularGRPO(branch_steps=(step,), granularities=(1,)).kernel(SIGMAS)
    plan = window(step, step + 1, 6, shared_noise=True)
    weights = torch.linspace(-1, 2, entries)
    found = []
    for number in range(groups):
        engine = Engine(policy=policy, cond=policy.encode(["0.1"]), sigmas=SIGMAS)
        (rollout,) = engine.rollout(
            [plan], size, kernel, lambda prompt, *key, n=number: generator_for("test", n, *key)
        )
        advantages = group_normalize(rollout.finals[0].flatten(1) @ weights)
        (gradient,) = gradients(policy, kernel, SIGMAS, rollout, advantages[None], "0.1")
        (t,) = rollout.transitions
        sigma, sigma_next = float(SIGMAS[step]), float(SIGMAS[step + 1])
        std = float(kernel(t.x, t.x, SIGMAS[step], SIGMAS[step + 1]).std)
        slope = mean_slope(sigma, sigma_next, std / math.sqrt(sigma - sigma_next), policy.std)
        z = ((t.x_next - t.old_mean) / std).flatten(1)
        expected = (advantages[:, None] * z).mean(0) * slope / (std * entries)
        # where z is small it is a difference of numbers up to 3, by a deviation of .1 and more
        close = rounding(64, size=30 * expected.abs().max())
        torch.testing.assert_close(gradient, expected, **close)
        found.append(gradient.double().numpy())
    vectors = np.stack(found)
    signal = signal_of(vectors @ vectors.T)
    c4 = math.sqrt(2 / (size - 1)) * math.gamma(size / 2) / math.gamma((size - 1) / 2)
    along, across = ((size - 1) / size) ** 2, (size - 1) / size**2 * (entries - 1)
    assert signal.share == pytest.approx(c4**2 * along / (along + across), abs=5 * signal.error)
    assert signal.error < 0.02


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


def test_each_steps_noise_explains_its_share_of_a_linear_reward():
    """The Gaussian's walk is linear, so a step explains (its noise's way into the reward)^2 over
    the sum of those of all: found here by pushing a unit of noise through. 300 draws by 3 repeats;
    the error of a share is below sqrt(2 / 300) = .08 of it, and at most .05; 4 of those."""

    def linear(images, prompts):
        return torch.logit(images.double()).flatten(1).mean(1).float()

    t = trainer(None, "sampling.num_steps=4", "sampling.shift=2", rewards={"bright": linear})
    noisy, cond = 3, t.policy.encode(["0"])

    def reward(push):
        x = torch.zeros(1, 3, 4, 4)
        with torch.no_grad():
            for at in range(4):
                v = t.policy.velocity(x, t.sigmas[at : at + 1], cond)
                here, after = t.sigmas[at], t.sigmas[at + 1]
                if at < noisy:
                    noise = torch.full_like(x, float(at == push))
                    x = t.algorithm.kernel(t.sigmas)(x, v, here, after).sample(noise)
                else:
                    x = ode_step(x, v, here, after)
        return float(x.mean())

    ways = np.array([reward(step) - reward(None) for step in range(noisy)]) ** 2
    for step in range(noisy):
        values = repeat_the_rest(t, 0, step, noisy, 300, 3).double().numpy()
        assert explained(values).mean == pytest.approx(ways[step] / ways.sum(), abs=0.2), step
    assert max(ways / ways.sum()) > 0.5  # so that a wrong step would be seen
    # nothing else is noisy: rows of a batch are the same
    same = repeat_the_rest(t, 0, 0, 1, 4, 3)[0].numpy()
    assert np.ptp(same, axis=1).max() <= reordered(3 * 4 * 4, size=np.abs(same).max())["atol"]
