"""The neighbours of G2RPO: their plans, steps and losses against the published descriptions, closed
forms and each other."""

import itertools
import math
from collections import Counter
from dataclasses import fields
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from g2rpo.algorithms.flow_grpo import (
    DanceGRPO,
    GRPOGuard,
    MixGRPO,
    MixGRPOFlash,
    TempFlowGRPO,
)
from g2rpo.algorithms.g2rpo import GranularGRPO
from g2rpo.algorithms.policy_gradient import PolicyGradient, TakenSteps
from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.core.flow import cps_kernel, flow_sde, sde_kernel, sigma_grid
from g2rpo.core.objectives import clipped_surrogate, group_normalize, kernel_kl
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.planning import count_evaluations, count_trained
from tests.support.runs import config, fits, trainer
from tests.support.tables import rows
from tests.support.tolerances import EXACT, FLOAT64, Tolerance, near, reordered, rounding
from tests.support.watched import Watched

ONCE = ("algorithm.update_every=rollout", "algorithm.group_size=6", "sampling.num_steps=8")


def named(name, *overrides, policy=None):
    return trainer(None, f"algorithm.name={name}", *fits(name), *overrides, policy=policy)


def weights(t):
    return t.learner.parameters[0].detach().clone()


# --- every algorithm


@pytest.mark.parametrize(
    "name", [name for name, kind in ALGORITHMS.items() if issubclass(kind, PolicyGradient)]
)
def test_the_ratio_is_exactly_one_before_the_first_update_and_the_weights_move(name):
    t = named(name, *ONCE)
    before = weights(t)
    row = t.iterate()
    assert not any(row[key] for key in ("ratio_deviation", "log_prob_drift", "skipped_updates"))
    assert not torch.equal(weights(t), before)


@pytest.mark.parametrize(
    ("setting", "expected"),
    rows(
        """
flow_grpo 10 -> 240 216 216
flow_grpo_fast 10 -> 240 72 0
flow_cps 10 -> 240 216 216
grpo_guard 10 -> 240 216 0
tempflow_grpo 10 -> 279
dancegrpo 16 -> 181
mixgrpo 25 -> 289
mixgrpo_flash 25 -> 121
mixgrpo_flash 25 schedule=frozen compression=0.2 -> 73
pave_grpo 16 -> 583 16 0
pave_grpo 16 granularities=[1,2] -> 799 16 0
pave_grpo 16 segments=[4] -> 583 16 0
pave_grpo 16 segments=[] -> 583 4 0
diffusion_nft 10 -> 240 216 432
diffusion_nft 10 kl_weight=0 -> 240 216 216
diffusion_nft 25 share=0.5 -> 600 288 576
epg 10 -> 240 216 432
awm 14 -> 336 144 288
dgpo 10 group_size=24 -> 240 96 384
refl 25 group_size=4 -> 100 4 0
opsd 10 -> 240 24 24
opsd 10 kl_weight=0.1 -> 240 24 48
g2rpo 16 group_size=12 branch_steps=[0,1,2,3,4,5,6,7] granularities=[1,2,3] -> 1700
"""
    ),
)
def test_the_cost_of_the_published_settings(setting, expected):
    """Evaluations of a prompt's rollouts; rows of its updates with a gradient, and without: of old
    weights, of the untrained model, and of the weight of DGPO's groups. What members share is
    evaluated once: the first step by DanceGRPO's 12, 1 + 12 x 15; seven steps of an anchor by
    Pave-GRPO's, which branch at 0, 2, 4 and 6, 7 + 12 (15 + 13 + 11 + 9)."""
    name, steps, *keys = setting.split()
    algorithm = config(f"algorithm.name={name}", *(f"algorithm.{key}" for key in keys)).algorithm
    evaluations, *trained = map(int, expected.split())
    plans = algorithm.plans(int(steps))
    assert count_evaluations(plans, algorithm.group_size) == evaluations
    assert not trained or count_trained(algorithm, plans, int(steps)) == (*trained,)


