"""ReFL: its gradient in closed form and by finite differences, the step that is drawn, missing
scores."""

import math
from types import SimpleNamespace

import torch
from torch.testing import assert_close

from g2rpo.algorithms.reward_gradient import ReFL
from g2rpo.core.data import Batch, Example
from g2rpo.core.flow import sigma_grid
from tests.support.runs import trainer
from tests.support.tolerances import near, rounding
from tests.support.watched import Watched

SMALL = ("algorithm.name=refl", "algorithm.group_size=6", "algorithm.ceiling=2")


class Smooth:
    """The mean of all channels of all pixels, unrounded; no score for prompts that are negative
    numbers."""

    differentiable = True

    def __call__(self, images, prompts):
        known = torch.tensor([math.nan if prompt.startswith("-") else 1.0 for prompt in prompts])
        return images.flatten(1).mean(1) * known.to(images)


def made(*overrides, reward=None, **more):
    return trainer(None, *SMALL, *overrides, rewards={"bright": reward or Smooth()}, **more)


def test_the_gradient_is_that_of_the_predicted_image_in_closed_form():
    """x0 = x - sigma v, dv/dm = -(1 - sigma)(sigma - (1 - sigma) s^2)/var - 1; r is the mean of
    sigmoid(x0)."""
    t = made(prompts=["0", "0.1", "0.2"])
    seen = Watched(t)
    row = t.iterate()
    ((gradient,),), (examples,) = seen.gradients, seen.examples
    expected, rewards = torch.zeros(3, 4, 4), []
    for example in examples:
        sigma, s = float(t.sigmas[example.step]), 0.6
        variance = (1 - sigma) ** 2 * s**2 + sigma**2
        slope = 1 + (1 - sigma) * (sigma - (1 - sigma) * s**2) / variance  # -dv/dm
        shift = float(t.prompts_of(0)[example.prompt])
        deviation = (example.x - (1 - sigma) * shift) / variance
        image = example.x - sigma * (sigma * deviation - shift - (1 - sigma) * s**2 * deviation)
        rewards.append(image.sigmoid().flatten(1).mean(1))
        steepness = image.sigmoid() * (1 - image.sigmoid())
        expected -= (steepness * sigma * slope / 48).sum(0) / (6 * len(examples))
    # no term is negative
    assert_close(gradient, expected, **rounding(200))
    assert row["predicted_reward"] == near(float(torch.cat(rewards).mean()), rounding(60))
    assert row["loss"] == near(2 - row["predicted_reward"], rounding(60, size=2.0))


def test_predictions_with_a_score_below_the_ceiling_teach():
    """Of the others one has no score, one is above, and one had no score in the rollout."""
    scores, counts = torch.tensor([0.25, math.nan, 0.9, 0.3]), torch.tensor([1.0, 1, 1, 0])
    network = SimpleNamespace(velocity=lambda x, *at: x, reward=lambda *at: scores)
    batch = Batch.of([Example(0, 3, torch.zeros(4, 3), counts)], sigma_grid(5), first=True)
    loss = ReFL(ceiling=0.75).loss(batch, network)
    assert loss.values.tolist() == [0.5, 0, 0, 0]
    assert loss.log["predicted_reward"].isnan().tolist() == [False, True, False, True]
    rewards = torch.tensor([[[[1.0, math.nan]], [[math.nan, 2.0]]]])
    # of the second reward no score is needed
    assert ReFL().advantages(rewards, torch.tensor([1.0, 0])).tolist() == [[1, 0]]


def test_a_member_without_a_score_does_not_count():
    """Prompt -0.1 has none: the gradient is that of prompt 0 alone, for all that NaN flows back
    from the other."""
    gradients, predicted = [], []
    for prompts in (["0", "-0.1"], ["0"]):
        t = made(f"trainer.prompts_per_iteration={len(prompts)}", prompts=prompts, heldout=["0"])
        t.order.batch = lambda iteration, count, prompts=prompts: prompts
        seen = Watched(t)
        row = t.iterate()
        assert row["skipped_updates"] == 0 and math.isfinite(row["loss"])
        gradients += seen.gradients[0]
        predicted.append(row["predicted_reward"])
    assert_close(*gradients, **rounding(100))
    assert predicted[0] == near(predicted[1], rounding(60))  # no zeros in it


def test_the_step_is_one_of_the_last():
    steps = [ReFL().plans(7, iteration, 7)[0].branch for iteration in range(300)]
    assert {steps.count(step) > 70 for step in (4, 5, 6)} == {True} and len(set(steps)) == 3
