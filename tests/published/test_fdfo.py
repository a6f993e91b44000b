"""FDFO against a restatement of its formulas: pairs, losses, gradients and updates; and what its
difference is on average."""

from functools import partial
from itertools import chain

import pytest
import torch
from torch.testing import assert_close

from g2rpo.algorithms.reward_gradient import FDFO
from g2rpo.core.data import Batch, Example
from g2rpo.core.distributed import World
from g2rpo.core.errors import UserError
from g2rpo.core.flow import sigma_grid
from g2rpo.core.noise import generator_for
from g2rpo.core.objectives import updates_of
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.engine import Engine
from g2rpo.train.ranks import divided
from g2rpo.train.updater import Trained
from tests.published.second_half import agree, tiny
from tests.support.runs import config, trainer
from tests.support.tolerances import Tolerance, rounding
from tests.support.watched import Watched

STEPS, CHURN, CLIP = 6, 0.3, 0.03
SIGMAS = sigma_grid(STEPS, 3.0)


def rolled(algorithm, policy, prompts=1):
    engine = Engine(policy=policy, cond=policy.encode(["0.3"] * prompts), sigmas=SIGMAS)
    return engine.rollout(
        algorithm.plans(STEPS), algorithm.group_size, algorithm.kernel(SIGMAS), generator_for
    )


def exact(mean, x, t, std=0.6):
    """The Gaussian policy's velocity at t, in float64: E[noise - image | x]."""
    variance = (1 - t) ** 2 * std**2 + t**2
    off = (x - (1 - t) * mean) / variance
    return t * off - mean - (1 - t) * std**2 * off


def test_a_pair_shares_its_first_noise_and_is_churned_before_every_step_but_the_last():
    """x / (1 + g) + sqrt(1 - 1 / (1 + g)^2) noise at t = 1; then Euler's step too far, to r = s /
    (1 + g - g s), which fresh noise of std r sqrt((1 + g)^2 - 1) brings back, all over 1 + g r."""
    (rollout,) = rolled(FDFO(churn=CHURN), GaussianPolicy())
    close = rounding(20 * STEPS, size=4.0)  # of latents up to 4, 20 in a step

    def drawn(*key):
        return torch.randn(
            2, 3, 4, 4, generator=generator_for(0, *key), dtype=torch.float32
        ).double()

    x = torch.stack(
        [torch.randn(3, 4, 4, generator=generator_for(0, "initial", g)) for g in range(2)]
    ).double()
    first = torch.randn(3, 4, 4, generator=generator_for(0, "initial")).double()
    x = (first + ((1 + CHURN) ** 2 - 1) ** 0.5 * x) / (1 + CHURN)
    assert [t.step for t in rollout.transitions] == [*range(STEPS)]
    for i, taken in enumerate(rollout.transitions):
        assert_close(taken.x.double(), x, **close)
        t, s = SIGMAS[i].double(), SIGMAS[i + 1].double()
        g = CHURN if i < STEPS - 1 else 0.0
        r = s / (1 + g - g * s)
        x = (
            x + (r - t) * exact(0.3, x, t) + r * ((1 + g) ** 2 - 1) ** 0.5 * drawn("branch", 0, i)
        ) / (1 + g * r)
    assert_close(rollout.finals[0].double(), x, **close)


def restated(v, v_old, reward, other_reward, final, other_final, clip=CLIP):
    """The loss of one member at one step, with the other member's reward and final latent."""
    gain, d = (reward - other_reward) / 2, (final - other_final) / 2
    d = d / ((d**2).mean() + 1e-6)
    ratio = ((d**2).mean() - ((v - (v_old - d)) ** 2).mean()).exp()
    return -gain * ratio + abs(gain) / (2 * clip) * (ratio - 1) ** 2


def test_losses_of_later_updates_and_their_gradients_are_the_restated_ones():
    """Gradients against central differences of the restated loss in float64; the weights have moved
    since the rollout. The logarithm of a ratio is the difference of two means of squares, up to 2,
    after the walk and the velocities; its rounding is in the gradient over the clip range."""
    policy, rewards = GaussianPolicy(), torch.tensor([0.4, 0.9])
    algorithm = FDFO(churn=CHURN)
    (rollout,) = rolled(algorithm, policy)
    advantages = algorithm.advantages(rewards[None, None, None], torch.ones(1))[0]
    examples = algorithm.examples(rollout, advantages, generator_for)
    policy.mean.data += 0.01 * torch.randn(3, 4, 4, generator=generator_for("moved"))
    loss = algorithm.loss(
        Batch.of(examples, SIGMAS, first=False), Trained(policy, policy.encode(["0.3"]))
    )
    (ours,) = torch.autograd.grad(loss.values.sum(), policy.mean)
    finals = rollout.finals[0].double()

    def losses(mean):
        found = []
        for example in examples:
            t = SIGMAS[example.step].double()
            for g in range(2):
                x = example.x[g].double()
                v, old = exact(mean + 0.3, x, t), exact(0.3, x, t)
                found.append(
                    restated(
                        v,
                        old,
                        rewards[g].double(),
                        rewards[1 - g].double(),
                        finals[g],
                        finals[1 - g],
                    )
                )
        return torch.stack(found)

    mean, small = policy.mean.detach().double(), 1e-5
    close = rounding(200, size=2.0)
    assert_close(loss.values.double(), losses(mean), **close)
    # ratios other than 1
    assert float((loss.values.detach() + advantages.repeat(STEPS)).abs().max()) > 1e-3
    nudges = small * torch.eye(mean.numel(), dtype=torch.float64).reshape(-1, *mean.shape)
    slopes = torch.stack([(losses(mean + n) - losses(mean - n)).sum() for n in nudges]) / (
        2 * small
    )
    steep = Tolerance(rtol=0.0, atol=close["atol"] / CLIP * float(slopes.abs().max()))
    assert_close(ours.double().flatten(), slopes, **steep)


