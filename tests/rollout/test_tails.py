"""Fast tails: the right number of evaluations, diffusers' solver, and transitions that know
nothing of them."""

from dataclasses import replace

import pytest
import torch

from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.errors import UserError
from g2rpo.core.plans import Plan
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.planning import count_evaluations
from g2rpo.rollout.tails import EXACT, Tails
from tests.rollout.test_engine import SIGMAS, make_engine, noise
from tests.support.runs import config, trainer
from tests.support.tolerances import rounding

FAST = {"dpmpp2m": Tails(solver="dpmpp2m"), "forecast": Tails(forecast=True)}


@pytest.mark.parametrize(
    ("tails", "expected"), [(Tails(), 1112), (Tails("dpmpp2m"), 1112), (Tails(forecast=True), 632)]
)
def test_evaluations_at_the_papers_settings(tails, expected):
    """T=16, G=12, steps 0..7: 8 of the anchor, and tails of 15, 14, ..., 8 jumps, 92 in all; a
    forecast leaves 8 + 8 + 7 + 7 + 6 + 6 + 5 + 5 = 52 evaluations of them."""
    algorithm, engine = GranularGRPO(granularities=(1,)), make_engine(tails=tails)
    plans = algorithm.plans(16)
    engine.rollout(plans, 12, algorithm.kernel(SIGMAS), noise)
    assert (
        engine.policy.rows == engine.evaluations == count_evaluations(plans, 12, tails) == expected
    )


@pytest.mark.parametrize("name", FAST)
def test_transitions_know_nothing_of_tails(name):
    """What enters a ratio is the same bit for bit; what is only scored is not, or the option would
    do nothing."""
    algorithm = GranularGRPO(branch_steps=(0, 3), granularities=(1, 2, 3))
    own = Plan(3, 5, ((5, 6, 8, 16),), shared_noise=False)
    plans = [*algorithm.plans(16), Plan(2, 6, ((6, 7, 10, 13, 16),)), own]
    exact, fast = (
        rolled_out(plans, algorithm, prompts=2, tails=tails) for tails in (EXACT, FAST[name])
    )
    for ours, theirs in zip(fast, exact, strict=True):
        assert not torch.equal(ours.finals, theirs.finals)
        for mine, other in zip(ours.transitions, theirs.transitions, strict=True):
            assert mine.step == other.step
            for field in ("x", "x_next", "old_log_prob"):
                assert torch.equal(getattr(mine, field), getattr(other, field))


@pytest.mark.parametrize("name", FAST)
def test_fast_tails_do_not_depend_on_batch_size_or_row_order(name):
    """Bit for bit on the Gaussian policy: its arithmetic is elementwise, so a row does not know its
    neighbours."""
    algorithm = GranularGRPO(branch_steps=(0, 3, 6), granularities=(1, 2, 3))
    plans = algorithm.plans(16)

    def finals(plans, batch_size):
        options = {"prompts": 2, "tails": FAST[name], "batch_size": batch_size}
        found = rolled_out(plans, algorithm, policy=GaussianPolicy(), **options)
        return {(r.prompt, r.plan): r.finals for r in found}

    one, other = finals(plans, 64), finals(plans[::-1], 7)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_dpmpp2m_is_diffusers_multistep_scheduler():
    from diffusers import DPMSolverMultistepScheduler

    scheduler = DPMSolverMultistepScheduler(
        solver_order=2,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
        final_sigmas_type="zero",
    )
    scheduler.set_timesteps(8)
    ours = theirs = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    tails, past = Tails(solver="dpmpp2m"), [(), (), ()]

    def velocity(x, sigma):
        return torch.sin(2 * x + sigma)

    for i, t in enumerate(scheduler.timesteps):
        sigma, sigma_next = (scheduler.sigmas[j].expand(3) for j in (i, i + 1))
        v = velocity(ours, scheduler.sigmas[i])
        remembered = [
            tails.remember(past[row], ours[row], v[row], float(sigma[row])) for row in range(3)
        ]
        ours, past = tails.step(ours, v, sigma, sigma_next, past), remembered
        theirs = scheduler.step(velocity(theirs, scheduler.sigmas[i]), t, theirs).prev_sample
    # eight steps of 30 roundings, of numbers up to 3
    torch.testing.assert_close(ours, theirs, **rounding(8 * 30, size=3.0))


def test_plans_may_ask_for_a_solver():
    """MixGRPO-Flash's plans bring theirs along; the plans of one rollout agree."""
    plan, algorithm = Plan(0, 1, ((1, 4, 8, 16),), solver="dpmpp2m"), GranularGRPO()
    plain = replace(plan, solver="euler")
    (walked,) = rolled_out([plan], algorithm)
    (as_option,) = rolled_out([plain], algorithm, tails=Tails(solver="dpmpp2m"))
    assert torch.equal(walked.finals, as_option.finals)
    with pytest.raises(ValueError, match="must agree on a solver, got dpmpp2m, euler"):
        rolled_out([plan, plain], algorithm)


class Straight(GaussianPolicy):
    """A velocity that changes linearly with sigma and does not depend on x."""

    def velocity(self, x, sigma, cond):
        return 0.7 - 1.3 * sigma.reshape(-1, 1, 1, 1) * torch.ones_like(x)


def test_a_forecast_of_a_linear_velocity_is_the_exact_tail():
    """Euler's own velocities are recovered where they lie on a line; 15 steps of latents up to 3."""
    algorithm = GranularGRPO(branch_steps=(0, 4), granularities=(1, 2))
    fast, exact = (
        rolled_out(algorithm.plans(16), algorithm, policy=Straight(), tails=tails)
        for tails in (Tails(forecast=True), EXACT)
    )
    for mine, theirs in zip(fast, exact, strict=True):
        torch.testing.assert_close(mine.finals, theirs.finals, **rounding(15 * 10, size=3.0))


def test_a_run_with_fast_tails_learns_from_exact_transitions():
    """Evaluations fall, and the log-probs of rollout and training pass agree to the last bit as
    they do without."""
    fast, exact = (trainer(None, *options) for options in (["sampling.tails.forecast=true"], []))
    ours, theirs = fast.iterate(), exact.iterate()
    for t, row in ((fast, ours), (exact, theirs)):
        expected = 2 * count_evaluations(t.plans(), 6, t.config.sampling.tails)
        assert row["evaluations"] == expected and row["log_prob_drift"] == 0
    assert ours["evaluations"] < theirs["evaluations"]
    assert ours["reward/bright"] != theirs["reward/bright"]


def test_a_forecast_is_of_euler_steps_alone():
    with pytest.raises(UserError, match="forecast replaces velocities of Euler steps"):
        config("sampling.tails.forecast=true", "sampling.tails.solver=dpmpp2m")


def rolled_out(plans, algorithm, group_size=3, prompts=1, policy=None, **options):
    """Rollouts of an engine with these options."""
    engine = make_engine(prompts=prompts, policy=policy, **options)
    return engine.rollout(plans, group_size, algorithm.kernel(SIGMAS), noise)
