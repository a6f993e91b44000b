"""Antithetic pairs of branch noise: the draws, who has them, and how much signal and noise a group's gradient then has."""

import math
from dataclasses import replace

import pytest
import torch

from g2rpo.algorithms.allocation import Allocator
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.commands.train import load_config
from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.errors import UserError
from g2rpo.flow import sigma_grid
from g2rpo.objectives import group_normalize
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.planning import count_evaluations
from g2rpo.seeding import generator_for
from g2rpo.types import Plan

SIGMAS = sigma_grid(6, 3.0)


def rollout(plan, size=6, **engine):
    policy = GaussianPolicy(size=2)
    engine = Engine(policy=policy, cond=policy.encode(["0.1"]), sigmas=SIGMAS, **engine)
    return engine.rollout([plan], size, GranularGRPO().kernel(SIGMAS), lambda prompt, *key: generator_for("pairs", *key))[0]


def noises(transition, step):
    """What was drawn, [G, D], in standard deviations."""
    kernel = GranularGRPO().kernel(SIGMAS)
    std = kernel(transition.x, transition.x, SIGMAS[step], SIGMAS[step + 1]).std
    return ((transition.x_next - transition.old_mean) / std).flatten(1)


def test_a_pair_differs_by_the_sign_of_its_noise():
    """Every member is a standard normal draw; float32 rounds the difference of latents of size 1 by 1e-7 over a std of .3."""
    (t,) = rollout(Plan(1, 2, ((2, 3, 4, 5, 6),), antithetic=True)).transitions
    z = noises(t, 1)
    drawn = torch.randn(3, 12, generator=generator_for("pairs", "branch", 1, 1))
    torch.testing.assert_close(z[0::2], drawn, atol=1e-5, rtol=0)
    torch.testing.assert_close(z[1::2], -drawn, atol=1e-5, rtol=0)


def test_noise_at_several_steps_has_one_sign_throughout():
    """The Gaussian's steps are affine, so the mean of a pair's latents is that of no noise at all, at every step."""
    plan = Plan(0, 3, ((3, 4, 5, 6),), antithetic=True)
    own = rollout(plan)
    middle = own.finals[0].unflatten(0, (3, 2)).mean(1)
    torch.testing.assert_close(middle, middle[:1].expand(3, -1, -1, -1), atol=1e-5, rtol=0)
    assert (own.finals[0].std(0) > 0.05).all()
    for t in own.transitions[1:]:
        torch.testing.assert_close(noises(t, t.step)[0::2], -noises(t, t.step)[1::2], atol=1e-5, rtol=0)


NAMED = ("g2rpo", "pave_grpo", "adagrpo", "tempflow_grpo", "mixgrpo", "mixgrpo_flash", "dancegrpo", "flow_grpo", "flow_cps",
         "flow_grpo_fast", "grpo_guard", "flow_dppo")  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_every_algorithm_with_shared_noise_can_have_them(name):
    own = {} if issubclass(ALGORITHMS[name], GranularGRPO) else {"shared_noise": True}
    plain, pairs = (ALGORITHMS[name](**own, antithetic=antithetic).plans(16) for antithetic in (False, True))
    assert not any(plan.antithetic for plan in plain) and all(plan.antithetic for plan in pairs)
    assert [(p.branch, p.merge, p.tails, p.trained, p.solver) for p in plain] == [
        (p.branch, p.merge, p.tails, p.trained, p.solver) for p in pairs
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.group_size=13"], "algorithm: antithetic pairs need an even group_size, got 13"),
        (["algorithm.name=mixgrpo", "algorithm.group_size=7"], "antithetic pairs need an even group_size, got 7"),
        (["algorithm.name=flow_grpo"], "antithetic pairs need shared_noise=true"),
    ],
)
def test_what_cannot_be_paired_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config("scenes", [*overrides, "algorithm.antithetic=true"])


