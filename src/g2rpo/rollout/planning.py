"""What plans cost, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from g2rpo.rollout.tails import EXACT, Tails
from g2rpo.types import Plan


def count_evaluations(plans: Sequence[Plan], group_size: int, tails: Tails = EXACT) -> int:
    """Network evaluations (rows) that `Engine.rollout` needs for one prompt.

    For G2RPO's plans this is (last branch step + 1) + group_size * (evaluations of the tails, shared beginnings once):
    with 16 steps, 12 members and branch steps 0..7 it is 1112 for granularities {1}, 1496 for {1, 2}, 1700 for {1, 2, 3}.
    """
    anchor = max((plan.branch + 1 for plan in plans if plan.shared_noise), default=0)
    return anchor + sum(_evaluations(plan, group_size, tails) for plan in plans)


def _evaluations(plan: Plan, group_size: int, tails: Tails) -> int:
    stochastic = plan.merge - plan.branch
    own_walk = plan.branch + stochastic if not plan.shared_noise else stochastic - 1
    return group_size * (own_walk + tails.tree(plan.tails).evaluations())


def count_trained(plans: Sequence[Plan], group_size: int) -> int:
    """Latents that a training pass shows to the network for one prompt: one where a group branches from a shared latent."""
    return sum(
        1 if step == plan.branch and plan.shared_noise else group_size
        for plan in plans
        for step in range(plan.branch, plan.merge)
        if plan.trains(step)
    )


def count_images(plans: Sequence[Plan], group_size: int) -> int:
    """Images to decode and score for one prompt."""
    return sum(group_size * len(plan.tails) for plan in plans)
