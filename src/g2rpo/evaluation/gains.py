"""Gains of pilots: short runs that choose a learning rate, with seeds of their own, evaluated on training prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from g2rpo.core.errors import UserError

Scores = NDArray[np.float64]
PILOT_SEEDS = 1000
"""Offset of the pilots' seeds from those of the runs that take their rate."""


def gains(first: Mapping[str, Scores], last: Mapping[str, Scores], weights: Mapping[str, float]) -> Scores:
    """The gain [N] of each prompt between two evaluations in the trained rewards: the sum of their changes in units of the
    first's standard deviation over prompts, weighted as in training. NaN where a score is missing; a reward without variance
    is not scaled."""
    spreads = {name: float(np.nanstd(first[name])) for name in weights}
    changes = [weight * (last[name] - first[name]) / (spreads[name] or 1.0) for name, weight in weights.items()]
    return np.asarray(np.sum(changes, axis=0), dtype=np.float64)


def best_rate(gains: Mapping[float, Sequence[float]]) -> float:
    """The rate with the highest mean gain of its pilots; the smallest of ties. UserError if no pilot has scores."""
    means = {rate: float(np.mean(own)) for rate, own in sorted(gains.items())}
    if not (known := [rate for rate, mean in means.items() if math.isfinite(mean)]):
        raise UserError("no pilot has scores of all rewards, so no learning rate can be chosen; their logs say why")
    return max(known, key=means.__getitem__)