@pytest.mark.parametrize(("every", "sizes"), [(2, [2, 2, 2]), (4, [4, 2]), (100, [6])])
def test_updates_after_so_many_members_deal_the_group(every, sizes):
    t = named("flow_grpo", "algorithm.group_size=6", f"algorithm.update_every={every}")
    seen = Watched(t)
    row = t.iterate()
    assert [len(batch[0].advantages) for batch in seen.batches] == sizes
    assert len(seen.gradients) == len(sizes) and (row["ratio_deviation"] > 0) == (len(sizes) > 1)
    whole = torch.cat([batch[0].data["x_next"] for batch in seen.batches])
    assert len(whole) == 6 and len(torch.unique(whole.flatten(1), dim=0)) == 6


# --- reductions: what one algorithm becomes when another's choice is made


def test_mixgrpo_divides_the_rewards_weights_by_their_sum():
    """Of their sizes, as published (tests/published/test_mixgrpo.py); 0 where all weights are."""
    rewards = torch.randn(3, 2, 1, 4, generator=torch.Generator().manual_seed(0))
    large = MixGRPO().advantages(rewards, torch.tensor([-2.0, 6.0]))
    none = MixGRPO().advantages(rewards, torch.zeros(2))
    shares = GranularGRPO().advantages(rewards, torch.tensor([-0.25, 0.75]))
    assert torch.equal(large, shares) and not none.any()


# --- windows and trained steps


def published_windows(stay, stride, rule="progressive"):
    """The published scheduler from its description, for windows of 4 of 25 steps and 300
    iterations: a counter of iterations and the window's first step; the steps of a window end
    before step 23. `rule` is how long the window stays at a step."""
    last, start, counter, windows = 23, 0, 0, []
    for _ in range(300):
        windows.append(list(range(start, min(start + 4, last))))
        counter += 1
        if rule == "decay":
            longest, shortest = stay
            share = start / last
            wait = max(shortest, int(longest * (1 - share) + shortest * share))
        elif rule == "exp":
            wait = math.ceil(stay * math.exp(-0.1 * max(start - 13, 0)))
        else:
            wait = stay
        if counter >= wait:
            counter = 0
            start += stride
        if start > last:
            start, counter = 0, 0
    return windows


def windows(algorithm, num_steps=25, iterations=300, seed=0):
    plans = [plan for i in range(iterations) for plan in algorithm.plans(num_steps, i, seed)]
    assert all(plan.trained is None for plan in plans)
    return [list(range(plan.branch, plan.merge)) for plan in plans]


class Far(MixGRPO):
    stride = 4


@pytest.mark.parametrize(
    ("algorithm", "published"),
    [
        (MixGRPO(), (25, 1)),
        (MixGRPOFlash(), (20, 1)),
        (MixGRPOFlash(schedule="frozen"), (20, 0)),
        (Far(window_iterations=10), (10, 4)),
        (Far(schedule="decay"), ((10, 1), 4, "decay")),
        (MixGRPO(schedule="decay"), ((10, 1), 1, "decay")),
        (Far(schedule="exp_decay", window_iterations=15), (15, 4, "exp")),
    ],
)
def test_the_window_moves_as_published(algorithm, published):
    """On all of 300 iterations; or, with stride 1 far enough, until the published window is empty
    (where its code fails and this one rolls back)."""
    theirs, ours = published_windows(*published), windows(algorithm)
    until = theirs.index([]) if [] in theirs else 300
    assert ours[:until] == theirs[:until] and until > 100
    assert all(ours) and (until == 300 or ours[until][0] == 0)


