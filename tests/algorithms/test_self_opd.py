"""Self-OPD: its weights and gradient in closed form, the ODE's picture in a run, and the same samples
as G2RPO's."""

import math

import pytest
import torch
from torch import nan

from g2rpo.algorithms.self_opd import SelfOPD
from g2rpo.core.noise import Normal
from g2rpo.lab.plan.counting import count
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.scoring import above_baseline
from tests.algorithms.test_neighbours import steps_of
from tests.support.runs import brightness, trainer
from tests.support.tolerances import near, reordered, rounding

ONE = torch.ones(1)
SAMPLES = ("algorithm.group_size=6", "trainer.prompts_per_iteration=2")
STEPS = ("algorithm.name=self_opd", "algorithm.step_weights=[1,0,1]", *SAMPLES)


def groups_of(*overrides, **more):
    t = trainer(None, *overrides, **more)
    return t, t.sample_groups()


# --- the weights


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([1, 2, 3], [1, 2, 3]),  # of std 1
        ([-4, 0, 4], [-1, 0, 1]),  # of std 4
        ([5e-5, 5e-5, 5e-5], [0.5, 0.5, 0.5]),  # the smallest std is 1e-4
        ([1, nan, 3], [1 / math.sqrt(2), 0, 3 / math.sqrt(2)]),
        ([1, nan, nan], [0, 0, 0]),
        ([nan, nan, nan], [0, 0, 0]),
    ],
)
def test_an_advantage_is_what_a_member_gains_over_the_ode(gains, expected):
    """In units of the group's unbiased std."""
    found = SelfOPD(group_size=3).advantages(torch.tensor(gains).float()[None, None, None], ONE)
    torch.testing.assert_close(found, torch.tensor([expected]).float(), **rounding(8))


def test_rewards_are_added_up_before_they_are_compared():
    gains = torch.tensor([[1.0, 2, 3], [3.0, 0, 3], [nan, nan, nan]])[None, :, None]
    found = SelfOPD().advantages(gains, torch.tensor([1.0, 2, 0]))
    total = torch.tensor([7.0, 2, 9])
    torch.testing.assert_close(found[0], total / total.std(), **rounding(8))


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        ([0.8, -0.5, -0.5, -0.5], [0.8, -0.25, -0.5, 0.0]),
        ([3.0, -4.0, -1.5, -4.0], [1.0, -1.0, -1.0, 0.0]),  # clamped after they are made smaller
        ([-0.4, -0.8, -0.8, 0.2], [0.0, -0.4, -0.8, 0.2]),  # the last is the best
    ],
)
def test_a_sample_in_the_direction_of_the_best_is_pushed_away_from_least(advantages, expected):
    """Directions from the mean with cosines 1, 0, -1, 1 to the first; lengths do not count."""
    mean = torch.tensor([[5.0, -7.0]])
    x_next = mean + torch.tensor([[2.0, 0], [0, 3.0], [-1.0, 0], [9.0, 0]])
    found = SelfOPD().branch_weights(torch.tensor(advantages), x_next, mean)
    torch.testing.assert_close(found, torch.tensor(expected), **rounding(4, size=1.0))


def test_a_sample_that_is_not_finite_is_not_the_best():
    """Its advantage is 0, and the others' are below."""
    x_next = torch.tensor([[nan, nan], [0, 3.0], [-1.0, 0], [9.0, 0]])
    found = SelfOPD().branch_weights(torch.tensor([0, -0.5, -0.6, -0.4]), x_next, torch.zeros(1, 2))
    torch.testing.assert_close(found, torch.tensor([0, -0.25, -0.6, 0]), **rounding(4, size=1.0))


# --- the loss


ADDED = reordered(24, 0.05)
"""Gradients of so many members and steps, up to 0.05 in one entry."""


