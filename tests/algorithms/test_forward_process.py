"""Losses on finished latents: DiffusionNFT, AWM, DGPO and EPG, the times they learn from, the old
weights, counts and fields."""

import pytest
import torch
from torch.testing import assert_close

from g2rpo.algorithms.epg import EPG
from g2rpo.algorithms.forward_process import AWM, DGPO, DiffusionNFT, Noised, mean_square
from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.core.data import Batch, Example
from g2rpo.core.flow import sigma_grid
from g2rpo.core.noise import generator_for
from g2rpo.models.gaussian import GaussianPolicy
from tests.support.runs import mean, trainer
from tests.support.tolerances import near, rounding
from tests.support.watched import Watched

NAMES = ["diffusion_nft", "awm", "dgpo", "epg", "opsd"]
SMALL = ("algorithm.group_size=6", "sampling.num_steps=8")


def made(name, *overrides, run_dir=None, **more):
    return trainer(run_dir, f"algorithm.name={name}", *SMALL, *overrides, **more)


# --- the losses, member by member


def test_dgpos_group_sum_is_its_formula():
    options = ("algorithm.times=1", "trainer.prompts_per_iteration=1", "optim.learning_rate=0.2")
    t = made("dgpo", *options)
    t.iterate()
    before, seen = mean(t), Watched(t)
    t.iterate()
    ((example,),), base = seen.batches, GaussianPolicy()
    cond = base.encode(t.prompts_of(1)).rows([0] * 6)
    trained = GaussianPolicy()
    trained.mean.data = before
    sigma = t.sigmas[example.data["step"]]
    # one noise and one time for a group
    assert len(example.data["noise"]) == 1 and len(set(sigma.tolist())) == 1
    x = example.x + sigma[:, None, None, None] * (example.data["noise"] - example.x)
    wanted = example.data["noise"] - example.x
    with torch.no_grad():
        new, old = (
            (policy.velocity(x, sigma, cond) - wanted).square().flatten(1).mean(1)
            for policy in (trained, base)
        )
    # a hundred times a sum of differences of numbers of size 2
    expected = 100 * float((example.advantages * (new - old)).sum()) / 6
    assert float(example.data["group_sum"]) == near(expected, rounding(60, size=100 * 2.0))


class Velocities:
    """A `Network` whose trained, old and base velocities are 1, 3 and 6 everywhere."""

    velocity, old_velocity, base_velocity = (
        lambda self, x, sigma, prompts, one=one: torch.full_like(x, one) for one in (1, 3, 6)
    )


@pytest.mark.parametrize("kind", [DiffusionNFT, AWM, DGPO, EPG])
def test_the_distances_in_the_log_are_to_the_old_and_to_the_base_velocity(kind):
    x, step = torch.zeros(4, 3), torch.tensor([1, 2, 3, 4])
    data = {"step": step, "noise": torch.ones(4, 3), "group_sum": torch.zeros(4)}
    batch = Batch.of([Example(0, 0, x, torch.ones(4), data)], sigma_grid(5), first=True)
    plain, pulled = (
        kind(group_size=4, kl_weight=weight).loss(batch, Velocities()) for weight in (1e-9, 2.0)
    )
    assert {name: values.unique().tolist() for name, values in pulled.log.items()} == {
        "velocity_error": [0], "old_distance": [4], "kl": [25],
    }  # fmt: skip
    assert_close(pulled.values - plain.values, torch.full((4,), 50.0), **rounding(4, size=60.0))


def awm(v, given):
    error = mean_square(v - (given.noise - given.image))
    return given.advantages / 5 * given.sigma * error**0.25 / 0.25 + mean_square(v - given.old)


def dgpo(v, given):
    error = mean_square(v - (given.noise - given.image))
    return given.advantages * error / (1 + (-given.group_sum).exp())


@pytest.mark.parametrize(("algorithm", "formula"), [(AWM(), awm), (DGPO(clip_range=9), dgpo)])
def test_a_members_gradient_is_that_of_the_formula(algorithm, formula):
    """In float64, away from the old weights; the sum over a group is part of DGPO's weight."""
    random = torch.Generator().manual_seed(0)
    image, noise, x, v, old = torch.randn(5, 2, 6, generator=random)
    told = {"advantages": torch.tensor([1.5, -0.7]), "group_sum": torch.tensor([1.3, -2.0])}
    told |= {"image": image, "noise": noise, "x": x, "sigma": torch.tensor([0.9, 0.4]), "old": old}
    found = []
    for loss, dtype in ((algorithm.member_loss, v.dtype), (formula, torch.float64)):
        given = Noised(**{name: of.to(dtype) for name, of in told.items()}, velocity=v.to(dtype))
        own = given.velocity.requires_grad_()
        values = loss(given) if loss is not formula else loss(own, given)
        found.append(torch.autograd.grad(values.sum(), own)[0].float())
    assert_close(*found, **rounding(30, size=4.0))