def test_a_random_window_lies_anywhere_before_the_end():
    """23 - 4 + 1 places; one is missed with probability 20 (19/20)^600 < 1e-12."""
    random = MixGRPO(schedule="random")
    found = windows(random, iterations=600)
    assert {window[0] for window in found} == set(range(20))
    assert all(window[-1] < 23 and len(window) == 4 for window in found)
    assert windows(random, seed=1) != windows(random)


SHORT = """
flow_grpo_fast 4 -> window_size
mixgrpo 2 -> num_steps
awm 5 -> times
dgpo 5 -> times
diffusion_nft 3 share=0.3 -> share
epg 1 -> share
g2rpo 6 branch_steps=[5] -> branch_steps must lie in 0\\.\\.4
g2rpo 10 branch_steps=[0,9] branch_schedule=turns -> branch_steps
g2rpo 10 branch_steps=[0,9] branch_schedule=random -> branch_steps
"""


@pytest.mark.parametrize(("setting", "said"), rows(SHORT))
def test_a_grid_that_does_not_fit_is_refused_in_whichever_iteration(setting, said):
    name, steps, *keys = setting.split()
    algorithm = config(f"algorithm.name={name}", *(f"algorithm.{key}" for key in keys)).algorithm
    for iteration in range(4):
        with pytest.raises(ValueError, match=said):
            algorithm.plans(int(steps), iteration)


def test_dancegrpo_trains_random_steps_and_never_the_last():
    """9 of 15, each drawn with probability 0.6: over 400 iterations the share has a standard error
    of 0.0245; 5 of them."""
    drawn = [DanceGRPO().plans(16, iteration)[0].trained for iteration in range(400)]
    assert all(len(set(steps)) == 9 and set(steps) <= set(range(15)) for steps in drawn)
    shares = Counter(step for steps in drawn for step in steps)
    assert all(abs(shares[step] / 400 - 0.6) < 5 * 0.0245 for step in range(15))


@pytest.mark.parametrize("compression", [0.05, 0.2, 0.4, 0.7, 1.0])
def test_flash_tails_have_the_published_number_of_points_and_reach_the_image(compression):
    """n = int(max((T - l) ratio, 1)) points for l the last stochastic step. The published n = 1
    never reaches the image; here two points are the least."""
    for iteration in range(0, 1000, 7):
        (plan,) = MixGRPOFlash(compression=compression).plans(25, iteration)
        (tail,) = plan.tails
        points = int(max((25 - (plan.merge - 1)) * compression, 1))
        assert len(tail) == max(points, 2) and tail[0] == plan.merge and tail[-1] == 25
        jumps = [b - a for a, b in itertools.pairwise(tail)]
        assert max(jumps) - min(jumps) <= 1  # evenly spread, up to the grid


def test_flash_points_are_rounded_to_the_nearest_step():
    """12 steps after the window in int(13 x .5) - 1 = 5 jumps of 2.4: 2.4, 4.8, 7.2, 9.6, 12."""
    (plan,) = MixGRPOFlash(compression=0.5, schedule="frozen").plans(16)
    assert plan.tails == ((4, 6, 9, 11, 14, 16),)


# --- Flow-CPS


def test_the_cps_step_is_the_published_one():
    generator = torch.Generator().manual_seed(1)
    same = partial(assert_close, **rounding(40, size=4.0, unit=FLOAT64))
    x, v, taken = torch.randn(3, 2, 6, generator=generator, dtype=torch.float64)
    sigmas = sigma_grid(10, 3.0).double()
    for sigma, sigma_next in itertools.pairwise(sigmas):
        s = sigma_next * math.sin(0.8 * math.pi / 2)
        noise = (x + v * (1 - sigma)) * torch.sqrt(sigma_next**2 - s**2)
        mean = (x - sigma * v) * (1 - sigma_next) + noise
        landing = cps_kernel(0.8)(x, v, sigma, sigma_next)
        same(landing.mean, mean)
        same(landing.std, s)
        same(landing.log_prob(taken), -((taken - mean) ** 2).mean(1))
    # a narrow velocity is multiplied in float32
    at = x.float(), v.bfloat16(), sigmas[3].float(), sigmas[4].float()
    wide = cps_kernel(0.8)(at[0], at[1].float(), *at[2:])
    assert torch.equal(cps_kernel(0.8)(*at).mean, wide.mean)