def test_loss_and_gradient_are_the_closed_forms():
    """On the Gaussian policy, in float64: dv/dm = -1 - (1 - sigma)(sigma - (1 - sigma) s^2) / var."""
    t = trainer(None, *STEPS, "optim.max_grad_norm=1e9")
    seen = []
    t.learner.optimizer.register_step_pre_hook(lambda *_: seen.append(t.policy.mean.grad.clone()))
    groups = t.sample_groups()
    row = t.learn_from(groups, t.advantages(groups))
    examples = groups.examples(t.advantages(groups))
    gradient, losses, sigmas = torch.zeros(3, 4, 4).double(), [], t.sigmas.double()
    for example in examples:
        sigma, after = sigmas[example.step], sigmas[example.step + 1]
        g2 = 0.7**2 * sigma / (1 - min(sigma, sigmas[1]))
        shift = float(groups.prompts[example.prompt])
        variance, s2, x = (1 - sigma) ** 2 * 0.36 + sigma**2, 0.36, example.x.double()
        deviation = (x - (1 - sigma) * shift) / variance
        v = sigma * deviation - shift - (1 - sigma) * s2 * deviation
        of_v = (after - sigma) * (1 + g2 * (1 - sigma) / (2 * sigma))
        mean = x * (1 + g2 / (2 * sigma) * (after - sigma)) + v * of_v
        off, std2 = mean - example.data["x_next"].double(), g2 * (sigma - after)
        w = example.advantages.double()[:, None, None, None]
        losses.append((w * off**2 / (2 * std2)).mean())
        slope = -1 - (1 - sigma) * (sigma - (1 - sigma) * s2) / variance
        gradient += (w * off / std2 * of_v * slope).mean(0) / off[0].numel() / len(examples)
    torch.testing.assert_close(seen[0].double(), gradient, **ADDED)
    assert row["loss"] == near(float(sum(losses) / len(losses)), rounding(200, size=1.0))


def test_a_step_with_little_noise_is_divided_by_the_smallest_scale():
    """2 |3e-4|^2 / 1e-6, for 2 std^2 is 2e-8. A log-prob of size 8 gives it, times 2e-8 / 1e-6."""
    away, std = torch.full((1, 4), 3e-4), torch.full((1,), 1e-4)
    told = {"log_prob": Normal(0 * away, std).log_prob(away), "std": std}
    loss = SelfOPD().policy_loss(steps_of(1, advantages=torch.tensor([2.0]), **told))
    torch.testing.assert_close(loss, torch.tensor([0.18]), **rounding(20, size=2 * 8 * 0.02))


# --- the steps


def test_early_steps_are_drawn_more_often():
    """Each share within four standard errors of its weight's, of 2000 draws."""
    one = SelfOPD(steps_drawn=1)
    drawn = torch.tensor([one.plans(10, each)[0].branch for each in range(2000)])
    shares = torch.tensor(one.step_weights) / sum(one.step_weights)
    found = (drawn[:, None] == torch.arange(9)).float().mean(0)
    assert ((found - shares).abs() <= 4 * (shares * (1 - shares) / 2000).sqrt()).all()
    assert {one.plans(4, each)[0].branch for each in range(200)} == {0, 1, 2}  # a tail follows
    pairs = [[plan.branch for plan in SelfOPD().plans(10, each, seed=3)] for each in range(100)]
    assert all(a < b for a, b in pairs) and len({tuple(pair) for pair in pairs}) > 10


# --- the ODE's picture in a run


def test_the_odes_picture_is_compared_with_and_is_no_member():
    t, groups = groups_of(*STEPS)
    engine = Engine(policy=t.policy, cond=groups.cond, sigmas=t.sigmas)
    ode = engine.sample(engine.initial(groups.spec.noise))
    for rollout, scores in zip(groups.collected.rollouts, groups.scores, strict=True):
        pictures = torch.cat([rollout.finals[0], ode[rollout.prompt][None]]).sigmoid()
        close = rounding(8, size=1.0)
        torch.testing.assert_close(scores[0, 0], brightness(pictures, []), **close)
    gains = above_baseline(groups.scores, 6)
    assert torch.equal(gains, groups.scores[..., :6] - groups.scores[..., 6:])
    row = t.learn_from(groups, t.advantages(groups))
    assert row["reward/bright"] == near(float(groups.scores[:, 0, :, :6].mean()), rounding(24))


def test_it_costs_the_rest_of_one_anchor_a_prompt_and_a_picture_a_group():
    """Branch steps 0 and 2 of 6: an anchor of 6 and six members with 5 + 3 more steps."""
    t = trainer(None, *STEPS)
    row = t.iterate()
    ((iteration, _),) = count(t.config, 3).kinds
    done = row["evaluations"], row["images"]
    assert done == (iteration.evaluations, iteration.images) == (2 * (6 + 6 * 8), 2 * 2 * (6 + 1))
    assert 0 < row["weight_size"] <= 1 and 0 < row["pulled"] < 1
