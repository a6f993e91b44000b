"""Names of an adapter's tensors: as trainers, peft and wrappers of modules write them, and those of a
model's original weights, read by the tables of `comfyui`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from g2rpo.core.errors import refuse
from g2rpo.models.adapters import Factors, shapes_in
from g2rpo.models.comfyui import KNOWN, ComfyUI, order_in_joint, replaced_name

OTHER_KINDS = {
    r"\.lokr_\w+$": "LoKr",
    r"\.hada_\w+$": "LoHa",
    r"\.b?oft_\w+(\.\w+)*$": "BOFT or OFT",
    r"\.dora_scale$|lora_magnitude_vector": "DoRA",
    r"\.lora_mid\.": "LoCon",
    r"\.(diff|diff_b|set_weight)$": "LoRA with whole weights beside",
    r"\.lora_(B|up)(\.\w+)?\.bias$|\.lora\.up\.bias$": "LoRA with biases",
    r"\.(scale_weight|weight_scale|scale_inv|weight_scale_inv|absmax|quant_map|(input|scale)_(scale|input)|comfy_quant)$"
    r"|^scaled_fp8$": "LoRA in fewer bits with scales beside",
}
"""Endings of names, and what has them."""
OTHER_PARTS = re.compile(
    r"(^|[._])(lora_te\d?|text_encoders?(_\d)?|text_model|clip_[glh]|u?m?t5(xxl)?"
    r"|qwen\d\w*|gemma\w*|llama\w*|vae)[._]"
)
"""In names of what is no transformer: text encoders, by the names of several programs, and the
VAE."""

FACTOR = re.compile(
    r"(?P<module>.+?)(?P<end>\.lora_(?P<one>A|B|down|up)|(?:\.lora|\.lora_linear_layer|_lora\d?)\.(?P<two>down|up))"
    r"(?P<adapter>\.[\w-]+)?(?(adapter)\.weight|(?:\.weight)?)$"
)
ALPHA = re.compile(r"(?P<module>.+?)(?:\.lora)?\.(?:lora_)?alpha$")
WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module)\."
)
"""Of torch.compile, FSDP and activation checkpointing; anywhere in a name."""
PEFT = "base_model.model."
PREFIXES = (
    *(
        "module.",
        PEFT,
        "base_model.",
        "model.",
        "diffusion_model.",
        "transformer.",
        "unet.",
        "dit.",
        "net.",
        "pipe.",
    ),
    *("lora_transformer_", "lora_unet_", "lora_dit_", "lora_", "lycoris_", "transformer_", "unet_"),
)
"""What programs put before the names of a transformer's modules."""


@dataclass(frozen=True)
class Pair:
    """The names of a module's factors and of its alpha, if it has one."""

    module: str
    down: str
    up: str
    alpha: str | None


def refuse_others(names: Collection[str]) -> None:
    """ValueError for the names of tensors that are no LoRA of a transformer alone."""
    refuse(_faults_of_names(names), ValueError)


def _faults_of_names(names: Collection[str]) -> Iterator[str]:
    for ending, kind in OTHER_KINDS.items():
        if found := next(filter(re.compile(ending).search, sorted(names)), None):
            yield f"is a {kind} ({found}), which is not supported; a plain LoRA is"
    # converters count up to it
    if found := next(filter(re.compile(r"\d{5}").search, sorted(names)), None):
        yield f"holds {found}; no model has so many blocks"
    if names and not any("lora" in name for name in names):
        yield (
            f"holds no factors of a LoRA but other tensors, such as {min(names)}. Other kinds of adapters are not supported; "
            "a merged model is no adapter: its diffusers folder goes into policy.path"
        )
    if others := [name for name in names if OTHER_PARTS.search(name)]:
        yield (
            f"changes text encoders or a VAE too ({len(others)} of {len(names)} tensors, such as {others[0]}); only adapters "
            "of the transformer alone are continued"
        )
    if len(several := adapters_in(names)) > 1:
        yield f"holds several adapters, {', '.join(sorted(each or 'one without a name' for each in several))}"


def adapters_in(names: Collection[str]) -> set[str]:
    """The names of the adapters to which factors belong, as peft keeps them in a model; "" where
    they have none."""
    factors = [factor for name in names if (factor := FACTOR.match(name))]
    return {(factor["adapter"] or "").removeprefix(".") for factor in factors}


def unwrapped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their names without the wrappers of modules, and without the name that peft gave
    to the adapter."""
    plain: dict[str, Tensor] = {}
    for name, value in tensors.items():
        short = WRAPPERS.sub("", name)
        if factor := FACTOR.match(short):
            short = short[: factor.end("end")] + ".weight"
        if short in plain:
            raise ValueError(f"holds {name} twice, with wrappers of modules and without")
        plain[short] = value
    return plain


def pairs_in(names: Collection[str]) -> list[Pair]:
    """The modules of these tensors in the order of their names; ValueError for what is no factor
    and no alpha."""
    places: dict[str, dict[str, str]] = {}
    alphas: dict[str, str] = {}
    for name in sorted(names):
        if factor := FACTOR.match(name):
            side = "down" if (factor["one"] or factor["two"]) in ("A", "down") else "up"
            place = re.sub(r"(A|B|down|up)$", "", name[: factor.end("end")])
            found = places.setdefault(place, {"module": factor["module"]})
            if side in found:
                raise ValueError(
                    f"holds two factors of one place, {found[side]} and {name}; one adapter is read"
                )
            found[side] = name
        elif alpha := ALPHA.match(name):
            alphas[alpha["module"]] = name
        else:
            raise ValueError(
                f"holds other tensors than a LoRA's factors and alphas, such as {name}"
            )
    modules = {found["module"] for found in places.values()}
    if loose := sorted(alphas.keys() - modules):
        raise ValueError(f"holds {alphas[loose[0]]}, and no factors of that module")
    for found in places.values():
        if not {"down", "up"} <= found.keys():
            raise ValueError(
                f"holds other tensors than a LoRA's pairs: one factor of {found['module']} without the other"
            )
    return [Pair(**found, alpha=alphas.get(found["module"])) for found in places.values()]


def common_peelings(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """The names, and again after each known prefix that all of them have is taken off."""
    yield names
    while names and (
        found := next((p for p in PREFIXES if all(name.startswith(p) for name in names)), None)
    ):
        names = [name.removeprefix(found) for name in names]
        yield names


def in_model(module: str, own: Mapping[str, str]) -> str | None:
    """The name of a module in the model whose names have the `patterns_of` `own`, of that in a
    file, which may have known prefixes, and underscores for dots; None: it has no such module.
    Numbers are not compared: the model may have fewer blocks, as those of plans do."""
    for (name,) in common_peelings([module]):
        pattern = own.get(re.sub(r"\d+", "#", name))
        if pattern is not None:
            for number in re.findall(r"\d+", name):
                pattern = pattern.replace("#", number, 1)
            return pattern
    return None


def patterns_of(modules: Collection[str]) -> dict[str, str]:
    """Names with # for their numbers; these by themselves, and by their form with underscores for
    dots."""
    patterns = {re.sub(r"\d+", "#", name) for name in modules}
    return {pattern.replace(".", "_"): pattern for pattern in patterns} | {
        pattern: pattern for pattern in patterns
    }


class _Part(NamedTuple):
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
    for module in sorted(own, key=order_in_joint):
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
                part._replace(module=re.sub(r"\d+", number[0], part.module, count=1))
                for part in first
            ]
    return []
