"""The neighbours' published numbers: where they come from, and that a rule of the published code is
kept."""

import math
from typing import get_args

import pytest
import torch
from torch.testing import assert_close

from g2rpo.algorithms.epg import EPG
from g2rpo.algorithms.flow_grpo import FlowCPS, FlowGRPO, FlowGRPOFast, GRPOGuard, TempFlowGRPO
from g2rpo.algorithms.forward_process import DiffusionNFT
from g2rpo.core.flow import cps_kernel, scheduler_grid, sigma_grid
from g2rpo.core.noise import Normal, generator_for
from g2rpo.core.objectives import RewardMix, kernel_kl
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.tails import Tails
from tests.algorithms.test_bounds import having
from tests.algorithms.test_neighbours import steps_between
from tests.support.tolerances import rounding


@pytest.mark.parametrize(
    ("sigmas", "eta", "weight"),
    [
        (scheduler_grid(10, 3.0), 0.7, TempFlowGRPO().noise_weight),
        (sigma_grid(10, math.exp(1.15)), 0.9, 1.73),  # FLUX.1-dev's shift at 1024x1024
    ],
    ids=["SD3.5", "FLUX"],
)
def test_tempflows_weights_average_to_one_over_the_trained_steps(sigmas, eta, weight):
    """The published constants are 1 / (mean noise of steps 0 .. T-2), given with three digits."""
    std = TempFlowGRPO(eta=eta).kernel(sigmas)(*torch.zeros(2, 9, 1), sigmas[:-2], sigmas[1:-1]).std
    assert 1 / float(std.mean()) == pytest.approx(weight, abs=0.005)


def test_the_kl_of_a_squared_distance_is_one_too():
    """Its log-prob -(x - mean)^2 is that of a normal of variance 1/2, whose KL is |mean - mean'|^2:
    the published one."""
    x, v, w = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    now, base = (
        cps_kernel(0.7)(x, velocity, torch.tensor(0.7), torch.tensor(0.6)) for velocity in (v, w)
    )
    theirs = torch.distributions.kl_divergence(
        *(torch.distributions.Normal(kernel.mean, math.sqrt(0.5)) for kernel in (now, base))
    )
    assert_close(kernel_kl(now, base), theirs.mean(1), **rounding(30, size=1.0))


@torch.no_grad()
@pytest.mark.parametrize(("kind", "solver"), [(FlowGRPO, "euler"), (GRPOGuard, "dpmpp2m")])
def test_the_last_step_is_stochastic_as_published_and_not_trained(kind, solver):
    """The published pipelines take one stochastic step after another down to sigma = 0, and train
    99 % of them: 9 of 10."""
    policy, sigmas, algorithm = GaussianPolicy(mean=0.3), sigma_grid(6, 3.0), kind()
    cond, tails = policy.encode(["0"]), Tails(solver=solver)
    engine = Engine(policy=policy, cond=cond, sigmas=sigmas, tails=tails)
    plans, kernel = algorithm.plans(6), algorithm.kernel(sigmas)
    (rollout,) = engine.rollout(plans, 5, kernel, generator_for)
    assert [t.step for t in rollout.transitions] == [0, 1, 2, 3, 4]
    assert engine.evaluations == 5 * 6  # every member at every step
    x, sigma = rollout.transitions[-1].x_next, sigmas[5]
    v, noise = engine.velocity(x, [5] * 5, [0] * 5), generator_for(0, "branch", 0, 5)
    g = 0.7 * math.sqrt(float(sigma / (1 - sigma)))
    # the published step with sigma' = 0
    mean = x * (1 - g**2 / 2) - v * (sigma + g**2 * (1 - sigma) / 2)
    drawn = mean + g * sigma.sqrt() * torch.randn(x.shape, generator=noise)
    assert_close(rollout.finals[0], drawn, **rounding(20, size=4.0))


