"""DPM-Solver++(2M) as a bent Euler step: against diffusers' scheduler, and its order against the closed form."""

import itertools
import math

import pytest
import torch

from g2rpo.flow import ode_step, sigma_grid
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.rollout.engine import Engine
from g2rpo.seeding import generator_for
from g2rpo.solvers import Memory, bend
from g2rpo.types import Plan


def walk(velocity, x, sigmas, solver):
    """x [B, ...] down the sigmas, with one memory per row."""
    before = [None] * len(x)
    for sigma, sigma_next in itertools.pairwise(sigmas):
        rows, rows_next = sigma.expand(len(x)), sigma_next.expand(len(x))
        v = velocity(x, rows)
        now = [Memory(image, sigma) for image in x - sigma * v] if solver == "dpm2" else before
        x = ode_step(x, bend(v, rows, rows_next, list(zip(now, before, strict=True))), rows, rows_next)
        before = now
    return x


def test_the_bent_step_is_diffusers_multistep_scheduler():
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(
        solver_order=2, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, final_sigmas_type="zero"
    )
    scheduler.set_timesteps(8)
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))

    def velocity(x, sigma):
        return torch.sin(2 * x + sigma[:, None])

    theirs = x
    for i, t in enumerate(scheduler.timesteps):
        theirs = scheduler.step(velocity(theirs, scheduler.sigmas[i].expand(3)), t, theirs).prev_sample
    torch.testing.assert_close(walk(velocity, x, scheduler.sigmas, "dpm2"), theirs, atol=5e-6, rtol=0)


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("dpm2", 2)])
def test_the_error_shrinks_with_the_solvers_order(solver, order):
    """The Gaussian's ODE keeps the standardised x, so its end is known. From sigma 0.9 to 0.1 in float64 with 20 to 160 steps,
    every halving of the step divides the error by 2^order, once steps are so small that the next term of the expansion is."""
    policy = GaussianPolicy(mean=0.8, std=0.6, size=1, dtype=torch.float64)
    policy.mean.data = policy.mean.data.double()
    cond = policy.encode(["0"])

    def spread(sigma):
        return math.sqrt((1 - sigma) ** 2 * 0.36 + sigma**2)

    z = torch.tensor([[-1.0], [0.3], [2.0]], dtype=torch.float64).reshape(1, 3, 1, 1)
    errors = []
    for steps in (20, 40, 80, 160):
        sigmas = torch.linspace(0.9, 0.1, steps + 1, dtype=torch.float64)
        with torch.no_grad():
            end = walk(lambda x, s: policy.velocity(x, s, cond), 0.1 * 0.8 + spread(0.9) * z, sigmas, solver)
        errors.append(float((end - (0.9 * 0.8 + spread(0.1) * z)).abs().max()))
    orders = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert orders[1:] == pytest.approx([order, order], abs=0.2)


@torch.no_grad()
def test_tails_of_both_solvers_walk_side_by_side():
    """Rows of an Euler and a second-order plan share batches; each ends where its own plain walk ends."""
    sigmas, tails = sigma_grid(12, 3.0), ((3, 4, 5, 6, 7, 8, 9, 10, 11, 12), (3, 4, 6, 9, 12))
    policy = GaussianPolicy(mean=0.4, size=2)
    engine = Engine(policy, policy.encode(["0", "0.3"]), sigmas, batch_size=7)
    plans = [Plan(2, 3, tails, solver=solver) for solver in ("euler", "dpm2")]
    rollouts = engine.rollout(plans, 3, lambda x, v, s, s_next: Plain(ode_step(x, v, s, s_next)), generator_for)
    for rollout in rollouts:
        cond = engine.cond.rows([rollout.prompt] * 3)
        for tail, final in zip(tails, rollout.finals, strict=True):
            x = rollout.transitions[0].x_next
            end = walk(lambda x, s, cond=cond: policy.velocity(x, s, cond), x, sigmas[list(tail)], rollout.plan.solver)
            torch.testing.assert_close(final, end, atol=1e-6, rtol=0)
    euler, dpm2 = (rollouts[i].finals[1] for i in (0, 1))
    assert float((euler - dpm2).abs().max()) > 1e-3


class Plain:
    """A landing with a little noise, so that members differ."""

    def __init__(self, mean):
        self.mean = mean

    def sample(self, noise):
        return self.mean + 0.1 * noise

    def log_prob(self, x):
        return torch.zeros(len(x))
