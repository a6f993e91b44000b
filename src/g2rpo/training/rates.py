"""The pilots that chose a run's learning rate, as its rates.json holds them (`training.pilots` runs them)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Annotated

from pydantic import Field

from g2rpo.core.errors import UserError
from g2rpo.core.files import write_whole
from g2rpo.core.plain import Count, read_as
from g2rpo.evaluation.gains import RateGain, good_rates
from g2rpo.runs.directory import RunDirectory
from g2rpo.runtime.folders import writing

FACTORS = (0.25, 0.5, 1, 2)
"""The rates of the pilots, as multiples of the config's. At 4 pilots gain where whole runs collapse (LOG.md)."""
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
        return (
            f"{self.rate:<8.3g} {self.iterations:>3} iterations  {self.gain:+.3f} [{self.low:+.3f}, {self.high:+.3f}]{alarms}"
        )


@dataclass
class Sweep:
    """The pilots of a run so far, and the rate that was taken. All `rates` have one; if none learns, the `REPEATED` best sound
    ones have another, which is longer. `own` is the config's rate."""

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
            return [rate for rate in self.rates if rate not in {pilot.rate for pilot in self.pilots}]
        first = self.pilots[: len(self.rates)]
        if any(pilot.learns for pilot in first):
            return []
        best = sorted((pilot for pilot in first if pilot.sound), key=lambda pilot: -pilot.gain)[:REPEATED]
        return [pilot.rate for pilot in best if pilot.rate not in {longer.rate for longer in self.repeated}]

    def choose(self) -> float:
        """Of the `good_rates` the one nearest to the config's, the smaller of ties; UserError if none learns."""
        tried = self.repeated or self.pilots
        if not any(pilot.learns for pilot in tried):
            listed = "\n".join(f"  {pilot}" for pilot in sorted(self.pilots, key=lambda pilot: (pilot.rate, pilot.iterations)))
            raise UserError(
                "--find-rate: no rate learns: each gains no more than its error, or has an alarm (hacking, decline, pictures); "
                f"longer pilots (trainer.iterations), other rewards or another optim.learning_rate may\n{listed}"
            )
        return min(good_rates(tried), key=lambda rate: (abs(math.log(rate / self.own)), rate))

    def write(self, run: RunDirectory) -> None:
        with writing(run.rates):
            write_whole(run.rates, json.dumps(asdict(self), indent=1).encode())


def read_sweep(run: RunDirectory) -> Sweep | None:
    """The sweep of a run; None if its rate was given."""
    if not run.rates.is_file():
        return None
    return read_as(Sweep, run.rates, "delete it, and the pilots begin again")
