"""THE list of options: everything that a config accepts. A new one is a decision: it is added here, and explained in docs/."""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from g2rpo import plugins
from g2rpo.build.rewards import REWARDS
from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.config.schema import Config, RewardConfig

OPTIONS = """
"""


def leaves(kind: Any, prefix: str) -> Iterator[str]:
    """The dotted keys below a group; of rewards, which evaluations have too, those in one place."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = {name: field.annotation for name, field in kind.model_fields.items() if name not in ("algorithm", "options")}
    elif dataclasses.is_dataclass(kind):
        fields = {field.name: get_type_hints(kind)[field.name] for field in dataclasses.fields(kind)}
    else:
        group = next((each for each in get_args(kind) if dataclasses.is_dataclass(each)), None)  # an optional one
        yield from leaves(group, prefix) if group else [prefix]
        return
    for name, inner in fields.items():
        if get_origin(inner) is dict and get_args(inner)[1] is RewardConfig:
            yield from leaves(RewardConfig, "rewards.NAME") if not prefix else []
        else:
            yield from leaves(inner, f"{prefix}.{name}" if prefix else name)


def options() -> set[str]:
    algorithms = {field.name for kind in ALGORITHMS.values() for field in dataclasses.fields(kind)}
    kinds = [plugins.find("rewards", name, REWARDS) for name in REWARDS]
    rewards = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return {
        *leaves(Config, ""),
        *(f"algorithm.{name}" for name in algorithms),
        *(f"rewards.NAME.options.{name}" for name in rewards),
    }


def test_options_are_those_of_the_list():
    assert sorted(options()) == sorted(OPTIONS.split())