# --- fresh times and noise


def drawn(algorithm, num_steps, key=0):
    return algorithm.draw_steps(num_steps, generator_for(key))


def test_nft_draws_different_times_for_each_member_all_alike_often():
    # [400, 9, 4]
    steps = torch.stack([drawn(DiffusionNFT(group_size=4), 10, key) for key in range(400)])
    assert steps.shape == (400, 9, 4)
    assert all(len(set(own.tolist())) == 9 for sample in steps[:20] for own in sample.T)
    assert not torch.equal(steps[0, :, 0], steps[0, :, 1])
    # each of ten is taken nine times in ten: std .0075
    counts = steps.flatten().bincount(minlength=10) / (400 * 4)
    assert float((counts - 0.9).abs().max()) < 0.04


def test_awm_draws_one_from_each_part_of_the_grid():
    """14 steps: parts [1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]; the same for all members."""
    steps = torch.stack([drawn(AWM(group_size=3), 14, key) for key in range(200)])
    assert steps.shape == (200, 6, 3) and torch.equal(steps[..., 0], steps[..., 2])
    for part, expected in enumerate(({1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11})):
        assert set(steps[:, part].flatten().tolist()) == expected


def test_dgpo_draws_early_times_and_samples_with_old_weights_after_200_updates():
    """Four of seven; one is missed by all of 100 draws with a probability of (3/7)^100."""
    steps = torch.stack([drawn(DGPO(group_size=3), 10, key) for key in range(100)])
    assert set(steps.flatten().tolist()) == set(range(7)) and steps.shape == (100, 4, 3)
    assert all(len(set(one[:, 0].tolist())) == 4 for one in steps)
    assert [DGPO().samples_old(updates) for updates in (200, 201)] == [False, True]


# --- old weights


@pytest.mark.parametrize("schedule", [(0, 0.001, 0.5), (75, 0.0075, 0.999), (0, 0.0, 0.0)])
def test_old_weights_follow_by_the_published_schedules(schedule):
    flat, rise, most = schedule
    algorithm = DiffusionNFT(old_schedule=(flat, rise, most))
    for updates in (0, 1, 74, 75, 76, 208, 209, 500, 501, 5000):
        expected = 0.0 if updates < flat else min((updates - flat) * rise, most)
        assert algorithm.old_decay(updates) == pytest.approx(expected)


OLD = ("algorithm.old_schedule=[0,0.2,0.5]", "optim.learning_rate=0.2")


def test_old_weights_sample_and_trail_the_trained_ones():
    """After t updates: old <- d old + (1 - d) trained, d = min(.2 t, .5); the next rollout is made
    with old."""
    sampled = []

    class Watching(GaussianPolicy):
        def velocity(self, x, sigma, cond):
            if not torch.is_grad_enabled() and not self._in_base:
                sampled.append(self.mean.detach().clone())
            return super().velocity(x, sigma, cond)

    t = made("diffusion_nft", *OLD, policy=Watching())
    old = mean(t)
    for updates in range(1, 5):
        sampled.clear()
        t.iterate()
        assert all(torch.equal(each, old) for each in sampled)  # in the rollout, and for v_old
        d = min(0.2 * updates, 0.5)
        trained = mean(t)
        old = d * old + (1 - d) * trained
        assert_close(t.learner.old[0], old, **rounding(6, size=0.5))
        old = t.learner.old[0].clone()
    assert float((old - trained).norm()) > 1e-3


def test_awm_samples_with_the_trained_weights():
    t, sampled = made("awm", *OLD), []
    for _ in range(3):
        t.iterate()
    walk, trained = t.collector.collect, mean(t)
    t.collector.collect = lambda *given: sampled.append(mean(t)) or walk(*given)
    assert not torch.equal(t.learner.old[0], trained)
    t.iterate()
    assert torch.equal(sampled[0], trained)


def test_without_an_algorithm_that_uses_them_no_old_weights_are_kept():
    assert trainer(None).learner.old == []
    assert [name for name, kind in ALGORITHMS.items() if kind().uses_old] == NAMES
