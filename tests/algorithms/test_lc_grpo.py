"""LC-GRPO (`examples/algorithms/lc_grpo.py`): its step against closed forms of normals, its gradient
by finite differences, and what it costs."""

import math
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from examples.algorithms.lc_grpo import LCGRPO, langevin_kernel
from g2rpo.core.data import Batch, Example
from g2rpo.core.flow import flow_sde, ode_step, sde_step, sigma_grid
from g2rpo.lab.plan.counting import count
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.planning import count_evaluations
from g2rpo.train.updater import Trained
from tests.support.runs import trainer

MEAN, STD = 0.5, 0.6
SIGMAS = sigma_grid(16).double()
STEPS = list(pairwise(SIGMAS[:-1]))
"""All stochastic steps."""


def exact(mean=MEAN, size=1):
    """The Gaussian policy in float64."""
    policy = GaussianPolicy(mean, STD, size, torch.float64)
    policy.mean.data = policy.mean.data.double()
    policy._base_mean = policy._base_mean.double()
    return policy


def marginal(sigma):
    """Mean and variance of the Gaussian policy's latents."""
    return (1 - sigma) * MEAN, (1 - sigma) ** 2 * STD**2 + sigma**2


# --- the step


@torch.no_grad()
def both(x, sigma, after):
    """The latents where the Euler step of the Gaussian policy ends, and its velocities there."""
    policy = exact()
    cond = policy.encode(["0"] * len(x))
    x = ode_step(x, policy.velocity(x, sigma.expand(len(x)), cond), sigma, after)
    return x, policy.velocity(x, after.expand(len(x)), cond)


@pytest.mark.parametrize("eta", [0.3, 0.9])
def test_the_step_is_eulers_and_then_one_langevin_step_on_the_score_of_a_normal(eta):
    """Of N(m, var) the score is -(x - m) / var. Float64's rounding: 2.2e-16 times some tens."""
    x = torch.randn(5, 3, 1, 1, generator=torch.Generator().manual_seed(0)).double()
    for sigma, after in STEPS:
        landed, velocity = both(x, sigma, after)
        step = langevin_kernel(eta)(landed, velocity, sigma, after)
        (mean, variance), eps = marginal(after), (eta * after) ** 2 / 2
        assert_close(step.mean, landed - eps * (landed - mean) / variance, rtol=1e-12, atol=1e-13)
        assert_close(step.std, (2 * eps).sqrt(), rtol=1e-12, atol=0)


def law_after(kernel_of, sigma, after, before=None):
    """Mean and variance after a step from a normal, here the exact marginal unless given: a step is
    linear, so two points and its std say all."""
    x = torch.tensor([0.0, 1.0]).double().reshape(2, 1, 1, 1).expand(2, 3, 1, 1)
    step, std = kernel_of(x, sigma, after)
    at, slope = step[0, 0, 0, 0], (step[1] - step[0])[0, 0, 0]
    mean, variance = before or marginal(sigma)
    return at + slope * mean, slope**2 * variance + std**2


def euler(x, sigma, after):
    return both(x, sigma, after)[0], 0


def corrected(eta):
    def step(x, sigma, after):
        landing = langevin_kernel(eta)(*both(x, sigma, after), sigma, after)
        return landing.mean, landing.std

    return step


def sde(eta):
    """The SDE's step with as much noise."""
    return sde_with(lambda sigma, after: eta * after / (sigma - after).sqrt())


def sde_with(diffusion):
    @torch.no_grad()
    def step(x, sigma, after):
        policy = exact()
        velocity = policy.velocity(x, sigma.expand(2), policy.encode(["0", "0"]))
        landing = sde_step(x, velocity, sigma, after, diffusion(sigma, after))
        return landing.mean, landing.std

    return step


def distance(law, sigma):
    """Wasserstein's, of normals: (mean - mean')^2 + (std - std')^2, its root."""
    (mean, variance), (m, v) = law, marginal(sigma)
    return float(((mean - m) ** 2 + (variance.sqrt() - v**0.5) ** 2).sqrt())