def test_dancegrpos_diffusion_is_the_same_at_every_sigma():
    sigmas = sigma_grid(10, 3.0)
    std = DanceGRPO(eta=0.3).kernel(sigmas)(*torch.zeros(2, 10, 1), sigmas[:-1], sigmas[1:]).std
    assert_close(std, 0.3 * (sigmas[:-1] - sigmas[1:]).sqrt(), **rounding(4))


def kept(kernel_of, num_steps, shift, std=0.6):
    """The samples' share of the std of a Gaussian target. Its exact velocity is linear in x, so the
    variance is a recursion."""
    sigmas, one = sigma_grid(num_steps, shift).double(), torch.ones(1, 1, dtype=torch.float64)
    kernel, variance = kernel_of(sigmas), 1.0
    for sigma, sigma_next in itertools.pairwise(sigmas):
        marginal = (1 - sigma) ** 2 * std**2 + sigma**2
        velocity = (sigma - (1 - sigma) * std**2) / marginal  # E[noise | x] - E[image | x] at x = 1
        step = kernel(one, velocity * one, sigma, sigma_next)
        variance = float(step.mean) ** 2 * variance + float(step.std) ** 2
    return math.sqrt(variance) / std


def sde(eta):
    return lambda sigmas: sde_kernel(flow_sde(sigmas, eta))


def cps(eta):
    return lambda sigmas: cps_kernel(eta)


@pytest.mark.parametrize(
    ("kernel_of", "num_steps", "shift", "percent"),
    [
        (cps(0.8), 16, 1.0, 74.1),
        (cps(0.8), 32, 1.0, 76.9),
        (cps(0.8), 64, 1.0, 78.5),
        (cps(0.8), 1024, 1.0, 80.6),
        (cps(0.8), 16, 3.0, 69.3),
        (sde(0.8), 16, 3.0, 91.9),
    ],
)
def test_what_cps_and_the_sde_keep_of_a_gaussian(kernel_of, num_steps, shift, percent):
    """To the digits of docs/neighbours.md, after which float32's rounding of the grid is far."""
    assert 100 * kept(kernel_of, num_steps, shift) == pytest.approx(percent, abs=0.05)


# --- losses


def gaussian_kl(shift, sigma, sigma_next, g, std=0.6):
    """KL of two steps whose policies' image means differ by `shift`, per entry: Flow-GRPO's Eq. 14
    with v - v' = -sigma shift / variance (the Gaussian policy's velocity is linear in its mean)."""
    dsigma, variance = sigma - sigma_next, (1 - sigma) ** 2 * std**2 + sigma**2
    return (
        dsigma / 2 * (g * (1 - sigma) / (2 * sigma) + 1 / g) ** 2 * (sigma / variance * shift) ** 2
    )


SQUARED = Tolerance(rtol=20 * rounding(60)["rtol"], atol=0.0)
"""Of a squared difference of velocities that is a tenth of them."""


def test_the_kl_to_the_base_is_the_papers():
    policy = GaussianPolicy(mean=0.2)
    t = named("flow_grpo", *ONCE, policy=policy)
    policy.mean.data += 0.3
    row = t.iterate()
    sigmas = t.sigmas.double()
    g, widths = flow_sde(sigmas, 0.7), sigmas[:7] - sigmas[1:8]
    kl = torch.stack([gaussian_kl(0.3, *sigmas[i : i + 2], g(sigmas[i])) for i in range(7)])
    assert row["kl"] == near(float(kl.mean()), SQUARED)
    # advantages of a group add up to 0, so nothing else is left of the loss; the code has |dt|
    penalty = t.algorithm.kl_weight * float((kl * widths).mean())
    silent = reordered(42 * 2, 1.0)["atol"]
    assert row["loss"] == near(penalty, Tolerance(rtol=SQUARED["rtol"], atol=silent))
    plain = named("flow_grpo", *ONCE, "algorithm.kl_weight=0", policy=GaussianPolicy(mean=0.2))
    assert "kl" not in plain.iterate()


