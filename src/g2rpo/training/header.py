"""The header of a saved adapter, for people and for programs that list models."""

from __future__ import annotations

import json
from pathlib import Path

from g2rpo import __version__
from g2rpo.config.algorithms import title_of
from g2rpo.config.schema import Config
from g2rpo.core.files import is_hub_id
from g2rpo.policies import catalogue
from g2rpo.policies.adapters import ABOVE


def header_of(config: Config, iteration: int) -> dict[str, str]:
    """Text for the header of an adapter that a run of `config` saved after `iteration`: the same for equal runs, so no dates.

    Where the base model's architecture has a name, the fields of ModelSpec 1.0.1 (github.com/Stability-AI/ModelSpec) are there.
    """
    method, paper = title_of(config.algorithm)
    own = {
        "version": __version__,
        "algorithm": method,
        **({"arxiv": paper} if paper else {}),
        "rewards": json.dumps({name: entry.weight for name, entry in config.rewards.items()}),
        "base_model": base_name(config.policy.path),
        **({"adapter": base_name(config.policy.adapter)} if config.policy.adapter else {}),
        "iteration": str(iteration),
        "size": f"{config.policy.width}x{config.policy.height}",
    }
    above = {ABOVE: str(config.policy.lora_above)} if config.policy.lora_above else {}
    return {**{f"g2rpo.{name}": text for name, text in own.items()}, **above, **_modelspec(config, method)}


def base_name(path: str) -> str:
    """A base model's name: its hub id, or the name of its folder without its path, which is private."""
    return path if is_hub_id(path) else Path(path).name


def _modelspec(config: Config, method: str) -> dict[str, str]:
    base = config.policy.path
    _, model = catalogue.model_of(base, config.policy.kind) or (None, None)
    if model is None or model.architecture is None:
        return {}
    fields = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{model.architecture}/lora",
        "implementation": "diffusers",
        "title": f"{base_name(base)} tuned with {method}",
        "description": f"Trained on {', '.join(config.rewards)} by g2rpo {__version__}",
        "resolution": f"{config.policy.width}x{config.policy.height}",
        "license": model.licence,
    }
    return {f"modelspec.{name}": text for name, text in fields.items()}
