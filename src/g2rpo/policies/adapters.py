"""LoRA files as plain matrices: this package's own and, by diffusers' converters, those of other trainers."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, cat, equal, nn, tensor

from g2rpo.core.errors import UserError, did_you_mean, loading
from g2rpo.core.files import add_metadata
from g2rpo.core.plain import parse_json, read_text

PREFIX, DOWN, UP = "transformer.", ".lora_A.weight", ".lora_B.weight"
CONFIG = "lora_adapter_metadata"
"""Where diffusers keeps peft's config, as JSON, in the header."""
RANK, ALPHA, OWN_ALPHA = f"{PREFIX}r", f"{PREFIX}lora_alpha", "g2rpo.lora_alpha"
ABOVE = "g2rpo.lora_above"
"""Of an adapter that was trained to act at early steps alone, the sigma above which it acts (`policy.lora_above`)."""
PEFT, PEFT_CONFIG = "base_model.model.", "adapter_config.json"
"""The prefix of names in peft's own files, and what lies beside these."""
OTHER_KINDS = {
    **{"lokr_": "LoKr", "hada_": "LoHa", "dora_scale": "DoRA", "magnitude_vector": "DoRA", "lora_mid": "LoCon"},
    ".diff": "LoRA with whole weights beside",
}
TEXT = ("lora_te", "text_encoder", "text_model")
OTHERS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern")
"""Settings of peft that are not supported."""


