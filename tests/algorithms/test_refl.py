"""ReFL: its gradient in closed form and by finite differences, the step that is drawn, missing scores, rewards refused."""

import math

import pytest
import torch

from g2rpo.algorithms.refl import ReFL
from g2rpo.app.preflight import check
from g2rpo.core.errors import UserError
from g2rpo.policies.anyflow import DiffusersPolicy
from g2rpo.rewards.analytic import Brightness
from g2rpo.rollout.planning import count_evaluations, count_trained
from g2rpo.testbed.rewards import SceneCLIP
from tests.support.runs import config, darkness, trainer

SMALL = ("algorithm.name=refl", "algorithm.group_size=6", "algorithm.last_steps=3", "algorithm.ceiling=2")


class Smooth:
    """The mean of all channels of all pixels, unrounded; no score for prompts that are negative numbers."""

    differentiable = True

    def __call__(self, images, prompts):
        known = torch.tensor([math.nan if prompt.startswith("-") else 1.0 for prompt in prompts])
        return images.flatten(1).mean(1) * known.to(images)


def made(*overrides, reward=None, **more):
    return trainer(None, *SMALL, *overrides, rewards={"bright": reward or Smooth()}, **more)


def watched(t):
    """(gradient, examples) of every coming update."""
    seen, update = [], t.updater.update

    def updating(examples, cond):
        seen.append([None, examples, cond])
        return update(examples, cond)

    t.updater.update = updating
    t.learner.optimizer.register_step_pre_hook(
        lambda *_: seen[-1].__setitem__(0, torch.cat([p.grad.flatten() for p in t.learner.parameters]))
    )
    return seen


def test_the_gradient_is_that_of_the_predicted_image_in_closed_form():
    """x0 = x - sigma v, dv/dm = -(1 - sigma)(sigma - (1 - sigma) s^2)/var - 1; r is the mean of sigmoid(x0)."""
    t = made("algorithm.scale=0.5", prompts=["0", "0.1", "0.2"])
    seen = watched(t)
    row = t.iterate()
    ((gradient, examples, _),) = seen
    expected, rewards = torch.zeros(3, 4, 4), []
    for example in examples:
        sigma, s = float(t.sigmas[example.step]), 0.6
        variance = (1 - sigma) ** 2 * s**2 + sigma**2
        slope = 1 + (1 - sigma) * (sigma - (1 - sigma) * s**2) / variance  # -dv/dm
        shift = float(t.prompts_of(0)[example.prompt])
        deviation = (example.x - (1 - sigma) * shift) / variance
        image = example.x - sigma * (sigma * deviation - shift - (1 - sigma) * s**2 * deviation)
        rewards.append(image.sigmoid().flatten(1).mean(1))
        expected -= 0.5 * (image.sigmoid() * (1 - image.sigmoid()) * sigma * slope / 48).sum(0) / (6 * len(examples))
    torch.testing.assert_close(gradient, expected.flatten(), atol=1e-8, rtol=1e-4)
    assert row["predicted_reward"] == pytest.approx(float(torch.cat(rewards).mean()), abs=1e-6)
    assert row["loss"] == pytest.approx(0.5 * (2 - row["predicted_reward"]), abs=1e-6)


def test_the_gradient_through_vae_and_reward_is_that_of_finite_differences(flux_directory):
    """On the tiny FLUX and the testbed's CLIP, along the gradient itself; float32 leaves three digits."""
    policy = DiffusersPolicy.from_pretrained(flux_directory, height=64, width=64, max_sequence_length=12, tuning="full")
    prompts = ["two small red circles left of a blue star", "a red circle"]
    more = {"policy": policy, "prompts": prompts, "heldout": prompts, "judges": {}}
    t = made("trainer.prompts_per_iteration=1", "algorithm.group_size=2", reward=SceneCLIP(), **more)
    seen = watched(t)
    before = [p.detach().clone() for p in t.learner.parameters]
    t.iterate()
    ((gradient, examples, cond),) = seen
    direction, losses = gradient / gradient.norm(), []
    for size in (-2e-2, 2e-2):
        parts = (size * direction).split([p.numel() for p in before])
        with torch.no_grad():
            for p, start, part in zip(t.learner.parameters, before, parts, strict=True):
                p.copy_(start + part.view_as(p))
            losses.append(float(t.updater.loss(examples, cond, True).values.mean()))
    assert (losses[1] - losses[0]) / 4e-2 == pytest.approx(float(gradient.norm()), rel=2e-2)


