"""The config of a recipe or of a YAML file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from g2rpo.assembly.adapters import completed
from g2rpo.config import recipes
from g2rpo.config.resolve import read_yaml, resolve
from g2rpo.config.schema import Config
from g2rpo.core.errors import UserError


def load_config(recipe: str, overrides: Sequence[str], notify: Callable[[str], None] = lambda message: None) -> Config:
    """The config of a recipe's name or a YAML file, with overrides; `notify` is called with the keys that an override drops,
    and if a folder has the recipe's name."""
    given = {key.removeprefix("policy.") for key, _, _ in (override.partition("=") for override in overrides)}
    if recipe.endswith((".yaml", ".yml")):
        data = read_yaml(Path(recipe))
        own = data.get("policy")
        return completed(resolve(data, overrides, recipe, notify), given | {*(own if isinstance(own, dict) else ())}, notify)
    if "=" in recipe:
        raise UserError(f"{recipe} is an override; name a recipe (`g2rpo recipes` lists them) or a config.yaml before it")
    if os.path.isdir(recipe):
        if recipe not in recipes.names():
            raise UserError(f"{recipe} is a directory; name a recipe, or a config such as {recipe}/config.yaml")
        notify(f"{recipe} is taken for the recipe, not for the folder of that name here")
    return completed(resolve(recipes.settings(recipe), overrides, f"recipe {recipe}", notify), given, notify)
