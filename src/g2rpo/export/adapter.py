"""A LoRA file as plain matrices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from g2rpo.errors import UserError, loading
from g2rpo.files import add_metadata

PREFIX, DOWN, UP = "transformer.", ".lora_A.weight", ".lora_B.weight"
CONFIG = "lora_adapter_metadata"
"""Where diffusers keeps peft's config, as JSON, in the header."""
RANK, ALPHA = f"{PREFIX}r", f"{PREFIX}lora_alpha"


@dataclass(frozen=True)
class Adapter:
    """What a LoRA adds to the weights W [out, in, ...] of a transformer: up @ down.

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


def read_adapter(path: Path) -> Adapter:
    """The adapter in a file that diffusers saved; UserError for one that is no LoRA of a transformer."""
    with loading(f"{path}: cannot be read"):
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
        config = json.loads(metadata.get(CONFIG, "{}"))
    modules = sorted({name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)})
    if not modules or tensors.keys() != {module + end for module in modules for end in (DOWN, UP)}:
        raise UserError(f"{path}: holds other tensors than a LoRA's, {DOWN[1:]} and {UP[1:]} of each module")
    scale = config.get(ALPHA, 1) / config.get(RANK, config.get(ALPHA, 1))  # 1, but for what earlier versions saved
    layers = {m.removeprefix(PREFIX): (tensors[m + DOWN].float(), tensors[m + UP].float() * scale) for m in modules}
    folded = {CONFIG: json.dumps({**config, ALPHA: config[RANK]}, indent=2, sort_keys=True)} if RANK in config else {}
    return Adapter(layers, {**metadata, **folded})
