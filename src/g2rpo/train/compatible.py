"""Whether an algorithm and rewards fit each other.

It is asked of the rewards' classes before anything is loaded (`train.consistency`), and of the
rewards when a trainer is built: only then is it known of some of the user's own.
"""

from __future__ import annotations

from collections.abc import Mapping

from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.core.contracts import name_of
from g2rpo.core.errors import UserError
from g2rpo.core.types import Algorithm, Reward


def check_differentiable(
    algorithm: Algorithm,
    rewards: Mapping[str, Reward | type[Reward]],
    weights: Mapping[str, float],
    scored_by_frames: frozenset[str] = frozenset(),
) -> None:
    """UserError if an algorithm learns from the gradient of `rewards` (or their classes) and some
    have none. One of weight 0 needs none; that of chosen frames of a clip has none, nor have those
    that are named in `scored_by_frames`."""
    if not algorithm.uses_rewards:
        return
    having = {
        name: reward.differentiable and reward.frames is None and name not in scored_by_frames
        for name, reward in rewards.items()
        if weights[name]
    }
    without = [name for name, has_one in having.items() if not has_one]
    if not without:
        return
    others = [name for name, has_one in having.items() if has_one]
    beside = f" (but {', '.join(others)})" if others else ""
    needing = " and ".join(name for name, kind in ALGORITHMS.items() if kind.uses_rewards)
    raise UserError(
        f"algorithm {name_of(algorithm)} learns from the gradient of rewards, and these have none: {', '.join(without)}"
        f"{beside}; take them out, or another algorithm: all but {needing} need no gradient. docs/rewards.md lists the "
        "rewards that have one, of pictures"
    )