def steps_of(size, **given):
    """What a loss is told about `size` members; what is not given is 0, std and dsigma are 1."""
    told = {field.name: torch.zeros(size) for field in fields(TakenSteps)}
    told |= {"std": torch.ones(size), "dsigma": torch.ones(size), "step": torch.zeros(size).long()}
    return TakenSteps(**told | given)


def steps_between(new, old, x_next, **given):
    """Of the transition to `x_next`, by its kernels with the weights now and when it was taken."""
    ones, log_prob = torch.ones(len(x_next)), new.log_prob(x_next)
    told = {"old_kl": kernel_kl(new, old) * ones, "std": new.std * ones, **given}
    return steps_of(len(x_next), log_prob=log_prob, old_log_prob=old.log_prob(x_next), **told)


def collected(monkeypatch, kind):
    """What the losses of `kind` are given from now on."""
    seen = []
    loss = kind.policy_loss
    monkeypatch.setattr(
        kind, "policy_loss", lambda self, steps: seen.append(steps) or loss(self, steps)
    )
    return seen


def test_a_loss_is_told_how_far_the_weights_have_gone(monkeypatch):
    """After a shift of the policy between two updates, old_kl is the KL of the two policies' steps,
    in closed form."""
    seen = collected(monkeypatch, GRPOGuard)
    policy = GaussianPolicy(mean=0.1)
    short = ("algorithm.group_size=4", "algorithm.update_every=2", "sampling.num_steps=6")
    t = named("grpo_guard", *short, policy=policy)
    t.learner.optimizer.step = lambda: policy.mean.data.add_(0.2)
    seen.clear()  # of what counts the run's evaluations
    t.iterate()
    first, second = seen
    assert not first.old_kl.any() and torch.equal(first.log_prob, first.old_log_prob)
    sigmas = t.sigmas.double()
    g = flow_sde(sigmas, 0.7)
    expected = [gaussian_kl(0.2, sigmas[i], sigmas[i + 1], g(sigmas[i])) for i in range(5)]
    # of two members of two prompts
    expected = torch.stack(expected).float().repeat_interleave(2).repeat(2)
    assert_close(second.old_kl, expected, **SQUARED)


def test_tempflow_weighs_a_step_by_its_noise(monkeypatch):
    seen = collected(monkeypatch, TempFlowGRPO)
    t = named("tempflow_grpo", *ONCE)
    seen.clear()  # of what counts the run's evaluations
    t.iterate()
    (steps,) = seen
    here, widths = t.sigmas[:7], t.sigmas[:7] - t.sigmas[1:8]
    std = flow_sde(t.sigmas, 0.7)(here) * widths.sqrt()
    assert_close(steps.std, std.repeat_interleave(6).repeat(2), **rounding(10))
    assert_close(steps.dsigma, widths.repeat_interleave(6).repeat(2), **EXACT)
    plain = clipped_surrogate(steps.log_prob - steps.old_log_prob, steps.advantages, 1e-4)
    weighed = TempFlowGRPO(group_size=6).policy_loss(steps)
    assert_close(weighed, 2.25 * steps.std * plain, **rounding(10))


def test_the_std_of_the_batch_is_over_all_groups():
    rewards = torch.tensor([[1.0, 3.0], [10.0, 10.2]])
    expected = (rewards - rewards.mean(1, keepdim=True)) / rewards.std()
    assert_close(group_normalize(rewards, batch_std=True), expected, **rounding(8, size=3.0))