def test_the_law_after_a_step_is_the_closed_form_of_normals():
    """The corrector maps N(m, v) to N(k m + eps m* / v*, k^2 v + 2 eps), k = 1 - eps / v*; m*, v*
    are those of the marginal."""
    for sigma, after in STEPS:
        m, v = law_after(euler, sigma, after)
        (mean, variance), eps = marginal(after), (0.7 * after) ** 2 / 2
        k = 1 - eps / variance
        found = torch.stack(law_after(corrected(0.7), sigma, after))
        expected = torch.stack([k * m + eps * mean / variance, k**2 * v + 2 * eps])
        assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_a_small_corrector_brings_every_step_of_the_ode_nearer_to_the_marginal():
    """The paper's theorem 1: at eta .2. At .7 its own error is larger than Euler's at some steps."""

    def nearer(eta):
        pairs = [
            [distance(law_after(of, *step), step[1]) for of in (corrected(eta), euler)]
            for step in STEPS
        ]
        return [with_noise < without for with_noise, without in pairs]

    assert all(nearer(0.2)) and not all(nearer(0.7))


def test_a_step_is_nearer_to_the_marginal_than_the_sdes_with_as_much_noise():
    """The paper's theorem 2: at eta .9 at every step; at .1 its condition fails at some."""

    def nearer(eta):
        pairs = [
            [distance(law_after(of(eta), *step), step[1]) for of in (corrected, sde)]
            for step in STEPS
        ]
        return [ours < other for ours, other in pairs]

    assert all(nearer(0.9)) and not all(nearer(0.1))


def flow_grpos(x, sigma, after):
    """Flow-GRPO's step at its default eta, of the grid of `kept_after`."""
    grid = sigma_grid(10, 3.0).double()
    return sde_with(lambda *_: flow_sde(grid, 0.7)(sigma))(x, sigma, after)


@pytest.mark.parametrize(
    ("kernel_of", "percent"), [(euler, 77.1), (corrected(0.7), 83.6), (flow_grpos, 85.8)]
)
def test_what_ten_steps_keep_of_the_std_of_the_images(kernel_of, percent):
    """The last step is the ODE's."""
    *noisy, last = pairwise(sigma_grid(10, 3.0).double())
    law = None
    for step in noisy:
        law = law_after(kernel_of, *step, law)
    _, variance = law_after(euler, *last, law)
    assert 100 * float(variance.sqrt()) / STD == pytest.approx(percent, abs=0.05)


# --- the loss


@pytest.mark.parametrize("first", [True, False])
def test_the_gradient_flows_through_both_velocities(first):
    """Against central differences of 1e-5, whose error is of 1e-10 of the value; the loss has the
    ratio, the clip and the KL to a base of another mean."""
    draw = torch.Generator().manual_seed(1)
    x, x_next = torch.randn(2, 4, 3, 2, 2, generator=draw).double()
    data = {"x_next": x_next, "old_mean": 0 * x, "old_log_prob": torch.zeros(4).double()}
    example = Example(0, 3, x, torch.tensor([1.0, -0.5, -2.0, 0.7]).double(), data)
    batch = Batch.of([example], SIGMAS, first)
    algorithm = LCGRPO(kl_weight=0.3, clip_range=100.0)
    policy = exact(size=2)
    policy._base_mean = policy._base_mean + 0.5
    network = Trained(policy, policy.encode(["0.1"]), torch.float64)

    def loss():
        return algorithm.loss(batch, network).values.sum()

    (found,) = torch.autograd.grad(loss(), policy.mean)
    if first:  # its value is that of a ratio of 1, whatever the weights are: the old are these
        old = algorithm.corrected(batch, network, network.velocity).log_prob(x_next).detach()
        data["old_log_prob"] = old
        batch = Batch.of([example], SIGMAS, first=False)
    direction = torch.randn(policy.mean.shape, generator=draw).double()
    values = []
    for sign in (1, -1):
        policy.mean.data += sign * 1e-5 * direction
        values.append(loss().item())
        policy.mean.data -= sign * 1e-5 * direction
    slope = (values[0] - values[1]) / 2e-5
    assert float((found * direction).sum()) == pytest.approx(slope, rel=1e-7)