def test_plans_and_engines_refuse_it_as_well():
    with pytest.raises(ValueError, match="antithetic pairs need shared_noise=true"):
        Plan(0, 1, ((1, 2),), shared_noise=False, antithetic=True)
    with pytest.raises(ValueError, match="even group_size, got 5"):
        rollout(Plan(1, 2, ((2, 3, 4, 5, 6),), antithetic=True), size=5)


def test_groups_of_auto_stay_even():
    """12 * 36 // 55 = 7 members calibrate (`test_allocation`)."""
    asked = GranularGRPO(granularities="auto", branch_steps=(0, 3, 6))
    sizes = [Allocator(replace(asked, antithetic=on), 16, count_evaluations).at(0).group_size for on in (False, True)]
    assert sizes == [7, 6]


def signal_and_noise(rewards, e):
    """Of the gradients mean A e of groups with rewards [N, G] and noise [N, G, D]: their mean [D], and their squared length
    across the first two dimensions, where rewards have no signal, per dimension and relative to G."""
    gradients = (group_normalize(rewards)[:, :, None] * e).mean(1)
    return gradients.mean(0), float(gradients[:, 2:].square().mean()) * rewards.shape[1]


def drawn(pairs, groups, size, entries=10):
    e = torch.randn(groups, size, entries, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.stack([e[:, : size // 2], -e[:, : size // 2]], 2).flatten(1, 2) if pairs else e


def chi(n):
    """The mean of a chi variable with n degrees of freedom, over sqrt(n)."""
    return math.sqrt(2 / n) * math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2))


@pytest.mark.parametrize("size", [4, 12])
def test_a_linear_reward_has_half_the_signal_to_noise_ratio_in_pairs(size):
    """docs/algorithm.md: exact for any group size. 40,000 groups: a gradient's entry has std below 1, so its mean errs by .005,
    and a mean of 40,000 * 8 squares errs by sqrt(2 / 320,000) = .0025 of itself; 4 of those."""
    for pairs, signal, noise in (
        (False, chi(size - 1) * (size - 1) / size, (size - 1) / size),
        (True, chi(size // 2) * math.sqrt((size - 1) / size), 2 * (size - 1) / size),
    ):
        e = drawn(pairs, 40_000, size)
        mean, spread = signal_and_noise(3 * e[:, :, 0] + 7, e)
        assert float(mean[0]) == pytest.approx(signal, abs=0.02) and spread == pytest.approx(noise, rel=0.01)


def test_an_even_reward_adds_nothing_in_pairs():
    e = drawn(True, 100, 12)
    even = e[:, :, 1].square()
    advantages = group_normalize(even)
    assert torch.equal(advantages[:, 0::2], advantages[:, 1::2]) and float(advantages.abs().max()) > 1
    assert signal_and_noise(even, e)[1] < 1e-20


@pytest.mark.parametrize("odd", [0.2, 0.5, 0.8])
def test_pairs_pay_where_pairs_correlate(odd):
    """r = sqrt(q) e_0 + sqrt(1 - q) b with b = 1 or -1 as |e_1| is above its median or below: pairs correlate by 1 - 2q, so
    noise is (1 - rho) / G = 2q / G in pairs, 1 / G otherwise, and the signal sqrt(q) in both. 1 / std^2 of a group exceeds its
    limit by (kurtosis - 1) / G, at most 2 / 64 here, and noise may be lower by 1 / G; sampling errs by less than 1 %."""
    for pairs, noise in ((False, 1.0), (True, 2 * odd)):
        e = drawn(pairs, 4000, 64)
        median = 0.6744897502
        rewards = math.sqrt(odd) * e[:, :, 0] + math.sqrt(1 - odd) * ((e[:, :, 1].abs() > median) * 2 - 1)
        mean, spread = signal_and_noise(rewards, e)
        assert spread == pytest.approx(noise, rel=0.04) and float(mean[0]) == pytest.approx(math.sqrt(odd), rel=0.04)
