"""Names of a LoRA's tensors, as trainers, peft and wrappers of modules write them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

OTHER_KINDS = {
    r"\.lokr_\w+$": "LoKr",
    r"\.hada_\w+$": "LoHa",
    r"\.dora_scale$|lora_magnitude_vector": "DoRA",
    r"\.lora_mid\.": "LoCon",
    r"\.(diff|diff_b|set_weight)$": "LoRA with whole weights beside",
    r"\.lora_(B|up)(\.\w+)?\.bias$|\.lora\.up\.bias$": "LoRA with biases",
    r"\.(scale_weight|weight_scale|scale_inv|weight_scale_inv|absmax|quant_map)$": "LoRA in fewer bits with scales beside",
}
"""Endings of names, and what has them."""
TEXT = ("lora_te", "text_encoder", "text_model")

FACTOR = re.compile(
    r"(?P<module>.+?)(?P<end>\.lora_(?P<one>A|B|down|up)|(?:\.lora|\.lora_linear_layer|_lora\d?)\.(?P<two>down|up))"
    r"(?P<adapter>\.[\w-]+)?(?(adapter)\.weight|(?:\.weight)?)$"
)
ALPHA = re.compile(r"(?P<module>.+?)(?:\.lora)?\.(?:lora_)?alpha$")
WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module)\.")
"""Of torch.compile, FSDP and activation checkpointing; anywhere in a name."""
PEFT = "base_model.model."
PREFIXES = (
    *("module.", PEFT, "base_model.", "model.", "diffusion_model.", "transformer.", "unet.", "dit.", "net.", "pipe."),
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
    for ending, kind in OTHER_KINDS.items():
        if found := next(filter(re.compile(ending).search, sorted(names)), None):
            raise ValueError(f"is a {kind} ({found}), which is not supported; a plain LoRA is")
    if found := next(filter(re.compile(r"\d{5}").search, sorted(names)), None):  # converters count up to it
        raise ValueError(f"holds {found}; no model has so many blocks")
    if names and not any("lora" in name for name in names):
        raise ValueError(
            f"holds no LoRA but other weights, such as {min(names)}; a merged model is no adapter: its diffusers folder goes "
            "into policy.path"
        )
    if found_text := [name for name in names if any(word in name for word in TEXT)]:
        raise ValueError(
            f"changes text encoders too ({len(found_text)} of {len(names)} tensors, such as {found_text[0]}); only adapters "
            "of the transformer alone are continued"
        )


def plain(name: str) -> str:
    """A name without the wrappers of modules, and without the name that peft gave to the adapter."""
    name = WRAPPERS.sub("", name)
    found = FACTOR.match(name)
    return name if found is None else name[: found.end("end")] + ".weight"


def names_adapter(name: str) -> bool:
    """Whether a name has that of an adapter, as peft keeps it in a model."""
    found = FACTOR.match(name)
    return found is not None and found["adapter"] is not None


def pairs_in(names: Collection[str]) -> list[Pair]:
    """The modules of these tensors in the order of their names; ValueError for what is no factor and no alpha."""
    sides: dict[str, dict[str, str]] = {}
    alphas: dict[str, str] = {}
    for name in sorted(names):
        if factor := FACTOR.match(name):
            side = "down" if (factor["one"] or factor["two"]) in ("A", "down") else "up"
            found = sides.setdefault(re.sub(r"(A|B|down|up)$", "", name[: factor.end("end")]), {"module": factor["module"]})
            if side in found:
                raise ValueError(f"holds two factors of one place, {found[side]} and {name}; one adapter is read")
            found[side] = name
        elif alpha := ALPHA.match(name):
            alphas[alpha["module"]] = name
        else:
            raise ValueError(f"holds other tensors than a LoRA's factors and alphas, such as {name}")
    pairs = []
    for found in sides.values():
        if len(found) < len(("module", "down", "up")):
            raise ValueError(f"holds other tensors than a LoRA's pairs: one factor of {found['module']} without the other")
        pairs.append(Pair(**found, alpha=alphas.get(found["module"])))
    if loose := sorted(alphas.keys() - {pair.module for pair in pairs}):
        raise ValueError(f"holds {alphas[loose[0]]}, and no factors of that module")
    return pairs


def peelings(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """The names, and again after each known prefix that all of them have is taken off."""
    yield names
    while found := next((prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in names)), None):
        names = [name.removeprefix(found) for name in names]
        yield names


def fitted(modules: Sequence[str], own: Collection[str]) -> list[str] | None:
    """The names in a model with modules `own` of those in a file, which may have underscores for dots; None if some have none.
    Numbers are not compared: the model may have fewer blocks, as those of plans do."""
    patterns = {_numbered(name)[0] for name in own}
    flat = {pattern.replace(".", "_"): pattern for pattern in patterns}
    found = []
    for module in modules:
        pattern, numbers = _numbered(module)
        if pattern in patterns:
            found.append(module)
        elif pattern in flat:
            name = flat[pattern]
            for number in numbers:
                name = name.replace("#", number, 1)
            found.append(name)
        else:
            return None
    return found if len(set(found)) == len(found) else None


def _numbered(name: str) -> tuple[str, list[str]]:
    """A name with # for its numbers, and these."""
    return re.sub(r"\d+", "#", name), re.findall(r"\d+", name)
