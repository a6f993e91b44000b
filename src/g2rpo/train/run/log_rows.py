"""The rows of a run's log, as they are read back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from g2rpo.core.errors import refuse, shown
from g2rpo.core.plain import Iteration, Number, read_lines_as

if TYPE_CHECKING:
    from g2rpo.core.data import Row

FIRST_LOOK = 1 / 12
"""The share of `evaluation.every_minutes` after which the first evaluation is made, for an early
look."""

Amount = Annotated[int, Field(ge=0, le=10**15)]
Seconds = Annotated[int | float, Field(gt=0, le=1e12)]


def _indexed(name: str) -> str:
    if name.startswith(("step/", "granularity/")) and not re.fullmatch(r"\w+/[0-9]{1,6}/.+", name):
        raise ValueError("has no index")
    return name


Name = Annotated[str, AfterValidator(_indexed)]
"""Of a logged number; those of steps and granularities have their index."""


class LogRow(BaseModel):
    """What every row has, and further numbers by name."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[Name, Number | None]

    iteration: Iteration
    seconds: Seconds
    alarms: dict[str, str] = {}

    @model_validator(mode="after")
    def _whole(self) -> LogRow:
        refuse(_faults_of(self.__pydantic_extra__), ValueError)
        return self


def _faults_of(numbers: Mapping[str, float | None]) -> Iterator[str]:
    """Of numbers that are counts, or that are read together."""
    for name, value in numbers.items():
        if name.startswith("scored/") and not (isinstance(value, int) and value >= 0):
            yield f"{name}: should be a count, is {shown(value)}"
        if (of := re.fullmatch(r"(image/\w+?)(/low|/high)?", name)) is not None:
            lacking = {of[1], f"{of[1]}/low", f"{of[1]}/high"} - numbers.keys()
            yield from (f"{each} is missing beside {name}" for each in sorted(lacking))


class EvaluationRow(LogRow):
    """The row of an evaluation."""

    kind: Literal["eval"]


class TrainingRow(LogRow):
    """The row of an iteration."""

    kind: Literal["train"]
    iteration: Annotated[int, Field(ge=1, le=10**6)]
    evaluations: Amount
    images: Amount
    rollout: Annotated[Seconds, Field(alias="seconds/rollout")]


def read_log(path: Path) -> list[Row]:
    """All rows of a log so far, without a last line that was cut short; none without a file.
    UserError names any other damaged line."""
    kind: Any = Annotated[EvaluationRow | TrainingRow, Field(discriminator="kind")]
    rows = read_lines_as(kind, path) if path.exists() else []
    return [row.model_dump(by_alias=True, exclude_unset=True) for row in rows]