@dataclass(frozen=True)
class Adapter:
    """The change up @ down that a LoRA adds to the weights W [out, in, ...] of a transformer.

    `layers` has (down [rank, in, ...], up [out, rank, ...]) in float32 by a module's name in diffusers, with the factor
    alpha / rank multiplied into up; `scale` is that factor, 1 if modules differ. `metadata` is the file's header.
    """

    layers: Mapping[str, tuple[Tensor, Tensor]]
    metadata: Mapping[str, str] = field(default_factory=dict)
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """The largest of a module."""
        return max(len(down) for down, _ in self.layers.values())

    @property
    def above(self) -> float:
        """The sigma above which it acts; 0: everywhere."""
        return float(self.metadata.get(ABOVE, 0))

    def delta(self, module: str) -> Tensor:
        """What is added to a module's weight, as a matrix [out, in]."""
        down, up = self.layers[module]
        return up.flatten(1) @ down.flatten(1)

    def of(self, transformer: nn.Module) -> Adapter | None:
        """The part of it for the modules that are there; None if there is none."""
        there = {name for name, _ in transformer.named_modules()}
        layers = {module: pair for module, pair in self.layers.items() if module in there}
        return Adapter(layers, self.metadata, self.scale) if layers else None

    def plus(self, other: Adapter, sign: float = 1.0) -> Adapter:
        """The sum of the changes (sign -1: their difference), exactly: with the factors side by side, so that ranks add up."""
        layers = dict(self.layers)
        for module, (down, up) in other.layers.items():
            mine = layers.get(module)
            layers[module] = (cat([mine[0], down]), cat([mine[1], sign * up], 1)) if mine else (down, sign * up)
        both = Adapter(layers, {key: text for key, text in self.metadata.items() if key not in (CONFIG, OWN_ALPHA)})
        size = {key: str(both.rank) for key in ("ss_network_dim", "ss_network_alpha") if key in self.metadata}
        return Adapter(layers, {**both.metadata, **size})

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """The factors by diffusers' endings, after `prefix`."""
        return {f"{prefix}{m}{end}": v for m, pair in self.layers.items() for end, v in zip((DOWN, UP), pair, strict=True)}

    def write(self, path: Path, prefix: str = "") -> None:
        """Writes the file; its bytes depend on nothing but matrices and text."""
        write_tensors(path, self.tensors(prefix), self.metadata)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes tensors in the order of their names."""
    save_file({name: value.contiguous() for name, value in sorted(tensors.items())}, path)
    add_metadata(path, {"format": "pt", **metadata})


def read_adapter(path: Path, pipeline: Any = None) -> Adapter:
    """The adapter in a safetensors file with the names of diffusers or peft, or with those that the LoRA loader of `pipeline`,
    a class of diffusers, converts. UserError for a file that is no LoRA of a transformer."""
    with loading(f"{path}: cannot be read"):
        with safe_open(path, "pt") as file:
            metadata, names = dict(file.metadata() or {}), list(file.keys())
        _check_names(path, names)
        tensors = load_file(path)
        config = json.loads(metadata.get(CONFIG, "{}"))
        factor = scale = _scale(config)
        beside, plain = path.with_name(PEFT_CONFIG), all(name.startswith(PREFIX) for name in names)
        if all(name.startswith(PEFT) for name in names) and beside.is_file():
            tensors, plain = {name.removeprefix(PEFT): value for name, value in tensors.items()}, True
            factor = scale = _peft_scale(beside)
        elif (common := _common_scale(tensors)) is not None:  # multiplied in here: converters spread it over both factors
            factor = scale = common
            tensors |= {name: tensor(float(rank)) for name, rank in _ranks(tensors, ".alpha").items()}
        if OWN_ALPHA in metadata and metadata.get("ss_network_dim", "").isdigit():
            scale = float(metadata[OWN_ALPHA]) / int(metadata["ss_network_dim"])
        if not 0 <= float(metadata.get(ABOVE, 0)) < 1:
            raise ValueError(f"{ABOVE} in its header should be a sigma, is {metadata[ABOVE]:.20}")
    if pipeline is not None and not plain:
        tensors = _converted(path, tensors, pipeline)
    modules = sorted({name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)})
    alphas = {module: tensors.pop(f"{module}.alpha", None) for module in modules}
    if not modules or tensors.keys() != {module + end for module in modules for end in (DOWN, UP)}:
        others = sorted(tensors.keys() - {module + end for module in modules for end in (DOWN, UP)})
        such = f", such as {', '.join(others[:2])}" if others else ""
        raise UserError(f"{path}: holds other tensors than a LoRA's, {DOWN[1:]} and {UP[1:]} of each module{such}")
    layers = {}
    for module in modules:
        down, up, alpha = tensors[module + DOWN], tensors[module + UP], alphas[module]
        _check_factors(f"{path}: {module}", down, up)
        by = factor * (1 if alpha is None else float(alpha) / len(down))
        layers[module.removeprefix(PREFIX)] = (down.float(), up.float() * by)
    folded = {CONFIG: json.dumps({**config, ALPHA: config[RANK]}, indent=2, sort_keys=True)} if RANK in config else {}
    return Adapter(layers, {**metadata, **folded}, scale)


def _check_names(path: Path, names: Collection[str]) -> None:
    """UserError for tensors that are no LoRA of a transformer alone."""
    for word, kind in OTHER_KINDS.items():
        if found := [name for name in names if word in name]:
            raise UserError(f"{path}: is a {kind} ({found[0]}), which is not supported; a plain LoRA is")
    if names and not any("lora" in name for name in names):
        raise UserError(
            f"{path}: holds no LoRA but other weights, such as {min(names)}; a merged model is no adapter: its diffusers "
            "folder goes into policy.path"
        )
    if found := [name for name in names if any(word in name for word in TEXT)]:
        raise UserError(
            f"{path}: changes text encoders too ({len(found)} of {len(names)} tensors, such as {found[0]}); only adapters of "
            "the transformer alone are continued"
        )


def _scale(config: Any) -> float:
    """alpha / rank, which is 1 except in files of earlier versions; ValueError for another header than diffusers writes."""
    if not isinstance(config, dict):
        raise ValueError(f"its {CONFIG} should be an object, is {config!r:.80}")
    _refuse_others("its header", {key: config.get(PREFIX + key) for key in OTHERS})
    alpha = config.get(ALPHA, 1)
    rank = config.get(RANK, alpha)
    if not all(isinstance(each, int | float) and 0 < each < math.inf for each in (alpha, rank)):
        raise ValueError(f"its {CONFIG} should have numbers above 0 as {RANK} and {ALPHA}, has {rank!r:.40} and {alpha!r:.40}")
    return alpha / rank


def _refuse_others(place: str, config: Mapping[str, Any]) -> None:
    """UserError for what makes modules differ in more than their factors."""
    if odd := [key for key in OTHERS if config.get(key)]:
        raise UserError(f"{place}: has {odd[0]}, which is not supported; a LoRA of one rank and alpha is")


def _peft_scale(file: Path) -> float:
    """alpha / rank of the config that peft writes beside its tensors."""
    with loading(f"{file}: cannot be read"):
        config = parse_json(read_text(file))
        _refuse_others(str(file), config)
        return _scale({RANK: config["r"], ALPHA: config["lora_alpha"]})


def _ranks(tensors: Mapping[str, Tensor], end: str) -> dict[str, int]:
    """The ranks of a file's modules by their names and an ending."""
    downs = {name: value for name, value in tensors.items() if "lora_down" in name or "lora_A" in name}
    return {name.rpartition(".lora")[0] + end: len(value) for name, value in downs.items() if value.ndim}


