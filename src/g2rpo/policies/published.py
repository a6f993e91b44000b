"""Published configurations of open models, as far as sizes depend on them, so that plans need no download.

`published.json` has the class and the config of each part, and the parts of each model. They are from diffusers' defaults and
conversion scripts (scripts/convert_flux2_to_diffusers.py, convert_wan_to_diffusers.py) and the config.json files of gated
models and of text encoders. Z-Image's VAE is FLUX.1's.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

Parts = dict[str, tuple[str, dict[str, Any]]]
"""The parts of a pipeline by name: the class, as "library:Name", and its config."""


@functools.cache
def _tables() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))


def parts_of(model: str) -> Parts:
    """The parts of a model of the table."""
    tables = _tables()
    named = {name: tables["parts"][part] for name, part in tables["models"][model].items()}
    return {name: (part["class"], part["config"]) for name, part in named.items()}
