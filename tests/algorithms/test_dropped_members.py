"""Members without any advantage: Flow-GRPO and its kin filter them out before an update, others
count them."""

import math
from dataclasses import replace

import pytest
import torch

from g2rpo.core.objectives import without_zero_advantages
from tests.algorithms.test_neighbours import ONCE
from tests.support.runs import brightness, trainer
from tests.support.tolerances import EXACT, reordered
from tests.support.watched import Watched


def experienced(name, *overrides):
    """(a trainer whose weights are not the base's, one iteration's experience, its conditioning);
    two prompts of four are silent."""

    def half_blind(images, prompts):
        blind = torch.tensor([prompt in ("0.2", "-0.2") for prompt in prompts])
        return torch.where(blind, 1.0, brightness(images, prompts))

    options = [f"algorithm.name={name}", "algorithm.kl_weight=0.3", *ONCE, *overrides]
    options += ["trainer.prompts_per_iteration=4"]
    t = trainer(None, *options, rewards={"bright": half_blind}, prompts=["0", "0.1", "0.2", "-0.2"])
    t.policy.mean.data += 0.1  # away from the base, or the KL has no gradient
    seen = Watched(t)
    t.iterate()
    (examples, cond), _ = seen.updated[0]
    return t, list(examples), cond


def gradient(t, experience, cond):
    gradients = []
    t.learner.optimizer.step = lambda: gradients.append(t.policy.mean.grad.clone())
    t.updater.update(experience, cond)
    (found,) = gradients
    return found


ADDED = reordered(4 * 6 * 7, 0.01)
"""Gradients of so many members and steps, 0.01 in one entry."""


@pytest.mark.parametrize("name", ["flow_grpo", "flow_dppo", "tempflow_grpo", "mixgrpo"])
def test_an_update_is_the_one_without_them_where_they_are_dropped(name):
    """Half of the prompts say nothing: an update is the same as from the other half. Where members
    are counted, the policy's part is half as large and the KL term is not."""
    t, experience, cond = experienced(name)
    silent = {item.prompt for item in experience if not item.advantages.any()}
    assert len(silent) == 2
    speaking = [item for item in experience if item.prompt not in silent]
    whole, part = gradient(t, experience, cond), gradient(t, speaking, cond)
    assert t.algorithm.drop_zero_advantages == (name != "mixgrpo")
    if t.algorithm.drop_zero_advantages:
        torch.testing.assert_close(whole, part, **ADDED)
    else:
        assert float((whole - part).norm()) > 0.01 * float(part.norm())
        t.updater.algorithm = replace(t.algorithm, kl_weight=0.0)
        no_kl = [gradient(t, some, cond) for some in (experience, speaking)]
        torch.testing.assert_close(2 * no_kl[0], no_kl[1], **ADDED)


def test_a_member_counts_at_every_step_if_any_of_its_steps_has_an_advantage():
    """The published code sums |advantage| over the steps. TempFlow's groups at different steps have
    advantages of their own."""
    _, experience, _ = experienced("tempflow_grpo")
    mine = [item for item in experience if item.prompt == experience[0].prompt]
    mine[-1].advantages.zero_()
    mine[1].advantages[2] = 0
    assert all(item.mask.all() for item in without_zero_advantages(mine))
    for item in mine:
        item.advantages[2] = 0
    for item in without_zero_advantages(mine):
        without = [place != 2 for place in range(6)]
        assert item.mask.tolist() == without == item.members(0, 6).mask.tolist()


def test_nothing_but_silence_moves_nothing():
    """No member counts, so there is no mean to take: the gradient is 0, not NaN."""
    t, experience, cond = experienced("flow_grpo")
    for item in experience:
        item.advantages.zero_()
    assert torch.equal(gradient(t, experience, cond), torch.zeros_like(t.policy.mean))


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        *((name, False) for name in ("flow_grpo", "mixgrpo", "diffusion_nft")),
        *((name, True) for name in ("mixgrpo", "diffusion_nft", "fdfo")),
    ],
)
def test_what_is_not_finite_is_left_out_of_the_update(name, whole):
    """A member, whose picture has no score and so no advantage; or the `whole` group of a prompt,
    whose anchor is not finite, or a pair of FDFO, of which one's data are computed from the other.
    The update is that without it, and its statistics are finite."""
    t, experience, cond = experienced(name)
    broken, masked = [], []
    for item in experience:
        if whole and item.prompt != experience[0].prompt:
            broken.append(item), masked.append(item)
            continue
        counts = torch.zeros_like(item.mask) if whole else torch.arange(len(item.mask)) != 1
        quiet = replace(item, advantages=item.advantages * counts)
        masked.append(replace(quiet, counted=counts))
        values = {"x": item.x, **item.data}
        for key, value in values.items():
            if value.is_floating_point() and (whole or len(value) == len(counts)):
                values[key] = value.clone()
                values[key][slice(None) if whole else 1] = torch.nan
        broken.append(replace(quiet, x=values.pop("x"), data=values))
    torch.testing.assert_close(gradient(t, broken, cond), gradient(t, masked, cond), **EXACT)
    log, without = (t.updater.update(some, cond).summary(t.algorithm) for some in (broken, masked))
    assert log["skipped_updates"] == 0 and all(map(math.isfinite, log.values()))
    assert log.get("log_prob_drift", 0) <= without.get("log_prob_drift", 0)
