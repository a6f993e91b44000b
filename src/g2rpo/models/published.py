"""Published models, so far as plans, cards and exports need to know them without a download:
`published.json`, one entry each.

An entry has the class of the pipeline, the licence as the model's card said in 2026, and what is
known of: its architecture's name in ModelSpec headers, values of the pipeline's index that are no
parts, and the parts on which sizes depend. Each names a row of the second table: its class and
config, from diffusers' defaults and conversion scripts (scripts/convert_flux2_to_diffusers.py,
convert_wan_to_diffusers.py) and the config.json files of gated models and of text encoders.
Z-Image's VAE is FLUX.1's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Part = tuple[str, dict[str, Any]]
"""The class of a pipeline's part, as "library:Name", and its config."""


@dataclass(frozen=True)
class PublishedModel:
    """Published weights."""

    licence: str
    architecture: str | None = None
    parts: Mapping[str, Part] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@functools.cache
def models_of(pipeline_class: str) -> Mapping[str, PublishedModel]:
    """The published models of a class of pipelines, by hub id."""
    tables = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    rows = {name: (row["class"], row["config"]) for name, row in tables["parts"].items()}
    models = {}
    for name, entry in tables["models"].items():
        if entry.pop("pipeline") == pipeline_class:
            named = entry.pop("parts", None)
            models[name] = PublishedModel(
                **entry, parts=named and {part: rows[row] for part, row in named.items()}
            )
    return models
