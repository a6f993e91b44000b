"""Types of hyper-parameters, which pydantic validates in the fields of frozen dataclasses.

@dataclass(config=STRICT, frozen=True, kw_only=True)  # pydantic's: values are checked in configs and in Python alike
class Mine(PolicyGradient):
    group_size: GroupSize = 12
    eta: PositiveFloat = 0.7
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field

from g2rpo.core.plain import Count

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
T = TypeVar("T")


def distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    if len(set(values)) < len(values):
        raise ValueError(f"should name each number once, got {list(values)}")
    return values


GroupSize = Annotated[int, Field(ge=2, le=10_000)]
"""A group of one has no advantage; more than these is a typing error, and would exhaust memory before any message."""
Distinct = AfterValidator(distinct)
UpdateEvery = Literal["rollout", "branch"] | Count
"""`types.UpdateEvery` with its limit."""
