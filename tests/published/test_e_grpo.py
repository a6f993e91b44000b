"""E-GRPO against a restatement of its formulas: lengths of steps, samples, densities, and a
training step on the tiny FLUX."""

from ast import literal_eval
from functools import partial
from math import e, pi, sqrt
from re import findall

import pytest
import torch
from torch.testing import assert_close

from g2rpo.algorithms.g2rpo_variants import EGRPO, merges
from g2rpo.core.data import Batch
from g2rpo.core.flow import sigma_grid
from g2rpo.core.noise import generator_for
from g2rpo.core.plans import Plan
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.rollout.engine import Engine
from g2rpo.train.updater import Trained
from tests.published.neighbours import log_prob, normalised
from tests.published.second_half import agree, of_members, tiny
from tests.support.tolerances import Tolerance, near, rounding
from tests.support.variants import few

MERGED = {0: 1, 1: 2, 3: 3}
SETTING = (
    "algorithm.name=e_grpo",
    "algorithm.group_size=4",
    f"algorithm.branch_steps={list(MERGED)}",
    f"algorithm.merged_steps={list(MERGED.values())}",
)
SIGMAS, ETA = sigma_grid(8, 3.0), 0.7


def over(x, v, sigmas, k, length, eta=ETA):
    """(mean, std) of one step from sigma_k over so many steps of the grid: every time difference is
    the whole one."""
    sigma, dt = sigmas[k], sigmas[k + length] - sigmas[k]
    spread = eta * (sigma / (1 - (sigmas[1] if sigma == 1 else sigma))).sqrt()
    drift = v + spread**2 / (2 * sigma) * (x + (1 - sigma) * v)
    return x + drift * dt, spread * (-dt).sqrt()


@pytest.mark.parametrize(("steps", "shift"), [(16, 3), (25, 3), (16, 1), (16, 5)])
def test_lengths_are_the_least_whose_entropy_reaches_the_threshold(steps, shift):
    """exp of the entropy per entry, sqrt(2 pi e a^2 t_m / (1 - t_m) (t_m - t_{m-l})), t_m = s m /
    (T + (s - 1) m)."""

    def entropy(m, length):
        product = shift**2 * steps * m * length
        return sqrt(
            2
            * pi
            * e
            * ETA**2
            * product
            / ((steps - m) * (steps + (shift - 1) * m) * (steps + (shift - 1) * (m - length)))
        )

    first_half = range(1, steps // 2)  # at pure noise, m = T, the formula is infinite
    wanted = tuple(
        next(n for n in range(1, steps) if entropy(steps - k, n) >= 2.2) for k in first_half
    )
    assert merges(sigma_grid(steps, shift), ETA, first_half) == wanted
    if (steps, shift) == (16, 3):
        assert EGRPO().merged_steps == (1, *wanted) == merges(sigma_grid(16, 3.0), ETA, range(8))
        # where none reaches it, all but the last step
        assert merges(sigma_grid(16, 3.0), ETA / 100, (3, 9)) == (12, 6)


@torch.no_grad()
def test_samples_and_densities_are_those_of_one_step_over_the_span():
    """Exact noise of every member's own draw, the ODE before and after, step by step: of latents
    up to 4, with 20 roundings in a step. A log-prob has squares of (x - mean) / std, where a
    rounding of x is by 1 / std, at most 5, larger; three of them, with weights that have moved, are
    in the loss, whose advantages are up to 3."""
    policy = GaussianPolicy()
    algorithm = EGRPO(
        branch_steps=tuple(MERGED), merged_steps=tuple(MERGED.values()), clip_range=100.0
    )
    cond = policy.encode(["0.3"])
    engine = Engine(policy=policy, cond=cond, sigmas=SIGMAS)
    rollouts = engine.rollout(algorithm.plans(8), 5, algorithm.kernel(SIGMAS), generator_for)

    def velocity(x, k):
        return policy.velocity(x, SIGMAS[k].expand(len(x)), cond.rows([0] * len(x)))

    def walk(x, start, stop):
        for k in range(start, stop):
            x = x + (SIGMAS[k + 1] - SIGMAS[k]) * velocity(x, k)
        return x

    advantages, network = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0]), Trained(policy, cond)
    close = partial(assert_close, **rounding(20 * 8, size=4.0))
    density = rounding(20, size=4.0 * 5)
    for rollout, (k, length) in zip(rollouts, MERGED.items(), strict=True):
        (taken,) = rollout.transitions
        close(taken.x, walk(policy.noise([generator_for(0, "initial")]), 0, k))
        mean, std = over(taken.x, velocity(taken.x, k), SIGMAS, k, length)
        close(
            taken.x_next,
            mean
            + std * torch.randn(5, *mean.shape[1:], generator=generator_for(0, "branch", k, k)),
        )
        exact = torch.distributions.Normal(mean, std).log_prob(taken.x_next).flatten(1).mean(1)
        assert_close(taken.old_log_prob, exact, **density)
        close(rollout.finals[0], walk(taken.x_next, k + length, 8))
        # the ratio of other weights, which the first update of a rollout cannot show
        policy.mean += 0.05
        mean, std = over(taken.x, velocity(taken.x, k), SIGMAS, k, length)
        moved = torch.distributions.Normal(mean, std).log_prob(taken.x_next).flatten(1).mean(1)
        wanted = -advantages * (moved - exact).exp()
        batch = Batch.of(
            algorithm.examples(rollout, advantages, generator_for), SIGMAS, first=False
        )
        thrice = Tolerance(rtol=0.0, atol=3 * 3 * density["atol"])
        assert_close(algorithm.loss(batch, network).values, wanted, **thrice)
        policy.mean -= 0.05


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_merged_steps_variance_is_wrong_by_the_square_of_its_width(length):
    """From the exact marginal of images N(0, s^2), V(t) = (1 - t)^2 s^2 + t^2: the variance after a
    step of width D is D^2 ((V' + g^2)^2 / (4 V) - 1 - s^2) too large; the mean of the marginal is
    kept."""
    sigmas, k, s = sigma_grid(16, 3.0), 5, 0.6
    policy = GaussianPolicy(std=s, size=1)
    x = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1).expand(2, 3, 1, 1)
    here, after = sigmas[k], sigmas[k + length]
    kernel = EGRPO().kernel(sigmas)
    step = kernel(x, policy.velocity(x, here.expand(2), policy.encode(["0", "0"])), here, after)
    t, width, g2 = float(here), float(here - after), ETA**2 * float(here / (1 - here))
    now, then = ((1 - at) ** 2 * s**2 + at**2 for at in (t, float(after)))
    landed = float((step.mean[1] - step.mean[0]).mean()) ** 2 * now + float(step.std) ** 2
    slope = 2 * t - 2 * (1 - t) * s**2
    expected = width**2 * ((slope + g2) ** 2 / (4 * now) - 1 - s**2)
    assert landed - then == near(expected, rounding(30, size=1.0))
    assert not step.mean[0].any()


