"""The result of a run as its results.json has it: base against tuned."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from g2rpo.core.plain import Count, Iteration, Number, read_as
from g2rpo.evaluation.controls import Controls
from g2rpo.runs.directory import RunDirectory


def _measured(value: float) -> float:
    """A mean of no score is NaN."""
    if abs(value) > 1e300:
        raise ValueError("Value should be a finite number, or NaN")
    return value


Measured = Annotated[float, AfterValidator(_measured)]


class Compared(BaseModel):
    """One reward on the held-out prompts (`evaluation.heldout.Comparison`)."""

    base: Measured
    tuned: Measured
    error: Measured
    count: Annotated[int, Field(ge=0)] | None = None
    spread: Measured = math.nan


class Right(Compared):
    """The share of right pictures, what these do, and the least scores that they have."""

    least: dict[str, Number] = {}
    in_words: str = "Right on {} prompts"


class Spread(BaseModel):
    """How much pictures of one prompt differ."""

    base: Number
    tuned: Number


class Results(BaseModel):
    iteration: Iteration
    prompts: Count | None = None
    rewards: dict[str, Compared]
    right: Right | None = None
    controls: Controls | None = None
    diversity: Spread | None = None
    diversity_right: Spread | None = None
    rolled_back_from: Iteration | None = None


def read_results(run: RunDirectory) -> Results | None:
    """The results of a run; None until it has finished once. UserError if they are damaged."""
    return read_as(Results, run.results) if run.results.is_file() else None
