"""Fits the length of a run to a given time (`g2rpo train --within`)."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError

MEASURED = 3
"""Iterations after which a run is fitted for the first time."""
LOOKS = 3
"""Evaluations of a fitted run, beside the base model's."""
UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds_in(text: str) -> float:
    """5400 of "90m", "1.5h" or "5400s"; UserError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if found is None or not float(found[1]):
        raise UserError(f"--within {text}: should be a time like 45s, 90m or 3h")
    return float(found[1]) * UNITS[found[2]]


def fitted(config: Config, train: Sequence[float], look: float, left: float, first: bool) -> Config:
    """`config` with as many iterations as fit into the `left` seconds, given that an iteration took `train` and an
    evaluation `look` seconds; at least those that are done. The `first` fit also spreads evaluations over them."""
    done, per = len(train), statistics.median(train[1:][-10:] or train)

    def every(iterations: int) -> int:
        return math.ceil(iterations / LOOKS) if first else config.evaluation.every

    def needed(iterations: int) -> float:
        looks = math.ceil(iterations / every(iterations)) - done // every(iterations) if iterations > done else 0
        return (iterations - done) * per + looks * look

    iterations = done + max(0, math.floor(left / per))
    while iterations > done and needed(iterations) > left:
        iterations -= 1
    return with_length(config, iterations, every(iterations))


def with_length(config: Config, iterations: int, every: int) -> Config:
    """`config` with this number of iterations, and an evaluation `every` so many iterations."""
    trainer = config.trainer.model_copy(update={"iterations": iterations})
    evaluation = config.evaluation.model_copy(update={"every": every})
    return config.model_copy(update={"trainer": trainer, "evaluation": evaluation})
