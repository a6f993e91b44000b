"""Recipes: YAML files that say for every value why it is there. A recipe is a complete config."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from g2rpo.core.errors import UserError, did_you_mean
from g2rpo.core.plain import parse_yaml


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
    return {"recipe": name, **parse_yaml(text(name))}


def summary(name: str) -> str:
    """The first comment line of a recipe."""
    return text(name).splitlines()[0].removeprefix("#").strip()
