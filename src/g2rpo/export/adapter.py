"""A LoRA file as plain matrices."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from g2rpo.core.errors import UserError, loading
from g2rpo.core.files import add_metadata

PREFIX, DOWN, UP = "transformer.", ".lora_A.weight", ".lora_B.weight"
CONFIG = "lora_adapter_metadata"
"""Where diffusers keeps peft's config, as JSON, in the header."""
RANK, ALPHA = f"{PREFIX}r", f"{PREFIX}lora_alpha"


@dataclass(frozen=True)
class Adapter:
    """The change up @ down that a LoRA adds to the weights W [out, in, ...] of a transformer.

    `layers` has (down [rank, in, ...], up [out, rank, ...]) in float32 by a module's name in diffusers, with the factor
    alpha / rank multiplied into up. `metadata` is the file's header.
    """

    layers: Mapping[str, tuple[Tensor, Tensor]]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def delta(self, module: str) -> Tensor:
        """What is added to a module's weight, as a matrix [out, in]."""
        down, up = self.layers[module]
        return up.flatten(1) @ down.flatten(1)

    def write(self, path: Path, prefix: str = "") -> None:
        """Writes the file; its bytes depend on nothing but matrices and text."""
        tensors = {f"{prefix}{m}{end}": v for m, pair in self.layers.items() for end, v in zip((DOWN, UP), pair, strict=True)}
        save_file({name: value.contiguous() for name, value in sorted(tensors.items())}, path)
        add_metadata(path, {"format": "pt", **self.metadata})


def _scale(config: Any) -> float:
    """alpha / rank, which is 1 except in files of earlier versions; ValueError for another header than diffusers writes."""
    if not isinstance(config, dict):
        raise ValueError(f"its {CONFIG} should be an object, is {config!r:.80}")
    alpha = config.get(ALPHA, 1)
    rank = config.get(RANK, alpha)
    if not all(isinstance(each, int | float) and 0 < each < math.inf for each in (alpha, rank)):
        raise ValueError(f"its {CONFIG} should have numbers above 0 as {RANK} and {ALPHA}, has {rank!r:.40} and {alpha!r:.40}")
    return alpha / rank


def _check_factors(place: str, down: Tensor, up: Tensor) -> None:
    """UserError if the two are no factors [rank, in, ...] and [out, rank, ...] of one matrix, or not finite."""
    if min(down.ndim, up.ndim) < 2 or down.shape[0] != up.shape[1]:
        raise UserError(
            f"{place}: should be matrices [rank, in] and [out, rank] of one rank, is {list(down.shape)} and {list(up.shape)}"
        )
    if not (down.isfinite().all() and up.isfinite().all()):
        raise UserError(f"{place}: has values that are not finite (NaN or infinity)")


def read_adapter(path: Path) -> Adapter:
    """The adapter in a file that diffusers saved; UserError for one that is no LoRA of a transformer."""
    with loading(f"{path}: cannot be read"):
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
        config = json.loads(metadata.get(CONFIG, "{}"))
        scale = _scale(config)
    modules = sorted({name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)})
    if not modules or tensors.keys() != {module + end for module in modules for end in (DOWN, UP)}:
        raise UserError(f"{path}: holds other tensors than a LoRA's, {DOWN[1:]} and {UP[1:]} of each module")
    for module in modules:
        _check_factors(f"{path}: {module}", tensors[module + DOWN], tensors[module + UP])
    layers = {m.removeprefix(PREFIX): (tensors[m + DOWN].float(), tensors[m + UP].float() * scale) for m in modules}
    folded = {CONFIG: json.dumps({**config, ALPHA: config[RANK]}, indent=2, sort_keys=True)} if RANK in config else {}
    return Adapter(layers, {**metadata, **folded})