# --- a run


class Guided(GaussianPolicy):
    """A policy with guidance of its own, which says how each velocity was asked for."""

    def __init__(self):
        super().__init__(0.1)
        self.guided, self.calls, self.rows = True, [], Counter()

    @contextmanager
    def unguided(self):
        self.guided = False
        yield
        self.guided = True

    def velocity(self, x, sigma, cond):
        kind = "base" if self._in_base else "trained" if torch.is_grad_enabled() else "rollout"
        self.calls.append((kind, self.guided, [*{*sigma.tolist()}]))
        self.rows[kind, self.guided] += len(x)
        return super().velocity(x, sigma, cond) * (1.5 if self.guided else 1)


SMALL = (
    "algorithm.name=examples/algorithms/lc_grpo.py:LCGRPO",
    "algorithm.group_size=4",
    "sampling.num_steps=5",
)


def test_the_corrector_is_not_guided_in_the_rollout_and_the_loss():
    policy = Guided()
    t = trainer(None, *SMALL, "algorithm.update_every=rollout", policy=policy)
    grid = t.sigmas.tolist()
    row = t.iterate()
    walk = [
        ("rollout", guided, [grid[k + (not guided)]]) for k in range(4) for guided in (True, False)
    ]
    assert policy.calls[:9] == [*walk, ("rollout", True, [grid[4]])]
    losses = policy.calls[9:]
    assert [(kind, guided) for kind, guided, _ in losses] == [
        (kind, guided) for kind in ("base", "trained") for guided in (True, False)
    ] * (len(losses) // 4)
    # the same latents, calls and weights: no rounding apart
    assert row["log_prob_drift"] == 0 and row["ratio_deviation"] == 0


def test_a_run_counts_both_velocities():
    """Of 5 steps 4 are corrected: 5 + 4 evaluations of a member, twice 4 with gradient, and as many
    of the untrained model. Half of the latter and 4 of the former are without guidance."""
    policy = Guided()
    t = trainer(None, *SMALL, policy=policy)
    row, plans, prompts = t.iterate(), t.plans(0), t.config.trainer.prompts_per_iteration
    assert (
        row["evaluations"]
        == prompts * count_evaluations(plans, t.algorithm.group_size)
        == prompts * 4 * 9
    )
    ((iteration, _),) = count(t.config, 3).kinds
    assert iteration.evaluations == row["evaluations"]
    assert iteration.training_rows == iteration.reference_rows == prompts * 4 * 8
    guided, without = (policy.rows["rollout", each] for each in (True, False))
    assert sum(iteration.unguided) == without == prompts * 4 * 4
    assert iteration.network_rows(2) == 2 * guided + without
    assert iteration.unguided_reference == policy.rows["base", False] == prompts * 4 * 4


def test_the_alarm_of_drift_knows_both_velocities():
    """A relative error of both velocities moves a step's mean by e of its std, and a log-prob by at
    most 4 e / sqrt(entries) + e^2 / 2."""
    algorithm, sigmas, rounding = LCGRPO(clip_range=1e-12, update_every="rollout"), SIGMAS, 1e-3
    sigma, after = sigmas[3], sigmas[4]
    moved = sigma - after + (0.7 * after) ** 2 / 2 * (1 - after) / after
    e = float(rounding * math.sqrt(2) * moved / (0.7 * after))
    found = algorithm.drift_limit(sigmas, [3], 16, rounding)
    assert found == pytest.approx(4 * e / 4 + e**2 / 2, rel=1e-6)
    assert algorithm.drift_limit(sigmas, [3, 4], 16, rounding) >= found
