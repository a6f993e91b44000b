"""DiffusionOPSD: its targets, loss and gradient in float64, the latent that is kept, counts, missing
scores, and what is refused."""

from dataclasses import dataclass

import pytest
import torch

from g2rpo.algorithms.reward_gradient import OPSD, direction
from g2rpo.core.contracts import plans_of
from g2rpo.core.data import Batch, Example
from g2rpo.core.errors import UserError
from g2rpo.core.flow import scheduler_grid, sigma_grid
from g2rpo.core.noise import generator_for
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.engine import Engine
from g2rpo.rollout.planning import count_evaluations
from g2rpo.rollout.tails import Tails
from tests.support.runs import trainer
from tests.support.tolerances import Tolerance, rounding

SMALL = ("algorithm.name=opsd", "algorithm.group_size=6")


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=generator_for(seed), dtype=torch.float64)


def norm(x):
    return x.flatten(1).norm(dim=1).reshape(-1, 1, 1)


@dataclass
class Given:
    """A `Network` of given velocities; its reward is the sum of sin(y) weighted by `slope`."""

    new: torch.Tensor
    old: torch.Tensor
    slope: torch.Tensor

    def velocity(self, x, sigma, prompts):
        return self.new.float()

    def old_velocity(self, x, sigma, prompts):
        return self.old.float()

    def base_velocity(self, x, sigma, prompts):
        return self.slope.float()

    def reward(self, y, prompts):
        return (self.slope.to(y) * y.sin()).flatten(1).sum(1)


def batch(x, advantages, sigmas=None, step=3):
    example = Example(0, step, x.float(), advantages.float())
    return Batch.of([example], sigma_grid(5) if sigmas is None else sigmas, first=False)


FAR = rounding(900)
"""30 roundings of y, which is up to thirty times as large as a target is far."""


def of_largest(values):
    return Tolerance(rtol=0.0, atol=FAR["rtol"] * float(values.abs().max()))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_loss_and_gradient_are_the_formula(steps):
    """All of it again in float64, with the reward's gradient slope cos(y) by hand; advantages
    beyond the clip count as the clip."""
    x, old, slope, new = drawn(4, 4, 3, 2)
    new = (old + 0.1 * new).requires_grad_()
    advantages, sigma, b = torch.tensor([-7.0, -1, 0, 2]), 0.4, 0.5
    y = x - sigma * old
    ends = {}
    for sign in (1, -1):
        end = y
        for _ in range(steps):
            gradient = slope * end.cos()
            end = end + sign * 0.2 * norm(y) / steps * gradient / norm(gradient)
        ends[sign] = end
    r = advantages.clamp(-5, 5) / 10 + 0.5
    values = 0
    for sign, share in ((1, r), (-1, 1 - r)):
        error = x - sigma * (old + sign * b * (new - old)) - ends[sign]
        size = error.detach().abs().mean((1, 2))
        values = values + 5 * share * error.square().mean((1, 2)) / size
    values = values + 0.3 * (new - slope).square().mean((1, 2))
    (expected,) = torch.autograd.grad(values.sum(), new)

    algorithm = OPSD(radius=0.2, target_steps=steps, mixing=b, kl_weight=0.3)
    given = new.detach().requires_grad_()
    loss = algorithm.loss(batch(x, advantages), Given(given, old, slope))
    (gradient,) = torch.autograd.grad(loss.values.sum(), given)
    torch.testing.assert_close(loss.values.double(), values, **FAR)
    torch.testing.assert_close(gradient, expected, **of_largest(expected))
    reward = (slope * y.sin()).sum((1, 2))
    torch.testing.assert_close(
        loss.log["predicted_reward"].double(), reward, **rounding(30, size=4.0)
    )


@pytest.mark.parametrize(
    ("sigmas", "query", "step"),
    [
        (scheduler_grid(10, 3.0), 0.278, 8),  # SD3.5's: .2781
        (sigma_grid(10, 3.0), 0.278, 9),  # .25, after .43
        (sigma_grid(2), 0.01, 1),
        (sigma_grid(4, 3.0), 0.999, 1),  # never the noise
    ],
    ids=["published", "scenes", "two steps", "near noise"],
)
def test_the_latent_is_the_one_on_the_way_nearest_to_the_query(sigmas, query, step):
    (plan,) = OPSD(query_sigma=query).plans(len(sigmas) - 1)
    assert plan.kept_step(sigmas) == step
    published = int((sigmas[:-1] - query).abs().argmin())
    assert step == max(published, 1)


@torch.no_grad()
def test_the_kept_latent_is_on_the_walk_of_the_other_solver():
    """DPM-Solver++(2M)'s last step is the predicted image, so the kept one predicts the final."""
    policy, sigmas = GaussianPolicy(mean=0.3), scheduler_grid(6, 3.0)
    tails = Tails(solver="dpmpp2m")
    engine = Engine(policy=policy, cond=policy.encode(["0"]), sigmas=sigmas, tails=tails)
    plans = OPSD(query_sigma=0.001).plans(6)
    (rollout,) = engine.rollout(plans, 5, OPSD().kernel(sigmas), generator_for)
    step, x = rollout.kept
    assert step == 5 and engine.evaluations == count_evaluations(plans, 5) == 30
    image = x - sigmas[5] * engine.velocity(x, [5] * 5, [0] * 5)
    torch.testing.assert_close(rollout.finals[0], image, **rounding(20, size=4.0))


def test_training_raises_the_reward():
    t = trainer(None, *SMALL, "optim.learning_rate=0.1", prompts=["0"])
    rewards = [t.iterate()["reward/bright"] for _ in range(5)]
    assert rewards == sorted(rewards) and rewards[-1] > rewards[0] + 0.05


def test_an_image_without_a_score_stays_where_it_is():
    """Whether its gradient is NaN or 0; the others move as if it were not there."""
    y = drawn(3, 2, 2)
    second = torch.tensor([False, True, False])
    size = y.square().flatten(1).sum(1)

    def left_out(image):
        return torch.where(second, torch.nan, image.square().flatten(1).sum(1))

    def spoilt(image):
        return image.square().flatten(1).sum(1) * torch.where(second, torch.nan, 1)

    for reward in (left_out, spoilt):
        unit, scores = direction(y, reward)
        torch.testing.assert_close(unit, torch.where(second[:, None, None], 0, y / norm(y)))
        torch.testing.assert_close(scores, torch.where(second, torch.nan, size), equal_nan=True)


def test_what_it_cannot_learn_from_is_refused():
    with pytest.raises(UserError, match="algorithm: a kept latent needs a first tail of two steps"):
        plans_of(OPSD(), 1)
    with pytest.raises(UserError, match="carry no gradient"):
        direction(drawn(1, 2, 2), lambda image: image.detach().flatten(1).sum(1))