def _common_scale(tensors: Mapping[str, Tensor]) -> float | None:
    """alpha / rank of a file that has alphas as tensors, if it is the same for all modules; else None."""
    ranks = _ranks(tensors, ".alpha")
    scales = {float(tensors[name]) / rank if name in tensors else None for name, rank in ranks.items()}
    return scales.pop() if len(scales) == 1 else None


def _converted(path: Path, tensors: Mapping[str, Tensor], pipeline: Any) -> dict[str, Tensor]:
    """The tensors with diffusers' names, by the converters of a pipeline's own LoRA loader."""
    unknown = f"{path}: is in no format that diffusers reads for a {pipeline.__name__} (its first key is {min(tensors)})"
    if not hasattr(pipeline, "lora_state_dict"):
        return dict(tensors)
    alphas: dict[str, Any] = {}
    with loading(unknown):
        if "return_alphas" in inspect.signature(pipeline.lora_state_dict).parameters:
            found, alphas = pipeline.lora_state_dict(dict(tensors), return_alphas=True)
        else:
            found = pipeline.lora_state_dict(dict(tensors))
    # diffusers' kohya converter of FLUX leaves the prefix of some modules out
    whole = {**found, **(alphas or {})}
    named = {name if name.startswith(PREFIX) else PREFIX + name: value for name, value in whole.items()}
    if not any(name.endswith(DOWN) for name in named):
        raise UserError(unknown)
    last, original = f"{PREFIX}norm_out.linear{UP}", re.compile(r"final_layer.adaLN_modulation.1.lora_(B|up)")
    if last in named and any(equal(named[last], value) for name, value in tensors.items() if original.search(name)):
        named[last] = cat(named[last].chunk(2)[::-1])  # diffusers' converter of FLUX.2 leaves the shift before the scale
    for module in {name.removesuffix(UP) for name in named if name.endswith(UP)}:  # of a joint matrix, its own rows alone
        if (used := named[module + UP].any(0)).any() and len(named.get(module + DOWN, ())) == len(used):
            named[module + UP], named[module + DOWN] = named[module + UP][:, used], named[module + DOWN][used]
    return named


def _check_factors(place: str, down: Tensor, up: Tensor) -> None:
    """UserError if the two are no factors [rank, in, ...] and [out, rank, ...] of one matrix, or not finite."""
    if min(down.ndim, up.ndim) < 2 or down.shape[0] != up.shape[1]:
        raise UserError(
            f"{place}: should be matrices [rank, in] and [out, rank] of one rank, is {list(down.shape)} and {list(up.shape)}"
        )
    if not (down.isfinite().all() and up.isfinite().all()):
        raise UserError(f"{place}: has values that are not finite (NaN or infinity)")


def check_fit(place: str, adapter: Adapter, transformer: nn.Module) -> None:
    """UserError for an adapter of another transformer."""
    own: dict[str, list[int]] = {}
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and "lora_" not in name:  # quantised weights are no parameters
            own[name.removesuffix(".base_layer")] = [module.out_features, module.in_features]
        elif isinstance(weight := module._parameters.get("weight"), Tensor) and weight.ndim > 1:
            own.setdefault(name, list(weight.shape))
    sizes = {module: [len(up), *down.shape[1:]] for module, (down, up) in adapter.layers.items()}
    absent, kind = [module for module in sizes if module not in own], type(transformer).__name__
    other = [f"{module} {size} (the model: {own[module]})" for module, size in sizes.items() if own.get(module, size) != size]
    if not absent and not other:
        return
    counted = [f"{len(absent)} are not in it, such as {', '.join(absent[:2])}"] if absent else []
    counted += [f"{len(other)} have another shape, such as {', '.join(other[:2])}"] if other else []
    near = did_you_mean(absent[0], own) or f" The model has {', '.join(list(own)[:2])}, ..." if absent else ""
    raise UserError(f"{place}: is for another model than this {kind}: of its {len(sizes)} modules {'; '.join(counted)}.{near}")


def endings(modules: Collection[str], names: Iterable[str]) -> list[str]:
    """The shortest endings, as `policy.lora_targets` has them, that fit these modules and no others of `names`; a module whose
    whole name is an ending of others brings these along."""

    def tails(name: str) -> list[str]:
        parts = name.split(".")
        return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]

    every, mine = (Counter(tail for name in of for tail in tails(name)) for of in (names, modules))
    return sorted({next((tail for tail in tails(m) if every[tail] == mine[tail]), m) for m in modules})
