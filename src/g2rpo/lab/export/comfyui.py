"""Trained weights with the names of ComfyUI, kohya's trainers and ai-toolkit
(`models.comfyui`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from g2rpo.core.errors import UserError
from g2rpo.models import catalogue
from g2rpo.models.adapters import Adapter
from g2rpo.models.comfyui import FLUX, ComfyUI, place_in_joint, replaced_name


class Unfit(UserError):
    """A format cannot hold a run's weights; the message is why."""


def names_for(transformer: str, kind: str | None = None, format: str = "comfyui") -> ComfyUI:
    """Other programs' names of a class of transformers, those of the spec that `kind` (policy.kind)
    names or the catalogue's; `Unfit` where none are known."""
    for names in (catalogue.names_of(kind), *(spec.comfyui for spec in catalogue.SPECS.values())):
        if names is not None and names.transformer == transformer:
            return names
    has = "ComfyUI has" if format == "comfyui" else "there is"
    raise Unfit(f"{has} no model {transformer}, or its names are not known here")


def whole_names(names: ComfyUI) -> Callable[[str], str]:
    """ComfyUI's names of the tensors of a whole transformer; `Unfit` if it cannot load one."""
    if (changes := names.whole) is None:
        raise Unfit(f"no conversion of a whole {names.transformer} is known")

    def renamed(name: str) -> str:
        for pattern, other in changes.items():
            name = re.sub(pattern, other, name)
        return name

    return renamed


def tensors_for(adapter: Adapter, names: ComfyUI, format: str) -> dict[str, Tensor]:
    """The tensors of an adapter with ComfyUI's keys, or with the original weights' names, as
    kohya's trainers and ai-toolkit write them."""
    key_of: Callable[[str], str | None] = names.key
    if format != "comfyui":
        if (original := names.original) is None or (
            format == "ai-toolkit" and original is FLUX.original
        ):
            raise Unfit(f"no names of a {names.transformer} are known there")
        key_of = partial(replaced_name, original)
    renamed = Adapter(_renamed(adapter, format, names.transformer, key_of))
    if format != "kohya":
        return renamed.tensors("diffusion_model." if format == "ai-toolkit" else "")
    tensors: dict[str, Tensor] = {}
    for key, (down, up) in renamed.layers.items():
        key = "lora_unet_" + key.replace(".", "_")
        alpha = torch.tensor(float(len(down)))
        tensors |= {
            f"{key}.lora_down.weight": down,
            f"{key}.lora_up.weight": up,
            f"{key}.alpha": alpha,
        }
    return tensors


def _renamed(
    adapter: Adapter, format: str, transformer: str, key_of: Callable[[str], str | None]
) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors by other modules' names. Projections that the original weights keep in one matrix
    become one LoRA: the downs below one another, the ups in the blocks of a diagonal, so that up @
    down stacks their changes."""
    grouped: dict[str, list[str]] = {}
    for module in sorted(adapter.layers, key=lambda name: (place_in_joint(name), name)):
        if (key := key_of(module)) is None:
            raise Unfit(
                f"its loader has no key for {module} of {transformer}, which policy.lora_targets trains, and would leave it out"
            )
        grouped.setdefault(key, []).append(module)
    layers = {}
    for key, modules in grouped.items():
        if key.endswith("qkv") and len(modules) != 3:
            raise Unfit(
                f"{key} is one matrix there; train to_q, to_k and to_v, not {modules} alone"
            )
        pairs = [adapter.layers[module] for module in modules]
        # FLUX.1's blocks of one stream; what is absent is zero
        if key.endswith("linear1") and place_in_joint(modules[0]) in range(4):
            rank, width = pairs[0][0].shape
            found = dict(zip(map(place_in_joint, modules), pairs, strict=True))
            lacks = {
                i: (torch.zeros(rank, width), torch.zeros(width * (4 if i == 3 else 1), rank))
                for i in range(4)
            }
            pairs = [{**lacks, **found}[i] for i in range(4)]
        downs, ups = zip(*pairs, strict=True)
        layers[key] = pairs[0] if len(pairs) == 1 else (torch.cat(downs), torch.block_diag(*ups))
    return layers
