"""EPG: the likelihoods and losses in float64, advantages without a std, and what is left of it where
it meets DiffusionNFT."""

import dataclasses
import math

import pytest
import torch

from g2rpo.algorithms.epg import EPG
from g2rpo.algorithms.forward_process import DiffusionNFT, Noised
from tests.support.tolerances import FLOAT64, rounding

ROUNDING = rounding(400, size=1.0, unit=FLOAT64)
"""Some hundred operations on numbers of size 1."""


def noised(size=5):
    """Latents of six numbers in float64, whose old velocities are .3 away from the trained ones."""
    generator = torch.Generator().manual_seed(1)
    image, noise, v, far = torch.randn(
        4, size, 2, 3, generator=generator, dtype=torch.float64
    ).unbind()
    sigma = torch.linspace(0.2, 1, size, dtype=torch.float64)
    each = sigma[:, None, None]
    return Noised(
        image=image,
        noise=noise,
        x=(1 - each) * image + each * noise,
        sigma=sigma,
        advantages=torch.linspace(-2, 3, size, dtype=torch.float64),
        velocity=v.requires_grad_(),
        old=v.detach() + 0.3 * far,
    )


def bound(likelihood, given, velocity):
    """The published forms: those of the predicted image, and those of the velocity."""
    sigma = given.sigma[:, None, None]
    off_image = given.x - sigma * velocity - given.image
    off_velocity = given.noise - given.image - velocity
    squares = {
        "adaptive": off_image**2 / off_image.detach().abs().mean((1, 2), keepdim=True),
        "t": off_image**2,
        "uniform": off_velocity**2,
        "exact": (1 - sigma) / (sigma + 1e-3) * off_velocity**2,
    }
    return -squares[likelihood].mean((1, 2))


def published(objective, elbo, old, advantages):
    moved = elbo.detach() - old
    return {
        "epg": -moved.exp() * advantages * elbo,
        "epg_noratio": -advantages * elbo,
        "pepg": -moved.exp() * (advantages - moved) * elbo,
        "par": 0.5 * moved.exp() * (advantages - (elbo - old)) ** 2,
    }[objective]


@pytest.mark.parametrize("likelihood", ["adaptive", "t", "uniform", "exact"])
@pytest.mark.parametrize("objective", ["epg", "epg_noratio", "pepg", "par"])
def test_losses_and_gradients_are_those_of_the_formulas(objective, likelihood):
    """PAR, whose loss is another, has PEPG's gradient."""
    given = noised()
    kind = type("NoRatio", (EPG,), {"ratio": False}) if "noratio" in objective else EPG
    ours = kind(
        objective="epg" if objective.startswith("epg") else "pepg", likelihood=likelihood
    ).member_loss(given)
    elbo, old = (bound(likelihood, given, of) for of in (given.velocity, given.old))
    theirs = published(objective, elbo, old, given.advantages)
    assert float((elbo - old).detach().abs().max()) > 0.05  # the ratio is not 1
    if objective != "par":
        torch.testing.assert_close(ours, theirs, **ROUNDING)
    gradients = [torch.autograd.grad(of.sum(), given.velocity)[0] for of in (ours, theirs)]
    torch.testing.assert_close(*gradients, **ROUNDING)


def test_at_the_old_velocity_it_is_diffusion_nft():
    """There r L+ + (1 - r) L- of NFT has the gradient of (2 r - 1) L, and 2 r - 1 is A / clip."""
    given = noised()
    given = dataclasses.replace(given, old=given.velocity.detach())
    gradients = [
        torch.autograd.grad(of.member_loss(given).sum(), given.velocity)[0]
        for of in (EPG(), EPG(objective="pepg"), DiffusionNFT(), DiffusionNFT(mixing=0.1))
    ]
    for other in gradients[1:]:
        torch.testing.assert_close(gradients[0], other, **ROUNDING)


def test_advantages_are_a_share_of_the_distance_from_the_groups_mean():
    """Whatever the std; 0 in a group of ties and for a member without a score."""
    rewards = torch.tensor(
        [[[0.0, 1, 1, 0], [2, 4, 6, math.nan]], [[0.3] * 4, [0.7] * 4], [[0, 0, 0, 100], [0] * 4]]
    )[:, :, None]  # [3 groups, 2 rewards, 1, 4]
    got = EPG().advantages(rewards, torch.tensor([1.0, 0.5]))
    expected = torch.tensor([[-5 / 3, 1 / 3, 4 / 3, 0], [0] * 4, [-25, -25, -25, 75]])
    torch.testing.assert_close(got, (0.1 * expected).clamp(-5, 5), **rounding(8, size=3.0))
    assert torch.equal(got[1], torch.zeros(4))


def test_normalized_advantages_are_diffusion_nfts():
    rewards = torch.randn(3, 2, 1, 4, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([1.0, 2.0])
    ours = EPG(normalized=True, advantage_scale=0.5).advantages(rewards, weights)
    assert torch.equal(ours, 0.5 * DiffusionNFT().advantages(rewards, weights))
