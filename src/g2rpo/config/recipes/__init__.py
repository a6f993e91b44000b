"""Recipes: YAML files that say for every value why it is there. A recipe is a complete config, or
what is different beside the recipe that it `extends`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from g2rpo.core.errors import UserError, did_you_mean
from g2rpo.core.plain import parse_yaml, read_as

NEEDS = Path(str(files(__name__))) / "needs.json"
"""`Needs` by recipe (`tools.recipe_needs`)."""
EXTENDS = "extends"
GROUPS = {
    16: "One GPU of 16 GB",
    24: "One GPU of 24 GB",
    48: "One GPU of 48 GB",
    80: "One GPU of 80 GB",
}
"""Titles of groups of recipes, by the memory of a card in GB."""
HERE, SEVERAL = "Here: no GPU, nothing to download", "Several GPUs"


@dataclass(frozen=True)
class Needs:
    """What a recipe needs, as planned: GiB on each of so many `cards`, hours on H100s, and GiB of
    rewards to download."""

    cards: int
    gib: float
    hours: float
    rewards_gib: float


def names() -> list[str]:
    """All recipes, sorted."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in files(__name__).iterdir()
        if entry.name.endswith(".yaml")
    )


def text(name: str) -> str:
    """A recipe as it is written, comments and all."""
    if name not in names():
        raise UserError(f"unknown recipe '{name}'.{did_you_mean(name, names())}")
    return (files(__name__) / f"{name}.yaml").read_text(encoding="utf-8")


def recipe_settings(name: str) -> dict[str, Any]:
    """A recipe's values, its name among them, as `config.resolve.resolve` takes them."""
    return {**extended(parse_yaml(text(name))), "recipe": name}


def extended(data: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe or a config, upon those of the recipe that it extends."""
    own = {key: value for key, value in data.items() if key != EXTENDS}
    return own if len(own) == len(data) else _upon(recipe_settings(str(data[EXTENDS])), own)


def _upon(below: Any, above: Any) -> Any:
    """Tables are joined key by key; any other value replaces the one below."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{key: _upon(below.get(key), value) for key, value in above.items()}}


def summary(name: str) -> str:
    """The first comment line of a recipe."""
    return text(name).splitlines()[0].removeprefix("#").strip()


def needs() -> dict[str, Needs]:
    """By recipe; the embedded models need no GPU."""
    return read_as(dict[str, Needs], NEEDS)


def groups() -> dict[str, list[str]]:
    """The recipes by where they run, the least demanding first."""
    known = needs()
    found: dict[str, list[str]] = {title: [] for title in (HERE, *GROUPS.values(), SEVERAL)}
    for name in sorted(names(), key=lambda name: known[name].hours if name in known else 0):
        own = known.get(name)
        fitting = [title for size, title in GROUPS.items() if own and own.gib < size]
        one = own is not None and own.cards == 1 and fitting
        found[HERE if own is None else fitting[0] if one else SEVERAL].append(name)
    return {title: held for title, held in found.items() if held}
