"""What config.yaml says of objects that the program which began a run gave in place of names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from g2rpo.core.errors import UserError

PYTHON = "python"
"""The name of every such object."""


@dataclass(frozen=True)
class Mentioned:
    """An algorithm of config.yaml that is not made: its name and its fields."""

    name: str
    fields: Mapping[str, Any]


def refuse_object(key: str, name: str) -> None:
    """UserError if an object was given for this key of a config."""
    if name == PYTHON:
        raise UserError(
            f"{key}={name}: this run was begun from Python with an object for it; resume it from the program that began "
            "it (api.trainer), or name another in its place"
        )


def recorded(algorithm: Any) -> dict[str, Any]:
    """The fields of `algorithm` as plain data."""
    if isinstance(algorithm, Mentioned):
        return dict(algorithm.fields)
    fields = (
        [field.name for field in dataclasses.fields(algorithm)]
        if dataclasses.is_dataclass(algorithm)
        else vars(algorithm)
    )
    values = {name: getattr(algorithm, name) for name in fields if name != "name"}
    plain: dict[str, Any] = to_jsonable_python(
        values, fallback=lambda value: PYTHON, inf_nan_mode="strings"
    )
    return plain
