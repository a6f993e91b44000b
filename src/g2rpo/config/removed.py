"""Options that were removed. A config.yaml has every option, so runs of older versions name them."""

from __future__ import annotations

from typing import Any

from g2rpo.core.errors import UserError

REMOVED: dict[str, Any] = {
    "algorithm.antithetic": False,
    "algorithm.auto": {
        "candidates": [1, 2, 3], "calibrate_every": 10, "floor": 0.7, "forget": 0.9, "image_cost": 0.0, "spend": "members",
    },
    "algorithm.granularity_weights": None,
    "algorithm.roll_back": True,
    "algorithm.longest_stay": 10,
    "algorithm.shortest_stay": 1,
    "algorithm.decay_rate": 0.1,
    "algorithm.segments": [],
    "algorithm.step_weight": "none",
    "rewards.*.tf32": False,
    "rewards.*.frames.batch_size": 16,
    "trainer.max_unscored": 5,
    "trainer.max_skipped": 10,
    "evaluation.pictures": 8,
    "sampling.tails.stride": 1,
    "sampling.tails.compile": False,
    "sampling.tails.dtype": "policy",
    "sampling.tails.quantize": "none",
}  # fmt: skip
"""By dotted key ("rewards.*.KEY" for a reward), the default, with which a config means the same without the key."""


def is_neutral(key: str, value: Any, source: str) -> bool:
    """Whether an unknown key is a removed option at its default. UserError if it is a removed option with another value."""
    if key not in REMOVED:
        return False
    if value != REMOVED[key]:
        raise UserError(f"{source}: {key}={value}: this option was removed; CHANGELOG.md, 'Removed', says what to write")
    return True