@torch.no_grad()
def test_the_variance_after_the_usual_merges():
    """Percent above the marginal's, for images of std .6: 7 and 9 at the single steps 0 and 1; 6 to
    15 at the merged steps 2 to 7, 1 to 3 if they are single."""
    sigmas, s, algorithm = sigma_grid(16, 3.0), 0.6, EGRPO()
    marginal, kernel = (1 - sigmas) ** 2 * s**2 + sigmas**2, algorithm.kernel(sigmas)

    def excess(k, end):
        # of x = 1: E[noise | x] - E[image | x]
        velocity = (sigmas[k] - (1 - sigmas[k]) * s**2) / marginal[k]
        step = kernel(torch.ones(1, 1), velocity.reshape(1, 1), sigmas[k], sigmas[end])
        return 100 * (float((step.mean**2 * marginal[k] + step.std**2) / marginal[end]) - 1)

    assert [round(excess(k, algorithm.landing_step(k)), 1) for k in (0, 1)] == [7.4, 9.2]
    steps = range(2, 8)
    merged = [excess(k, algorithm.landing_step(k)) for k in steps]
    single = [excess(k, k + 1) for k in steps]
    assert [round(min(merged)), round(max(merged))] == [6, 15]
    assert [round(min(single)), round(max(single))] == [1, 3]


def term(models, rollout, rewards, g):
    """-A exp(log p - its own value) of member g at the merged step."""
    (taken,) = rollout.transitions
    v = models.velocity("trained", taken.x, SIGMAS[taken.step], rollout.prompt)
    mean, std = over(taken.x, v, SIGMAS, taken.step, MERGED[taken.step])
    density = log_prob(taken.x_next[g : g + 1], mean, std)
    return -normalised(rewards[0, 0]).clamp(-5, 5)[g] * (density - density.detach()).exp()


@pytest.mark.parametrize("iterations", few([3, 1], (1).__eq__))
def test_losses_gradients_and_weights_are_the_published_ones(flux_directory, iterations):
    """The first update's gradient does not depend on a step's length: advantages sum to 0, and the
    drift's width cancels the variance's; the test above has ratios that do."""
    agree(tiny(flux_directory, *SETTING), partial(of_members, term), iterations=iterations)


def test_a_merged_plan_has_one_stochastic_step():
    first, second, third = EGRPO(branch_steps=(0, 1, 3), merged_steps=(1, 2, 3)).plans(8)
    assert [(plan.branch, plan.merge, len(plan.stochastic)) for plan in (first, second, third)] == [
        (0, 1, 1),
        (1, 3, 1),
        (3, 6, 1),
    ]
    with pytest.raises(ValueError, match="trained"):
        Plan(1, 3, ((3, 8),), merged=True, trained=(2,))


@pytest.mark.parametrize(("num_steps", "end"), [(10, 10), (6, 10)])
def test_a_shorter_grid_is_refused_with_the_lengths_that_fit_it(num_steps, end):
    with pytest.raises(
        ValueError, match=f"ends at step {end} of num_steps={num_steps}; .* at shift 3"
    ) as refusal:
        EGRPO().plans(num_steps)
    steps, lengths = (literal_eval(text) for text in findall(r"=(\[.*?\])", str(refusal.value)))
    assert steps == [*range(min(8, num_steps - 1))] and lengths == [
        *merges(sigma_grid(num_steps, 3.0), ETA, steps)
    ]
    assert len(EGRPO(branch_steps=steps, merged_steps=lengths).plans(num_steps)) == len(steps)