def test_it_learns_what_the_reward_wants():
    t = made("optim.learning_rate=0.05", prompts=["0", "0.1", "0.2"])
    rewards = [t.iterate()["reward/bright"] for _ in range(6)]
    assert rewards[-1] > rewards[0] + 0.03


def test_beyond_the_ceiling_nothing_is_learnt():
    t = made("algorithm.ceiling=0.1")
    seen = watched(t)
    assert t.iterate()["loss"] == 0 and not seen[0][0].any()


def test_a_member_without_a_score_does_not_count():
    """Prompt -0.1 has none: the gradient is that of prompt 0 alone, for all that NaN flows back from the other."""
    gradients = []
    for prompts in (["0", "-0.1"], ["0"]):
        t = made(f"trainer.prompts_per_iteration={len(prompts)}", prompts=prompts, heldout=["0"])
        t.order.batch = lambda iteration, count, prompts=prompts: prompts
        seen = watched(t)
        row = t.iterate()
        assert row["skipped_updates"] == 0 and math.isfinite(row["loss"])
        gradients.append(seen[0][0])
    torch.testing.assert_close(*gradients, atol=1e-8, rtol=1e-5)


def test_the_step_is_one_of_the_last_and_the_walk_is_the_odes():
    steps = [ReFL(last_steps=3).plans(10, iteration, 7)[0].branch for iteration in range(300)]
    assert {steps.count(step) > 70 for step in (7, 8, 9)} == {True} and len(set(steps)) == 3
    t = made("trainer.prompts_per_iteration=1")
    cond = t.policy.encode(["0.1"])
    (rollout,) = t.collector.collect(t.algorithm, 0, cond, ["0.1"], _Watch()).rollouts
    start = t.policy.noise([t.collector.noise(0, 0, "initial", member) for member in range(6)])
    x = start
    for sigma, after in zip(t.sigmas[:-1], t.sigmas[1:], strict=True):
        x = x + (after - sigma) * t.policy.velocity(x, sigma.expand(6), cond.rows([0] * 6))
    torch.testing.assert_close(rollout.finals[0], x.detach())


class _Watch:
    def lap(self, phase):
        pass


def test_it_costs_a_walk_and_one_row_a_member():
    algorithm = ReFL()
    plans = algorithm.plans(25)
    assert count_evaluations(plans, 4) == 4 * 25 and count_trained(algorithm, plans, 25) == (4, 0)


def test_batches_of_any_size_make_the_same_update():
    ends = []
    for size in (1, 64):
        t = made(f"trainer.micro_batch_size={size}", reward=Brightness())
        t.iterate()
        ends.append(t.policy.mean.detach())
    torch.testing.assert_close(*ends, atol=1e-6, rtol=1e-5)


def test_rewards_without_a_gradient_are_refused_before_anything_is_loaded():
    with pytest.raises(UserError, match="algorithm refl learns from the gradient of rewards, and these have none: bright"):
        trainer(None, *SMALL, rewards={"bright": darkness})
    chosen = config(*SMALL, "rewards={jpeg_size: 1.0, brightness: 1.0}", "evaluation.rewards={}")
    with pytest.raises(UserError, match=r"these have none: jpeg_size; docs/rewards\.md"):
        check(chosen, given=("policy", "prompts", "heldout"))


def test_a_grid_without_so_many_steps_is_refused():
    with pytest.raises(ValueError, match="last_steps must be at most num_steps=10, got 11"):
        ReFL().plans(10)
