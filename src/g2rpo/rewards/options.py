"""What a config says of a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from g2rpo.core.plain import Section
from g2rpo.core.types import Frames


def _not_negative(weight: float) -> float:
    """Refuses a reward to be lowered: alarms, the best evaluation and reports take a higher score
    for the better one."""
    if weight < 0:
        raise ValueError(
            "should be at least 0, since a higher score is the better one; to lower it, negate the score itself"
        )
    return weight


class RewardConfig(Section):
    """One reward: its kind, options and weight."""

    kind: str
    weight: Annotated[float, AfterValidator(_not_negative)] = 1.0
    options: dict[str, JsonValue] = {}
    frames: Frames | None = None
    """Which frames of clips a reward of pictures scores; None: every fourth, their mean."""


def _reward_table(value: Any) -> Any:
    """Allows `name: 1.0` (a weight) and `name: {weight: ...}`, where the name is also the kind."""
    if not isinstance(value, Mapping):
        return value
    table = {}
    for name, entry in value.items():
        if isinstance(entry, int | float) and not isinstance(entry, bool):
            entry = {"weight": entry}
        elif entry is None:
            entry = {}
        table[name] = {"kind": name, **entry} if isinstance(entry, Mapping) else entry
    return table


RewardName = Annotated[str, Field(pattern=r"^[\w+-][\w.+-]*$", max_length=100)]
"""The name appears in tables, charts and file names."""


RewardTable = Annotated[dict[RewardName, RewardConfig], BeforeValidator(_reward_table)]
