"""LC-GRPO (`examples/algorithms/lc_grpo.py`): its step against closed forms of normals, its gradient
by finite differences, and what it costs."""

from collections import Counter
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from examples.algorithms.lc_grpo import LCGRPO, langevin_kernel
from g2rpo.core.data import Batch, Example
from g2rpo.core.flow import ode_step, sigma_grid
from g2rpo.lab.plan.counting import count
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.planning import count_evaluations
from g2rpo.train.updater import Trained
from tests.support.runs import trainer

MEAN, STD = 0.5, 0.6
SIGMAS = sigma_grid(16).double()


def exact(mean=MEAN, size=1):
    """The Gaussian policy in float64."""
    policy = GaussianPolicy(mean, STD, size, torch.float64)
    policy.mean.data = policy.mean.data.double()
    policy._base_mean = policy._base_mean.double()
    return policy


# --- the step


@pytest.mark.parametrize("eta", [0.3, 0.9])
def test_the_step_is_eulers_and_then_one_langevin_step_on_the_score_of_a_normal(eta):
    """Of N(m, var) the score is -(x - m) / var. Float64's rounding: 2.2e-16 times some tens."""
    x = torch.randn(5, 3, 1, 1, generator=torch.Generator().manual_seed(0)).double()
    policy = exact()
    cond = policy.encode(["0"] * 5)
    for sigma, after in pairwise(SIGMAS[:-1]):
        with torch.no_grad():
            landed = ode_step(x, policy.velocity(x, sigma.expand(5), cond), sigma, after)
            velocity = policy.velocity(landed, after.expand(5), cond)
        step = langevin_kernel(eta)(landed, velocity, sigma, after)
        mean, variance = (1 - after) * MEAN, (1 - after) ** 2 * STD**2 + after**2
        eps = (eta * after) ** 2 / 2
        assert_close(step.mean, landed - eps * (landed - mean) / variance, rtol=1e-12, atol=1e-13)
        assert_close(step.std, (2 * eps).sqrt(), rtol=1e-12, atol=0)


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
    """A policy with guidance of its own, which counts the rows of each kind of velocity."""

    def __init__(self):
        super().__init__(0.1)
        self.guided, self.rows = True, Counter()

    @contextmanager
    def unguided(self):
        self.guided = False
        yield
        self.guided = True

    def velocity(self, x, sigma, cond):
        kind = "base" if self._in_base else "trained" if torch.is_grad_enabled() else "rollout"
        self.rows[kind, self.guided] += len(x)
        return super().velocity(x, sigma, cond) * (1.5 if self.guided else 1)


SMALL = (
    "algorithm.name=examples/algorithms/lc_grpo.py:LCGRPO",
    "algorithm.group_size=4",
    "algorithm.update_every=rollout",
    "sampling.num_steps=5",
)


def test_a_run_counts_both_velocities():
    """Of 5 steps 4 are corrected: 5 + 4 evaluations of a member, twice 4 with gradient, and as many
    of the untrained model. Half of the latter and 4 of the former are without guidance."""
    policy = Guided()
    t = trainer(None, *SMALL, policy=policy)
    row, plans, prompts = t.iterate(), t.plans(0), t.config.trainer.prompts_per_iteration
    assert count_evaluations(plans, t.algorithm.group_size) == 4 * 9
    ((iteration, _),) = count(t.config, 3).kinds
    assert iteration.evaluations == row["evaluations"] == prompts * 4 * 9
    assert iteration.training_rows == iteration.reference_rows == prompts * 4 * 8
    guided, without = (policy.rows["rollout", each] for each in (True, False))
    assert sum(iteration.unguided) == without == prompts * 4 * 4
    assert iteration.network_rows(2) == 2 * guided + without
    assert iteration.unguided_reference == policy.rows["base", False] == prompts * 4 * 4
    # the same latents, calls and weights: no rounding apart
    assert row["log_prob_drift"] == 0 and row["ratio_deviation"] == 0
