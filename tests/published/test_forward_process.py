"""DiffusionNFT's and AWM's training steps against restatements of their formulas, on the tiny FLUX.

The old weights are made to trail by a third to a half after each iteration, so that they differ from the trained ones.
"""

from functools import partial

import pytest
import torch

from tests.published.neighbours import batch_normalised
from tests.published.second_half import Beside, tiny

COMMON = (
    "algorithm.group_size=3",
    "sampling.num_steps=5",
    "algorithm.kl_weight=0.05",
    "algorithm.old_rise=0.3",
    "algorithm.old_most=0.5",
)


def mean_square(x):
    return (x**2).mean()


def nft(models, example, g, advantage, sigma):
    """5 (r |x0(v+) - x0|^2 / w+ + (1 - r) |x0(v-) - x0|^2 / w-) / b + kl |v - v_ref|^2, one member at one time; b = 0.5."""
    image, noise, b = example.x[g : g + 1], example.data["noise"][g : g + 1], 0.5
    x = (1 - sigma) * image + sigma * noise
    with torch.no_grad():
        old, base = (models.velocity(which, x, sigma, example.prompt) for which in ("old", "base"))
    v = models.velocity("trained", x, sigma, example.prompt)

    def error(mixed):
        off = x - sigma * mixed - image
        return mean_square(off) / off.detach().double().abs().mean().clip(min=1e-5)

    r = ((advantage / 5) / 2 + 0.5).clip(0, 1)
    policy = r * error(b * v + (1 - b) * old) / b + (1 - r) * error((1 + b) * old - b * v) / b
    return 5 * policy + 0.05 * mean_square(v - base)


def awm(models, example, g, advantage, sigma):
    """-A/5 exp(log p - its own value) + kl |v - v_ref|^2 + |v - v_old|^2, log p = -4 sigma ((e + 1e-10)^1/4 - 1e-10^1/4)."""
    image, noise = example.x[g : g + 1], example.data["noise"][g : g + 1]
    x = (1 - sigma) * image + sigma * noise
    with torch.no_grad():
        old, base = (models.velocity(which, x, sigma, example.prompt) for which in ("old", "base"))
    v = models.velocity("trained", x, sigma, example.prompt)
    e = mean_square(v.double() - (noise.double() - image.double()))
    log_prob = -4 * sigma * ((e + 1e-10) ** 0.25 - 1e-10**0.25)
    return -advantage / 5 * (log_prob - log_prob.detach()).exp() + 0.05 * mean_square(v - base) + mean_square(v - old)


def objective(term, sigmas, models, seen):
    advantages = batch_normalised(seen.rewards[:, 0, 0]).clamp(-5, 5)  # a row a prompt
    share = 1 / sum(len(example.advantages) for example in seen.examples)
    return [
        lambda example=example, g=g: (
            share * term(models, example, g, advantages[example.prompt, g], sigmas[example.data["step"][g]])
        )
        for example in seen.examples
        for g in range(len(example.advantages))
    ]


def trail(models, updates):
    decay = min(0.3 * updates, 0.5)
    with torch.no_grad():
        for old, new in zip(models.old.parameters(), models.trained.parameters(), strict=True):
            old.copy_(old * decay + new * (1 - decay))


@pytest.mark.parametrize(
    ("name", "term", "more"),
    [("diffusion_nft", nft, ("algorithm.mixing=0.5",)), ("awm", awm, ("algorithm.times=2",))],
)
def test_losses_gradients_and_weights_are_the_published_ones(flux_directory, name, term, more):
    ours = tiny(flux_directory, f"algorithm.name={name}", *COMMON, *more)
    beside = Beside(ours, partial(objective, term, ours.sigmas), trail)
    apart = beside.differences()
    old, other = (torch.cat([p.detach().flatten() for p in own]) for own in (ours.learner.old, beside.models.old.parameters()))
    assert float((old - other).norm()) < 2e-3 * float((other - beside.start).norm())
    assert apart["loss"] < 1e-6 and apart["gradient"] < 2e-5 and apart["weights"] < 2e-3
