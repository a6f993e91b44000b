"""The neighbours' published numbers: where they come from, and that a rule of the published code is kept."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from g2rpo.algorithms.dancegrpo import DanceGRPO
from g2rpo.algorithms.flow_cps import FlowCPS
from g2rpo.algorithms.mixgrpo import MixGRPO, MixGRPOFlash
from g2rpo.algorithms.tempflow_grpo import TempFlowGRPO
from g2rpo.flow import cps_kernel, sigma_grid
from g2rpo.objectives import group_normalize, kernel_kl


def deployed(shift, num_steps):
    """The sigmas of SD3's pipeline, by diffusers itself."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(num_steps)
    return scheduler.sigmas


@pytest.mark.parametrize(
    ("sigmas", "eta", "weight"),
    [
        (deployed(3.0, 10), 0.7, TempFlowGRPO().noise_weight),
        (sigma_grid(10, math.exp(1.15)), 0.9, 1.73),  # FLUX.1-dev's shift at 1024x1024
    ],
    ids=["SD3.5", "FLUX"],
)
def test_tempflows_weights_average_to_one_over_the_trained_steps(sigmas, eta, weight):
    """The published constants are 1 / (mean noise of steps 0 .. T-2), given with three digits."""
    std = TempFlowGRPO(eta=eta).kernel(sigmas)(*torch.zeros(2, 9, 1), sigmas[:-2], sigmas[1:-1]).std
    assert 1 / float(std.mean()) == pytest.approx(weight, abs=0.005)


@pytest.mark.parametrize("algorithm", [MixGRPO(), MixGRPOFlash(), MixGRPO(reward_mix="gdpo")], ids=["mix", "flash", "gdpo"])
def test_mixgrpos_reward_weights_are_shares(algorithm):
    rewards = torch.randn(3, 4, 1, 12, generator=torch.Generator().manual_seed(0))
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1])
    torch.testing.assert_close(algorithm.advantages(rewards, 10 * shares), algorithm.advantages(rewards, shares))


def test_four_rewards_of_weight_one_give_mixgrpo_the_mean_of_their_advantages():
    rewards = torch.randn(3, 4, 1, 12, generator=torch.Generator().manual_seed(1))
    each = group_normalize(rewards)[:, :, 0]
    torch.testing.assert_close(MixGRPO().advantages(rewards, torch.ones(4)), each.mean(1))
    torch.testing.assert_close(DanceGRPO(advantage_clip=99).advantages(rewards, torch.ones(4)), each.sum(1))
    nothing = MixGRPO().advantages(rewards, torch.zeros(4))
    assert torch.equal(nothing, torch.zeros(3, 12))


def test_flow_cps_has_its_own_repositorys_values():
    """IamCreateAI/FlowCPS, `general_ocr_sd3` and `geneval_sd3`."""
    cps = FlowCPS()
    assert (cps.eta, cps.clip_range, cps.kl_weight, cps.group_size, cps.batch_std) == (0.7, 1e-4, 0.04, 24, True)


def test_the_kl_of_a_squared_distance_is_one_too():
    """Its log-prob -(x - mean)^2 is that of a normal of variance 1/2, whose KL is |mean - mean'|^2: the published one."""
    x, v, w = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    now, base = (cps_kernel(0.7)(x, velocity, torch.tensor(0.7), torch.tensor(0.6)) for velocity in (v, w))
    torch.testing.assert_close(kernel_kl(now, base), (now.mean - base.mean).square().mean(1))
    variance_half = [torch.distributions.Normal(kernel.mean, math.sqrt(0.5)) for kernel in (now, base)]
    torch.testing.assert_close(kernel_kl(now, base), torch.distributions.kl_divergence(*variance_half).mean(1))
