"""LoRA files with the names of a model's original weights, read by the tables of `comfyui`:
diffusers' own converters read them of some models, and of whole adapters alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from g2rpo.models.adapter_names import common_peelings, in_model, patterns_of
from g2rpo.models.adapters import Factors, shapes_in
from g2rpo.models.comfyui import KNOWN, ComfyUI, place_in_joint, replaced_name


@dataclass(frozen=True)
class _Part:
    """A module in diffusers, its rows, and whether the original weights have its halves the other
    way round: shift and scale."""

    module: str
    rows: int
    swapped: bool


def by_original_names(
    modules: Sequence[str],
    layers: Sequence[Factors],
    transformer: nn.Module,
    names: ComfyUI | None = None,
) -> Mapping[str, Factors] | None:
    """The factors of these modules by their names in diffusers, where each module has that name or
    the original one, by `names` or those that are known; else None. Joint matrices are divided by
    rows, which is exact.

    ValueError for a joint matrix of other rows, and for two adapters of one module.
    """
    own, parts = patterns_of(shapes_in(transformer)), _parts_in(transformer, names)
    found: dict[str, Factors] = {}
    for module, (down, up) in zip(modules, layers, strict=True):
        if (same := in_model(module, own)) is not None:
            named = {same: (down, up)}
        elif len(of := _parts_of(module, parts)) == 1:
            named = {of[0].module: (down, torch.cat(up.chunk(2)[::-1]) if of[0].swapped else up)}
        elif of:
            rows, together = [part.rows for part in of], ", ".join(part.module for part in of)
            if sum(rows) != len(up):
                raise ValueError(
                    f"{module}: has {len(up)} rows, but {together} of the model have {sum(rows)}"
                )
            named = {
                part.module: own_rows(down, each)
                for part, each in zip(of, up.split(rows), strict=True)
            }
        else:
            return None
        for name in found.keys() & named.keys():
            raise ValueError(f"holds two adapters of {name}, under different names; one is read")
        found |= named
    return found


def own_rows(down: torch.Tensor, up: torch.Tensor) -> Factors:
    """The factors of one projection of a joint matrix without the ranks of the others, whose
    columns in its `up` are 0."""
    if (used := up.any(0)).any() and len(down) == len(used):
        return down[used], up[:, used]
    return down, up


def _parts_in(transformer: nn.Module, names: ComfyUI | None) -> dict[str, list[_Part]]:
    """What each module of the original weights is in diffusers, by its name with dots and with
    underscores, and by ComfyUI's key."""
    from diffusers.models.normalization import AdaLayerNormContinuous

    parts: dict[str, list[_Part]] = {}
    known = KNOWN.get(kind := type(transformer).__name__)
    if names is not None and names.transformer == kind:
        known = names
    if known is None:
        return parts
    own = shapes_in(transformer)
    for module in sorted(own, key=place_in_joint):
        above = transformer.get_submodule(module.rpartition(".")[0])
        part = _Part(module, own[module][0], isinstance(above, AdaLayerNormContinuous))
        tables = known.names, known.original or {}, known.read
        others = {replaced_name(table, module) for table in tables} - {None, module}
        forms = {form for name in others for form in (str(name), str(name).replace(".", "_"))}
        if (key := known.key(module)) is not None:
            forms.add(key)
        for form in forms:
            parts.setdefault(form, []).append(part)
    return parts


def _parts_of(module: str, parts: Mapping[str, list[_Part]]) -> list[_Part]:
    """Those of a module in a file, which may have known prefixes. The model may have fewer blocks,
    as those of plans do: others are as its first."""
    for (name,) in common_peelings([module]):
        if name in parts:
            return parts[name]
        number = re.search(r"\d+", name)
        first = parts.get(re.sub(r"\d+", "0", name, count=1)) if number else None
        if number and first:
            return [
                _Part(re.sub(r"\d+", number[0], part.module, count=1), part.rows, part.swapped)
                for part in first
            ]
    return []
