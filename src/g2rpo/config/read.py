"""The config of a recipe or of a YAML file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from g2rpo.config import recipes
from g2rpo.config.algorithms import ALGORITHMS, config_name, with_name
from g2rpo.config.resolve import read_yaml, resolve
from g2rpo.config.schema import Config
from g2rpo.config.work import plans_in, trained_sigmas_of
from g2rpo.core.errors import UserError, counted, refuse
from g2rpo.core.files import local
from g2rpo.core.flow import sigma_grid
from g2rpo.models.adapters import endings
from g2rpo.models.blueprint import adapter_of, transformer_of
from g2rpo.models.options import PolicyConfig


def read(
    recipe: str, overrides: Sequence[str], notify: Callable[[str], None] = lambda message: None
) -> Config:
    """The config of a recipe's name or a YAML file, with overrides, complete: with the rank, alpha
    and targets of the adapter that it continues. `notify` is told what was left out or added."""
    return completed(load_config(recipe, overrides, notify), notify)


def load_config(
    recipe: str, overrides: Sequence[str], notify: Callable[[str], None] = lambda message: None
) -> Config:
    """The config of a recipe's name or a YAML file, with overrides; `notify` is called with the
    keys that an override drops, and if a folder has the recipe's name. No weights are opened:
    `completed` reads the adapter that is continued."""
    is_file = recipe.endswith((".yaml", ".yml"))
    if is_file:
        refuse(_faults_of_file(recipe))
        data, source = recipes.extended(read_yaml(local(recipe))), recipe
    else:
        refuse(_faults_of_name(recipe))
        if os.path.isdir(recipe):
            notify(f"{recipe} is taken for the recipe, not for the folder of that name here")
        data, source = recipes.recipe_settings(recipe), f"recipe {recipe}"
    config = resolve(data, overrides, source, notify)
    asked = {override.partition("=")[0] for override in overrides}
    if not is_file:
        config = _with_adapter(config, asked, notify)
    own_algorithm = data.get("algorithm")
    kept = isinstance(own_algorithm, dict) and with_name(own_algorithm)["name"] == config_name(
        config.algorithm
    )
    return (
        config
        if kept or config_name(config.algorithm) not in ALGORITHMS
        else _fitted(config, asked, notify)
    )


def _faults_of_file(file: str) -> Iterator[str]:
    name = file.rpartition(".")[0]
    if name in recipes.names() and not os.path.exists(file):
        yield f"{file}: there is no such file; the recipe is called {name}"


def _faults_of_name(recipe: str) -> Iterator[str]:
    if "=" in recipe:
        yield f"{recipe} is an override; name a recipe (`g2rpo recipes` lists them) or a config.yaml before it"
    if os.path.isdir(recipe) and recipe not in recipes.names():
        own = os.path.join(recipe, "config.yaml")
        hint = f"its config is {own}" if os.path.isfile(own) else "name a recipe or a config.yaml"
        yield f"{recipe} is a directory; {hint}"


LORA = ("lora_rank", "lora_alpha", "lora_targets")
"""What an adapter that is continued has of its own."""


def _with_adapter(config: Config, asked: set[str], notify: Callable[[str], None]) -> Config:
    """Without a recipe's rank, alpha and targets, if an adapter is continued that has its own."""
    policy = config.policy
    left = [
        name for name in LORA if name in policy.model_fields_set and f"policy.{name}" not in asked
    ]
    if policy.adapter is None or policy.tuning == "full" or not left:
        return config
    written = ", ".join(f"{name}={getattr(policy, name)}" for name in left)
    notify(
        f"policy.adapter={policy.adapter}: its own rank, alpha and targets are taken; the recipe's {written} are left out"
    )
    own = policy.model_dump(include=policy.model_fields_set - {*left})
    return config.model_copy(update={"policy": PolicyConfig.model_validate(own)})


def _fitted(config: Config, asked: set[str], notify: Callable[[str], None]) -> Config:
    """With what a named algorithm needs instead of values for another number of steps, another
    solver, or other trained steps.

    Keys in `asked` stay as they are, and each change is told.
    """
    algorithm: Any = config.algorithm
    sampling, policy = config.sampling, config.policy
    told = f"algorithm.name={algorithm.name}: needs"
    fields = algorithm.fitted(sampling.num_steps)
    if fields and not asked & {f"algorithm.{key}" for key in fields}:
        written = " ".join(
            f"algorithm.{key}={value}"
            for key, value in fields.items()
            if value != getattr(algorithm, key)
        )
        notify(f"{told} {written} with sampling.num_steps={sampling.num_steps}")
        config = config.model_copy(update={"algorithm": dataclasses.replace(algorithm, **fields)})
    if sampling.tails.forecast and not asked & {"sampling.tails", "sampling.tails.forecast"}:
        solvers = {plan.solver for plan in plans_in(config, 0)} - {"euler"}
        if solvers:
            notify(f"{told} sampling.tails.forecast=false with its solver {', '.join(solvers)}")
            tails = dataclasses.replace(sampling.tails, forecast=False)
            config = config.changed("sampling", tails=tails)
    if policy.lora_above and "policy.lora_above" not in asked and isinstance(sampling.shift, float):
        trained = trained_sigmas_of(config, sigma_grid(sampling.num_steps, sampling.shift))
        if min(trained, default=1.0) <= policy.lora_above:
            notify(f"{told} policy.lora_above=0 for the late steps that it trains")
            config = config.changed("policy", lora_above=0.0)
    return config


def completed(config: Config, notify: Callable[[str], None] = lambda message: None) -> Config:
    """The config with the rank, alpha and targets of the adapter that it continues, which `notify`
    is told. UserError for an adapter that does not fit the model, or that differs from what is set
    in the config."""
    policy = config.policy
    start = adapter_of(policy)
    if policy.tuning == "full" or start is None:
        return config
    names = [name for name, _ in transformer_of(policy).named_modules()]
    own = {
        "lora_rank": start.rank,
        "lora_alpha": start.scale * start.rank,
        "lora_targets": endings(start.layers, names),
    }
    for name, value in own.items():
        if name in policy.model_fields_set and not _agrees(getattr(policy, name), value, names):
            asked = f"policy.{name}={getattr(policy, name)}"
            raise UserError(f"{asked}: the adapter {policy.adapter} has {value}; take it out")
    has = (
        f"rank {start.rank}, alpha {own['lora_alpha']:g} and {counted(len(start.layers), 'module')}"
    )
    notify(f"policy.adapter={policy.adapter}: {has}")
    return config.changed("policy", **own)


def _agrees(mine: object, value: object, names: Collection[str]) -> bool:
    """Whether values are equal, endings of names by what they fit."""
    if not isinstance(mine, list) or not isinstance(value, list):
        return mine == value
    fits = [
        {name for name in names if f".{name}".endswith(tuple(f".{end}" for end in ends))}
        for ends in (mine, value)
    ]
    return fits[0] == fits[1]
