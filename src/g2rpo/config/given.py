"""Placeholders in config.yaml for objects passed from Python, so that no command replaces them by
something else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from g2rpo.core.errors import UserError

OBJECT = "object"
"""The prefix of a placeholder in a config; "object:module.Class" if the class is known."""


@dataclass(frozen=True)
class Mentioned:
    """An algorithm given as an object, as recorded in config.yaml: its class and its fields."""

    name: str
    fields: Mapping[str, Any]


def mention(thing: Any) -> str:
    """The placeholder of an object: "object:" and its class, or its name if it is a function."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{OBJECT}:{named.__module__}.{named.__qualname__}"


def is_mention(name: object) -> bool:
    """Whether a name in a config is a placeholder of an object."""
    return isinstance(name, str) and (name == OBJECT or name.startswith(f"{OBJECT}:"))


def refuse_mention(key: str, name: object) -> None:
    """UserError if `name` is a placeholder: the object cannot be built from it."""
    if is_mention(name):
        raise UserError(
            f"{key}={name}: was given as a Python object, and no command can make it again; "
            "continue from the program that began the run (api.trainer), or name another in its place"
        )


def recorded(algorithm: Any) -> dict[str, Any]:
    """The group of a config that records `algorithm`: its class, and its fields as plain data."""
    if isinstance(algorithm, Mentioned):
        return {"name": algorithm.name, **algorithm.fields}
    fields = (
        [field.name for field in dataclasses.fields(algorithm)]
        if dataclasses.is_dataclass(algorithm)
        else vars(algorithm)
    )
    values = {name: getattr(algorithm, name) for name in fields if name != "name"}
    return {
        "name": mention(algorithm),
        **to_jsonable_python(values, fallback=mention, inf_nan_mode="strings"),
    }
