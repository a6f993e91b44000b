"""Gains of pilots: short runs that choose a learning rate, with seeds of their own, evaluated on training prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from g2rpo.core.statistics import interval

Scores = NDArray[np.float64]
PILOT_SEEDS = 1000
"""Offset of the pilots' seeds from those of the runs that take their rate."""
ONE_ERROR = 0.6827
"""The level of an interval of a standard error to each side: of rates that learn nothing one in six passes."""
MODEL_GETS_WORSE = ("hacking", "decline", "pictures")
"""Alarms by which a rate is not taken."""
STOPPED = "stopped"
"""In place of an alarm: the pilot could not be finished."""


def gains(first: Mapping[str, Scores], last: Mapping[str, Scores], weights: Mapping[str, float]) -> Scores:
    """The gain [N] of each prompt between two evaluations in the trained rewards: the sum of their changes in units of the
    first's standard deviation over prompts, weighted as in training. NaN where a score is missing; a reward without variance
    is not scaled."""
    spreads = {name: float(np.nanstd(first[name])) for name in weights}
    changes = [weight * (last[name] - first[name]) / (spreads[name] or 1.0) for name, weight in weights.items()]
    return np.asarray(np.sum(changes, axis=0), dtype=np.float64)


@dataclass(frozen=True)
class RateGain:
    """What pilots at one learning rate gained: the mean of `gains`, a standard error below and above it, and their alarms."""

    rate: float
    gain: float
    low: float
    high: float
    alarms: dict[str, str]

    @property
    def sound(self) -> bool:
        """Whether no alarm says that the model gets worse."""
        return not any(name in self.alarms for name in (*MODEL_GETS_WORSE, STOPPED))

    @property
    def learns(self) -> bool:
        """Whether it is sound and gains more than its standard error."""
        return self.sound and self.low > 0


def gain_at(rate: float, gains: Sequence[Scores], alarms: Mapping[str, str]) -> RateGain:
    """Of pilots at `rate`: the gains [N] of each one's prompts, and the alarms of all."""
    mean = interval(gains, level=ONE_ERROR)
    return RateGain(rate, mean.mean, mean.low, mean.high, dict(alarms))


def good_rates(tried: Sequence[RateGain]) -> list[float]:
    """The rates, ascending, that no pilot tells from the best: without an alarm that the model gets worse, and with a gain no
    less than the best one's minus its standard error. Empty if every rate has such an alarm or no score.

    The rule of one standard error of Breiman et al. (Classification and Regression Trees, 1984, 3.4.3). The highest gain alone
    was most often that of a rate at which whole runs collapse later (LOG.md). The best is one that learns, if any does: a gain
    within its own error may be chance.
    """
    sound = [one for one in tried if one.sound and math.isfinite(one.gain)]
    learning = [one for one in sound if one.learns]
    if not sound:
        return []
    best = max(learning or sound, key=lambda one: one.gain)
    least = best.gain if math.isnan(best.low) else best.low
    return sorted(one.rate for one in sound if one.gain >= least)
