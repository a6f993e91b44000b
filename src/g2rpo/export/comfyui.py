"""Trained weights with ComfyUI's names (`policies.comfyui`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch

from g2rpo.core.errors import UserError
from g2rpo.export.adapter import CONFIG, Adapter
from g2rpo.policies import catalogue
from g2rpo.policies.comfyui import ComfyUI
from g2rpo.policies.spec import PipelineSpec


def names_for(transformer: str, kind: str | None = None) -> ComfyUI:
    """ComfyUI's names of a class of transformers, the catalogue's or those of the spec that `kind` (policy.kind) names;
    UserError where none are known."""
    found = _of(catalogue.SPECS.values(), transformer) or _of([catalogue.spec_of(kind)] if kind else [], transformer)
    if found is None:
        raise UserError(
            f"--format comfyui: {transformer}: ComfyUI has no such model, or its names are not known here; --format diffusers "
            "and merged are for any model"
        )
    return found


def _of(specs: Iterable[PipelineSpec | None], transformer: str) -> ComfyUI | None:
    known = [spec.comfyui for spec in specs if spec is not None and spec.comfyui is not None]
    return next((names for names in known if names.transformer == transformer), None)


def whole_names(names: ComfyUI) -> Callable[[str], str]:
    """ComfyUI's names of the tensors of a whole transformer; UserError if it cannot load one."""
    if (changes := names.whole) is None:
        raise UserError(
            f"--format comfyui: {names.transformer}: no conversion of a whole model is known; --format diffusers and merged "
            "are for any model"
        )

    def renamed(name: str) -> str:
        for pattern, other in changes.items():
            name = re.sub(pattern, other, name)
        return name

    return renamed


def for_comfyui(adapter: Adapter, names: ComfyUI) -> Adapter:
    """The adapter with ComfyUI's keys as modules' names. Projections that the original weights keep in one matrix become one
    LoRA: the downs below one another, the ups in the blocks of a diagonal, so that up @ down stacks their changes."""
    grouped: dict[str, list[str]] = {}
    for module in sorted(adapter.layers, key=lambda name: (name.rpartition(".")[0], "qkv".find(name[-1]), name)):
        grouped.setdefault(_key(names, module), []).append(module)
    for key, modules in grouped.items():
        if key.endswith(".qkv") and len(modules) != 3:
            raise UserError(f"--format comfyui: {key} is one matrix in ComfyUI; train to_q, to_k and to_v, not {modules} alone")
    layers = {}
    for key, modules in grouped.items():
        downs, ups = zip(*(adapter.layers[module] for module in modules), strict=True)
        layers[key] = (downs[0], ups[0]) if len(modules) == 1 else (torch.cat(downs), torch.block_diag(*ups))
    return Adapter(layers, {key: text for key, text in adapter.metadata.items() if key != CONFIG})  # its names are diffusers'


def _key(names: ComfyUI, module: str) -> str:
    if (key := names.key(module)) is not None:
        return key
    raise UserError(
        f"--format comfyui: ComfyUI's loader has no key for {module} of {names.transformer} and would leave it out; "
        "use --format diffusers or merged, or train without it (policy.lora_targets)"
    )