@pytest.mark.slow
def test_the_pull_is_the_rewards_gradient_on_average():
    """For a reward w . x of final latents whose differences have no direction: E[A d / mean d^2] =
    w, of 2000 pairs of 12 entries to sqrt(12 / 2000) = .08. A picture moves against its velocities,
    so their gradient is + 2 w / 12."""
    policy, algorithm = GaussianPolicy(size=2), FDFO(churn=CHURN)
    w = torch.nn.functional.normalize(torch.randn(12, generator=generator_for("w")), dim=0)
    rollouts = rolled(algorithm, policy, prompts=2000)
    rewards = torch.stack([rollout.finals.flatten(2) @ w for rollout in rollouts])[:, None]
    advantages = algorithm.advantages(rewards, torch.ones(1))
    examples = [
        algorithm.examples(*of, generator_for)[0] for of in zip(rollouts, advantages, strict=True)
    ]
    batch = Batch.of(examples, SIGMAS, first=True)

    class Network:
        v = torch.zeros_like(batch.x).requires_grad_()

        def velocity(self, *at):
            return self.v

    loss = algorithm.loss(batch, Network())
    assert_close(loss.values.detach(), -batch.advantages, **rounding(10))
    (gradient,) = torch.autograd.grad(loss.values.sum(), Network.v)
    assert float((gradient.flatten(1).mean(0) * 12 / 2 - w).norm()) < 0.15


def test_advantages_are_halves_of_the_difference_and_0_without_a_score():
    of_prompts = [[[1, 4], [0.5, 0]], [[2, torch.nan], [0, 0]], [[0.1, 0.1], [3, 3]]]
    rewards = torch.tensor(of_prompts)[:, :, None]
    advantages = FDFO().advantages(rewards, torch.tensor([1.0, 2.0]))
    assert advantages.tolist() == [[-1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    three = FDFO(group_size=3).advantages(torch.tensor([[[[1, torch.nan, 3]]]]), torch.ones(1))
    assert three.tolist() == [[-1.0, 0.0, 1.0]]


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_every_update_has_its_share_of_each_pairs_steps_in_an_order_of_its_own(share):
    updates = f"algorithm.update_every={share}"
    t = trainer(None, "algorithm.name=fdfo", "sampling.num_steps=8", updates)
    watched = Watched(t)
    row, seen = t.iterate(), watched.batches
    assert t.learner.steps == len(seen) == round(1 / share) and row["skipped_updates"] == 0
    orders = set()
    for prompt in range(2):
        steps = [[item.step for item in batch if item.prompt == prompt] for batch in seen]
        assert {len(own) for own in steps} == {8 * share} and sorted(chain(*steps)) == [*range(8)]
        orders |= set(map(tuple, steps))
    assert len(orders) > 2


def objective(models, seen):
    def term(rollout, rewards, taken, g):
        x, sigma = taken.x[g : g + 1], SIGMAS8[taken.step]
        v = models.velocity("trained", x, sigma, rollout.prompt)
        with torch.no_grad():
            base = models.velocity("base", x, sigma, rollout.prompt)
        finals = rollout.finals[0]
        policy = restated(v[0], v[0].detach(), rewards[g], rewards[1 - g], finals[g], finals[1 - g])
        return (policy + 0.05 * ((v - base) ** 2).mean()) / (
            len(seen.rollouts) * len(rollout.transitions) * 2
        )

    return [
        partial(term, rollout, rewards[0, 0], taken, g)
        for rollout, rewards in zip(seen.rollouts, seen.rewards, strict=True)
        for taken in rollout.transitions
        for g in range(2)
    ]


SIGMAS8 = sigma_grid(8, 3.0)


@pytest.mark.slow
def test_losses_gradients_and_weights_are_the_published_ones(flux_directory):
    setting = (
        "algorithm.name=fdfo",
        "algorithm.churn=0.1",
        "algorithm.kl_weight=0.05",
        "algorithm.update_every=rollout",
    )
    agree(tiny(flux_directory, *setting), objective)


def test_parts_are_the_same_on_any_number_of_ranks():
    """Steps in one order; shares into which steps cannot be dealt evenly are refused."""
    t = trainer(None, "algorithm.name=fdfo", "algorithm.update_every=branch")
    made = [Example(0, step, torch.zeros(1, 2), torch.zeros(1)) for step in (3, 0, 2, 1)]
    assert [batch[0].step for batch in updates_of(t.algorithm, made)] == [0, 1, 2, 3]
    with pytest.raises(UserError, match="cannot be dealt out evenly"):
        divided(config("algorithm.name=fdfo", "sampling.num_steps=6"), World(0, 2))
    divided(config("algorithm.name=fdfo", "sampling.num_steps=8"), World(0, 2))
