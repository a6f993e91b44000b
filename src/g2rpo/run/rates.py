"""The rule by which a learning rate is chosen, and the pilots that chose a run's, as its rates.json
holds them.

Pilots are short runs with seeds of their own, evaluated on training prompts. `training.pilots` runs
them (`g2rpo train --find-rate`; in a study the first run of every cell).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from g2rpo.core.errors import UserError
from g2rpo.core.plain import Count, Figure
from g2rpo.core.statistics import interval

Values = NDArray[np.float64]
PILOT_SEEDS = 1000
"""Offset of the pilots' seeds from those of the runs that take their rate."""
ONE_ERROR = 0.6827
"""The level of an interval of a standard error to each side: of rates that learn nothing one in six
passes."""
MODEL_GETS_WORSE = ("hacking", "decline", "pictures")
"""Alarms by which a rate is not taken."""
STOPPED = "stopped"
"""In place of an alarm: the pilot could not be finished."""


def gains(
    first: Mapping[str, Values], last: Mapping[str, Values], weights: Mapping[str, float]
) -> Values:
    """The gain [N] of each prompt between two evaluations in the trained rewards: the sum of their
    changes in units of the first's standard deviation over prompts, weighted as in training. NaN
    where a score with a weight is missing; a reward without variance is not scaled."""
    total = np.zeros_like(next(iter(first.values())))
    for name, weight in weights.items():
        if weight:  # a reward of weight 0 need not have a score
            spread = float(np.nanstd(first[name]))
            total += weight * (last[name] - first[name]) / (spread or 1.0)
    return total


@dataclass(frozen=True)
class RateGain:
    """What pilots at one learning rate gained: the mean of `gains`, a standard error below and
    above it, and their alarms."""

    rate: float
    gain: Figure
    low: Figure
    high: Figure
    alarms: dict[str, str]

    @property
    def sound(self) -> bool:
        """Whether no alarm says that the model gets worse."""
        return not any(name in self.alarms for name in (*MODEL_GETS_WORSE, STOPPED))

    @property
    def learns(self) -> bool:
        """Whether it is sound and gains more than its standard error."""
        return self.sound and self.low > 0


def gain_at(rate: float, gains: Sequence[Values], alarms: Mapping[str, str]) -> RateGain:
    """Of pilots at `rate`: the gains [N] of each one's prompts, and the alarms of all."""
    mean = interval(gains, level=ONE_ERROR)
    return RateGain(rate, mean.mean, mean.low, mean.high, dict(alarms))


def good_rates(tried: Sequence[RateGain]) -> list[float]:
    """The rates, ascending, that no pilot tells from the best: without an alarm that the model gets
    worse, and with a gain no less than the best one's minus its standard error. Empty if every rate
    has such an alarm or no score.

    The rule of one standard error of Breiman et al. (Classification and Regression Trees, 1984,
    3.4.3). The highest gain alone was most often that of a rate at which whole runs collapse later
    (studies/LOG.md). The best is one that learns, if any does: a gain within its own error may be chance.
    """
    sound = [one for one in tried if one.sound and math.isfinite(one.gain)]
    learning = [one for one in sound if one.learns]
    if not sound:
        return []
    best = max(learning or sound, key=lambda one: one.gain)
    least = best.gain if math.isnan(best.low) else best.low
    return sorted(one.rate for one in sound if one.gain >= least)


FACTORS = (0.25, 0.5, 1, 2)
"""The rates of the pilots, as multiples of the config's. At 4 pilots gain where whole runs collapse
(studies/LOG.md)."""
REPEATED = 2
"""Of rates none of which learns, the best so many are tried again."""
LONGER = 2
"""Those pilots have so many times the iterations."""

Rate = Annotated[float, Field(gt=0, le=1e18)]


@dataclass(frozen=True)
class Pilot(RateGain):
    """A pilot at a rate."""

    rate: Rate
    iterations: Count
    seconds: float

    def __str__(self) -> str:
        alarms = f"  alarms: {', '.join(self.alarms)}" if self.alarms else ""
        return f"{self.rate:<8.3g} {self.iterations:>3} iterations  {self.gain:+.3f} [{self.low:+.3f}, {self.high:+.3f}]{alarms}"


@dataclass
class Sweep:
    """The pilots of a run so far, and the rate that was taken. All `rates` have one; if none
    learns, the `REPEATED` best sound ones with a gain have another, which is longer. `own` is the config's
    rate."""

    own: Rate
    rates: Annotated[list[Rate], Field(min_length=1, max_length=16)]
    pilots: list[Pilot] = field(default_factory=list)
    rate: Rate | None = None

    @classmethod
    def around(cls, own: float) -> Sweep:
        return cls(own, [factor * own for factor in FACTORS])

    @property
    def seconds(self) -> float:
        return sum(pilot.seconds for pilot in self.pilots)

    @property
    def repeated(self) -> list[Pilot]:
        """The longer pilots."""
        return self.pilots[len(self.rates) :]

    def missing(self) -> list[float]:
        """The rates whose pilots of this round are still to be run; empty at the end."""
        if len(self.pilots) < len(self.rates):
            return [
                rate for rate in self.rates if rate not in {pilot.rate for pilot in self.pilots}
            ]
        first = self.pilots[: len(self.rates)]
        if any(pilot.learns for pilot in first):
            return []
        sound = [pilot for pilot in first if pilot.sound and math.isfinite(pilot.gain)]
        best = sorted(sound, key=lambda pilot: -pilot.gain)[:REPEATED]
        return [
            pilot.rate
            for pilot in best
            if pilot.rate not in {longer.rate for longer in self.repeated}
        ]

    def choose(self) -> float:
        """Of the `good_rates` the one nearest to the config's, the smaller of ties; UserError if
        none learns."""
        tried = self.repeated or self.pilots
        if not any(pilot.learns for pilot in tried):
            listed = "\n".join(
                f"  {pilot}"
                for pilot in sorted(self.pilots, key=lambda pilot: (pilot.rate, pilot.iterations))
            )
            raise UserError(
                "--find-rate: no rate learns: each gains no more than its error, or has an alarm (hacking, decline, pictures); "
                f"longer pilots (trainer.iterations), other rewards or another optim.learning_rate may\n{listed}"
            )
        return min(good_rates(tried), key=lambda rate: (abs(math.log(rate / self.own)), rate))
