"""Pave-GRPO's training step against a restatement of its formulas, on the tiny FLUX."""

from functools import partial

import pytest

from g2rpo.core.flow import sigma_grid
from tests.published.neighbours import log_prob, normalised
from tests.published.second_half import agree, tiny
from tests.support.variants import few

SETTING = ("algorithm.name=pave_grpo", "algorithm.group_size=4", "algorithm.branch_steps=[0,3]")
SIGMAS, ETA = sigma_grid(8, 3.0), 0.8


def step(x, v, sigma, after):
    """Flow-GRPO's (mean, std) from any sigma; from 1 with the next one in the denominator."""
    g, dt = ETA * (sigma / (1 - (after if sigma == 1 else sigma))).sqrt(), after - sigma
    mean = x * (1 + g**2 / (2 * sigma) * dt) + v * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, g * (-dt).sqrt()


def term(models, rollout, rewards, g, n, weight):
    """-w A exp(log p - its own value) of member g, where the last of n even parts of the step is
    the stochastic one."""
    (transition,) = rollout.transitions
    x, sigma, after = transition.x, SIGMAS[transition.step], SIGMAS[transition.step + 1]
    stride = (after - sigma) / n
    for _ in range(n - 1):
        x, sigma = x + stride * models.velocity("trained", x, sigma, rollout.prompt), sigma + stride
    mean, std = step(x, models.velocity("trained", x, sigma, rollout.prompt), sigma, after)
    density = log_prob(transition.x_next[g : g + 1], mean, std)
    return -weight * normalised(rewards[0, 0]).clamp(-5, 5)[g] * (density - density.detach()).exp()


def objective(models, seen, weights):
    """mean over rollouts and members of the terms of n = 1, 2, 3."""
    members = seen.rewards.shape[-1]
    share = 1 / (len(seen.rollouts) * members)
    return [
        partial(term, models, rollout, rewards, g, n, weight * share)
        for rollout, rewards in zip(seen.rollouts, seen.rewards, strict=True)
        for g in range(members)
        for n, weight in weights.items()
    ]


@pytest.mark.parametrize("iterations", few([3, 1], (1).__eq__))
def test_losses_gradients_and_weights_are_the_published_ones(flux_directory, iterations):
    weighed = partial(objective, weights={1: 1.0, 2: 0.5, 3: 0.5})
    agree(tiny(flux_directory, *SETTING), weighed, iterations=iterations)