def published_guard(new, old, x_next, advantages, std, dsigma, correction, clip=2e-6):
    """The loss of GRPO-Guard for one step of a batch: its code averages the correction over
    everything, the batch too, and the paper over each member's entries."""
    log_ratio = ((x_next - old) ** 2 - (x_next - new) ** 2).mean(1) / (2 * std**2)
    moved = (new - old) ** 2
    moved = moved.mean() if correction == "batch" else moved.mean(1)
    ratio = ((log_ratio + moved / (2 * std**2)) * std).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return torch.maximum(-advantages * ratio, -advantages * clipped) / dsigma


@pytest.mark.parametrize("correction", ["batch", "member"])
def test_guards_loss_is_the_published_one(correction):
    """Two steps in one pass, each a batch of its own; values and gradients, the correction's own
    gradient among them."""
    generator = torch.Generator().manual_seed(0)
    new = torch.randn(2, 5, 8, generator=generator, requires_grad=True)
    old, x_next = new.detach() + 0.1 * torch.randn(2, 2, 5, 8, generator=generator)
    advantages, stds, dsigmas = torch.randn(2, 5, generator=generator), (0.3, 0.5), (0.08, 0.11)
    each = zip(new, old, x_next, advantages, stds, dsigmas, strict=True)
    expected = torch.cat([published_guard(*of, correction) for of in each])
    std, dsigma, step = (
        torch.tensor(pair).repeat_interleave(5) for pair in (stds, dsigmas, (3, 7))
    )
    now, before = Normal(new.flatten(0, 1), std), Normal(old.flatten(0, 1), std)
    more = {"advantages": advantages.flatten(), "dsigma": dsigma, "step": step}
    kind = type("Guard", (GRPOGuard,), {"correction": correction})
    loss = kind().policy_loss(steps_between(now, before, x_next.flatten(0, 1), **more))
    # densities of up to 10 are subtracted, and divided by steps of a tenth
    assert_close(loss, expected, **rounding(40, size=10 / 0.1))
    theirs, ours = (
        torch.autograd.grad(values.sum(), new, retain_graph=True)[0] for values in (expected, loss)
    )
    assert_close(ours, theirs, **rounding(40, size=float(theirs.abs().max())))


@pytest.mark.parametrize("kind", having("reward_mix", EPG), ids=lambda kind: kind.name)
def test_rewards_are_mixed_as_the_config_says(kind):
    """Three ways, three advantages."""
    rewards = torch.randn(3, 2, 1, 5, generator=torch.Generator().manual_seed(3))
    mixed = {
        tuple(kind(reward_mix=mix).advantages(rewards, torch.tensor([0.3, 2])).flatten().tolist())
        for mix in get_args(RewardMix)
    }
    assert len(mixed) == 3


def tracked(rewards, whole_batch):
    """Flow-GRPO's per-prompt statistics from their description: the group's mean, numpy's std of
    the group or of the whole batch, and 1e-4 more."""
    groups = rewards.double().numpy()
    spread = groups.std() if whole_batch else groups.std(1, keepdims=True)
    return torch.from_numpy((groups - groups.mean(1, keepdims=True)) / (spread + 1e-4)).float()


@pytest.mark.parametrize(
    "kind", [FlowGRPO, FlowGRPOFast, FlowCPS, GRPOGuard, TempFlowGRPO, DiffusionNFT]
)
def test_flow_grpo_and_its_kin_normalise_as_published(kind):
    """Scores as small as PickScore / 26 in one group of SD3.5's: the 1e-4 is seen. Guard's and
    TempFlow's configs have global_std off."""
    algorithm = kind()
    generator = torch.Generator().manual_seed(2)
    rewards = 0.8 + 0.01 * torch.randn(6, algorithm.group_size, generator=generator)
    rewards[3] = rewards[3, 0]
    advantages = algorithm.advantages(rewards[:, None, None], torch.ones(1))
    assert algorithm.batch_std == (kind not in (GRPOGuard, TempFlowGRPO))
    theirs = tracked(rewards, algorithm.batch_std)
    assert_close(advantages, theirs, **rounding(4))  # both from float64
    assert not advantages[3].any()
