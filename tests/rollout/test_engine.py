"""The engine against a plain loop that shares nothing, and its counts against closed forms."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch

from g2rpo.algorithms.flow_grpo import FlowGRPO
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.core.flow import dance_sde, ode_step, sde_kernel, sigma_grid
from g2rpo.core.noise import generator_for
from g2rpo.core.plans import Plan
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.planning import count_evaluations
from g2rpo.rollout.tails import Tails
from tests.support import reference
from tests.support.tolerances import rounding

SIGMAS = sigma_grid(16, 3.0)


def noise(prompt, *purpose):
    return generator_for(prompt, *purpose)


def own_noise(prompt, _, *purpose):
    """The noise of a prompt that is alone, and so the first of all."""
    return noise(prompt, *purpose)


class Network(GaussianPolicy):
    """A policy whose velocity is no closed form but mixes entries, and counts the rows it is asked
    for."""

    rows, mixing = 0, 0.3

    @contextmanager
    def unguided(self):
        self.mixing = 0.1
        yield
        self.mixing = 0.3

    def velocity(self, x, sigma, cond):
        self.rows += len(x)
        mixed = torch.sin(3 * x + x.roll(1, -1) * sigma.reshape(-1, 1, 1, 1))
        return super().velocity(x, sigma, cond) + self.mixing * mixed


def make_engine(prompts=1, policy=None, **options):
    policy = policy or Network()
    return Engine(
        policy=policy,
        cond=policy.encode([str(0.1 * i) for i in range(prompts)]),
        sigmas=SIGMAS,
        **options,
    )


@pytest.mark.parametrize(
    ("granularities", "expected"),
    [((1,), 1112), ((1, 2), 1496), ((1, 3), 8 + 12 * (125 - 16)), ((1, 2, 3), 1700)],
)
def test_evaluations_equal_the_closed_form(granularities, expected):
    """8 + 12 * (sum of tail lengths - 2 shared velocities per extra granularity and branch step),
    T=16, G=12, steps 0..7."""
    algorithm = GranularGRPO(granularities=granularities)
    plans = algorithm.plans(16)
    engine = make_engine()
    engine.rollout(plans, 12, algorithm.kernel(SIGMAS), noise)
    assert engine.policy.rows == engine.evaluations == count_evaluations(plans, 12) == expected


def test_groups_of_all_prompts_share_batches():
    """Three prompts, four members. A window of six steps from noise of their own, then ten steps of
    tail: 16 calls.

    Another window, of four steps from a shared latent, costs three calls for its anchor; the rest
    rides along."""
    own = Plan(0, 6, (tuple(range(6, 17)),), shared_noise=False)
    engine = make_engine(prompts=3)
    engine.rollout([own], 4, GranularGRPO().kernel(SIGMAS), noise)
    assert (engine.calls, engine.evaluations) == (16, 3 * 4 * 16)
    both = make_engine(prompts=3)
    both.rollout([own, Plan(2, 6, (tuple(range(6, 17)),))], 4, GranularGRPO().kernel(SIGMAS), noise)
    assert (both.calls, both.evaluations) == (3 + 16, 3 * 4 * 16 + 3 * (3 + 4 * 13))


PLANS = {
    "g2rpo": GranularGRPO(branch_steps=(0, 3, 6), granularities=(1, 2, 3)).plans(16),
    "closed": GranularGRPO(branch_steps=(1, 14), granularities=(1, 4), tail="closed").plans(16),
    "flow_grpo": FlowGRPO(eta=0.5).plans(16),
    "merged": [Plan(2, 5, ((5, 6, 7, 10, 16),), merged=True), Plan(1, 2, ((2, 7, 16),))],
    "merged, own noise": [Plan(2, 5, ((5, 6, 16),), merged=True, shared_noise=False)],
    "window": [Plan(2, 6, ((6, 7, 10, 16),))],
    "a baseline": [Plan(k, k + 1, (tuple(range(k + 1, 17)),), baseline=True) for k in (1, 4)],
    "corrected, own noise": [Plan(0, 15, ((15, 16),), shared_noise=False, corrected=True)],
    "some corrected": [
        Plan(2, 6, ((6, 7, 10, 16),), corrected=True),
        Plan(1, 4, ((4, 7, 16),), merged=True, corrected=True),
        Plan(2, 6, ((6, 16),)),
    ],
    "every step, own noise": [Plan(0, 16, ((16,),), shared_noise=False)],
    "noise in common": [Plan(0, 16, ((16,),), shared_noise=False, common=0.8)],
    "a latent of the ODE": [
        Plan(0, 0, (tuple(range(17)),), shared_noise=False, kept_sigma=0.5),
        Plan(0, 0, ((0, 9, 12, 16),), shared_noise=False, kept_sigma=0.9),
    ],
    "a latent of the first tail": [Plan(2, 3, (tuple(range(3, 17)), (3, 4, 16)), kept_sigma=0.3)],
    "window, own noise": [Plan(3, 5, (tuple(range(5, 17)), (5, 6, 16)), shared_noise=False)],
}


WALKED = rounding(16 * 20, size=4.0)
"""Sixteen steps of latents up to 4."""


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("batch_size", [1, 7, 64])
@torch.no_grad()
def test_sharing_changes_no_latent(name, batch_size):
    """Elementwise float32 arithmetic: rows do not know their batch, but for a processor that fuses
    operations in the body of a loop and not at its end."""
    same = partial(torch.testing.assert_close, **WALKED)
    group_size, kernel = 3, sde_kernel(dance_sde(0.5))
    engine = make_engine(prompts=2, batch_size=batch_size)
    rollouts = engine.rollout(PLANS[name], group_size, kernel, noise)
    assert [r.prompt for r in rollouts] == sorted([0, 1] * len(PLANS[name]))
    assert engine.evaluations == 2 * count_evaluations(PLANS[name], group_size)
    for got in rollouts:
        cond, own = engine.cond.rows([got.prompt]), partial(own_noise, got.prompt)
        asked = reference.rollout(engine.policy, cond, SIGMAS, got.plan, group_size, kernel, own)
        same(got.finals, asked.finals)
        assert (got.kept is None) == (got.plan.kept_sigma is None)
        if got.kept is not None and asked.kept is not None:
            assert got.kept[0] == asked.kept[0]
            same(got.kept[1], asked.kept[1])
        same(got.ode, asked.ode) if got.plan.baseline else same(got.scored, asked.finals)
        assert [t.step for t in got.transitions] == [t.step for t in asked.transitions]
        for mine, theirs in zip(got.transitions, asked.transitions, strict=True):
            shared = got.plan.shared_noise and mine.step == got.plan.branch
            assert len(mine.x) == (1 if shared else group_size)
            for field in ("x", "old_mean", "x_next", "old_log_prob"):
                own_value, value = getattr(mine, field), getattr(theirs, field)
                same(own_value.expand_as(value) if shared else own_value, value)


@torch.no_grad()
def test_sample_is_the_plain_ode():
    engine = make_engine(prompts=2, batch_size=3)
    y = x = engine.initial(noise)
    for step in range(16):
        v = engine.policy.velocity(y, SIGMAS[[step, step]], engine.cond)
        y = ode_step(y, v, SIGMAS[step], SIGMAS[step + 1])
    torch.testing.assert_close(engine.sample(x), y, **WALKED)
    assert engine.evaluations == 32
    fast = make_engine(prompts=2, tails=Tails(forecast=True))  # the option is of rollouts alone
    torch.testing.assert_close(fast.sample(x), y, **WALKED)


IMPOSSIBLE = [
    (2, 2, ((2, 16),)),
    (0, 1, ()),
    (0, 1, ((2, 16),)),
    (0, 1, ((1, 1, 16),)),
    (0, 1, ((1, 16), (1, 15))),
    (0, 1, ((1, 16),), {"common": 0.5}),  # noise in common is of own noise
    (0, 1, ((1, 16),), {"common": 1.1, "shared_noise": False}),
    (0, 1, ((1, 16),), {"baseline": True, "shared_noise": False}),
    (0, 16, ((16,),), {"corrected": True}),  # no score at sigma = 0
]


def test_impossible_plans_are_refused():
    for branch, merge, tails, *more in IMPOSSIBLE:
        with pytest.raises(ValueError):
            Plan(branch, merge, tails, **(more[0] if more else {}))
