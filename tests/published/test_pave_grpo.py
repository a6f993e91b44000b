"""Pave-GRPO's training step against a restatement of its formulas, on the tiny FLUX."""

from functools import partial

import pytest

from g2rpo.core.flow import sigma_grid
from tests.published.neighbours import log_prob, normalised
from tests.published.second_half import agree, of_members, tiny
from tests.support.variants import few

SETTING = ("algorithm.name=pave_grpo", "algorithm.group_size=4", "algorithm.branch_steps=[0,3]")
SIGMAS, ETA = sigma_grid(8, 3.0), 0.8


def step(x, v, sigma, after):
    """Flow-GRPO's (mean, std) from any sigma; from 1 with the next one in the denominator."""
    g, dt = ETA * (sigma / (1 - (after if sigma == 1 else sigma))).sqrt(), after - sigma
    mean = x * (1 + g**2 / (2 * sigma) * dt) + v * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, g * (-dt).sqrt()


def density(models, rollout, g, n):
    """The log-prob of member g where the last of n even parts of the step is the stochastic one."""
    (transition,) = rollout.transitions
    x, sigma, after = transition.x, SIGMAS[transition.step], SIGMAS[transition.step + 1]
    stride = (after - sigma) / n
    for _ in range(n - 1):
        x, sigma = x + stride * models.velocity("trained", x, sigma, rollout.prompt), sigma + stride
    mean, std = step(x, models.velocity("trained", x, sigma, rollout.prompt), sigma, after)
    return log_prob(transition.x_next[g : g + 1], mean, std)


def term(models, rollout, rewards, g):
    """-w A exp(log p - its own value) of member g, for n = 1, 2, 3."""
    advantage = normalised(rewards[0, 0]).clamp(-5, 5)[g]
    total = 0.0
    for n, weight in {1: 1.0, 2: 0.5, 3: 0.5}.items():
        own = density(models, rollout, g, n)
        total = total - weight * advantage * (own - own.detach()).exp()
    return total


@pytest.mark.parametrize("iterations", few([3, 1], (1).__eq__))
def test_losses_gradients_and_weights_are_the_published_ones(flux_directory, iterations):
    agree(tiny(flux_directory, *SETTING), partial(of_members, term), iterations=iterations)
