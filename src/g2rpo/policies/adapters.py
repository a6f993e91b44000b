"""LoRA files as plain matrices: this package's own and, by diffusers' converters, those of other trainers."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import (
    Tensor,
    bfloat16,
    cat,
    equal,
    finfo,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    float64,
    full,
    nn,
    ones,
    tensor,
)  # fmt: skip

from g2rpo.core.errors import UserError, loading
from g2rpo.core.files import add_metadata, refuse_pointer
from g2rpo.core.plain import parse_as, read_as
from g2rpo.policies.adapter_names import PEFT, Pair, fitted, names_adapter, pairs_in, peelings, plain, refuse_others
from g2rpo.policies.peft_config import PeftConfig

PREFIX, DOWN, UP = "transformer.", ".lora_A.weight", ".lora_B.weight"
CONFIG = "lora_adapter_metadata"
"""Where diffusers keeps peft's config, as JSON, in the header."""
RANK, ALPHA_KEY, OWN_ALPHA = f"{PREFIX}r", f"{PREFIX}lora_alpha", "g2rpo.lora_alpha"
ABOVE_KEY = "g2rpo.lora_above"
"""Of an adapter that was trained to act at early steps alone, the sigma above which it acts (`policy.lora_above`)."""
PEFT_CONFIG = "adapter_config.json"
"""What lies beside the files that peft writes."""
FLOATS = (float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2)
"""The types of factors. Those of 8 bits are converted exactly; scales beside them are refused by their names."""


@dataclass(frozen=True)
class Adapter:
    """The change up @ down that a LoRA adds to the weights W [out, in, ...] of a transformer.

    `layers` has (down [rank, in, ...], up [out, rank, ...]) in float32 by a module's name in diffusers, with the factor
    alpha / rank multiplied into up; `scale` is that factor, 1 if modules differ. `metadata` is the file's header.

    ValueError for what is no such change: no layer, a rank of 0, shapes that do not match, or numbers that are not finite in
    float32.
    """

    layers: Mapping[str, tuple[Tensor, Tensor]]
    metadata: Mapping[str, str] = field(default_factory=dict)
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("holds no factors of a LoRA")
        check_scale("alpha / rank", self.scale)
        for module, (down, up) in self.layers.items():
            whole = min(down.ndim, up.ndim) >= 2 and min(*down.shape, *up.shape) > 0 and down.ndim == up.ndim
            if not whole or down.shape[0] != up.shape[1] or max(up.shape[2:], default=1) > 1:
                found = f"{list(down.shape)} and {list(up.shape)}"
                raise ValueError(f"{module}: should be [rank, in] and [out, rank] of one rank above 0, is {found}")
            if not (down.isfinite().all() and up.isfinite().all()):
                raise ValueError(f"{module}: has values that are not finite in float32 (NaN, infinity or too large)")

    @property
    def rank(self) -> int:
        """The largest of a module."""
        return max(len(down) for down, _ in self.layers.values())

    @property
    def above(self) -> float:
        """The sigma above which it acts; 0: everywhere."""
        return float(self.metadata.get(ABOVE_KEY, 0))

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


def check_scale(what: str, value: float) -> None:
    """ValueError for a factor of weights that is not above 0, or has no float32."""
    if not finfo(float32).tiny <= value <= finfo(float32).max:
        raise ValueError(f"{what} is {value:g}; it should be above 0 and a number of float32")


def read_adapter(path: Path, pipeline: Any = None, transformer: nn.Module | None = None) -> Adapter:
    """The adapter in a safetensors file with the names of diffusers or peft, or with those that the LoRA loader of `pipeline`,
    a class of diffusers, converts. Known prefixes are taken off where all names then fit `transformer`.

    UserError for a file that is no LoRA of a transformer, for one whose scale or base is another than it says, and for names
    that do not fit.
    """
    refuse_pointer(path)
    with loading(f"{path}: cannot be read"):
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
        tensors = load_file(path)
    with loading(str(path)):
        refuse_others(tensors.keys())
        header = parse_as(_Header, json.dumps(metadata))
        config = _config_of(path, tensors.keys(), header)
        tensors = {plain(name): value for name, value in tensors.items()}
        pairs = pairs_in(tensors.keys())
        read = Adapter({pair.down: (_float32(tensors, pair.down), _float32(tensors, pair.up)) for pair in pairs})
        scales = {pair.down: _scale_of(pair, len(read.layers[pair.down][0]), tensors, config) for pair in pairs}
        scaled = Adapter({name: (down, up * scales[name]) for name, (down, up) in read.layers.items()})
        scale = scales[pairs[0].down] if len(set(scales.values())) == 1 else 1.0
        folded = {key: value for key, value in metadata.items() if key != CONFIG}
        if RANK in header.config:
            folded[CONFIG] = json.dumps({**header.config, ALPHA_KEY: header.config[RANK]}, indent=2, sort_keys=True)
        return Adapter(_named(path, pairs, scaled, pipeline, transformer), folded, header.own_scale or scale)


class _Header(BaseModel):
    """What is read of the text in a file's header."""

    model_config = ConfigDict(allow_inf_nan=False)

    config: Annotated[Json[dict[str, Any]], Field(alias=CONFIG)] = {}
    own_alpha: Annotated[float | None, Field(alias=OWN_ALPHA, gt=0), BeforeValidator(float)] = None
    own_rank: Annotated[str, Field(alias="ss_network_dim")] = ""
    above: Annotated[float, Field(alias=ABOVE_KEY, ge=0, lt=1), BeforeValidator(float)] = 0.0

    @property
    def own_scale(self) -> float | None:
        """alpha / rank of an adapter of this package, which is multiplied into its weights."""
        return self.own_alpha / int(self.own_rank) if self.own_alpha and self.own_rank.isdigit() else None


def _config_of(path: Path, names: Collection[str], header: _Header) -> PeftConfig | None:
    """peft's config of a file, which is in its header or beside it; None if neither has one. ValueError for a file of peft
    that nothing says the scale of."""
    inside = {key.removeprefix(PREFIX): value for key, value in header.config.items() if key.startswith(PREFIX)}
    if inside:
        try:
            return parse_as(PeftConfig, json.dumps(inside))
        except ValueError as error:
            raise ValueError(f"its header: {error}") from None
    beside, wrapped = path.with_name(PEFT_CONFIG), any(PEFT in name for name in names)
    if (wrapped or any(names_adapter(name) for name in names)) and beside.is_file():
        return read_as(PeftConfig, beside)
    if wrapped and not any(name.endswith("alpha") for name in names):
        raise ValueError(f"is peft's, whose scale, lora_alpha / r, is in {PEFT_CONFIG}; put that file beside it")
    return None


def _float32(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A factor in float32, which has all values of the smaller types; ValueError for numbers of another kind."""
    if tensors[name].dtype not in FLOATS:
        kind = str(tensors[name].dtype).removeprefix("torch.")
        raise ValueError(f"{name}: has numbers of the type {kind}; factors are floating-point numbers of 8 to 64 bits")
    return tensors[name].float()


def _scale_of(pair: Pair, rank: int, tensors: Mapping[str, Tensor], config: PeftConfig | None) -> float:
    """alpha / rank of a module; 1, as for diffusers, where a file does not say it."""
    if config is not None and config.r != rank:
        raise ValueError(f"{pair.down}: has rank {rank}, but r={config.r} in the config of peft")
    if config is not None and pair.alpha is not None:
        raise ValueError(f"has alpha twice, in the config of peft and as {pair.alpha}")
    if pair.alpha is None:
        return 1.0 if config is None else config.scale
    if tensors[pair.alpha].numel() != 1:
        raise ValueError(f"{pair.alpha}: should be one number, has the shape {list(tensors[pair.alpha].shape)}")
    scale = float(tensors[pair.alpha]) / rank
    check_scale(f"{pair.alpha} / rank", scale)
    return scale


def _named(
    path: Path, pairs: Sequence[Pair], adapter: Adapter, pipeline: Any, transformer: nn.Module | None
) -> Mapping[str, tuple[Tensor, Tensor]]:
    """The factors, which `adapter` has by the names of the first, by a module's name in diffusers."""
    layers, modules = list(adapter.layers.values()), [pair.module for pair in pairs]
    if transformer is None and (pipeline is None or all(module.startswith((PREFIX, PEFT)) for module in modules)):
        return dict(zip((module.removeprefix(PEFT).removeprefix(PREFIX) for module in modules), layers, strict=True))
    own = None if transformer is None else _shapes(transformer)
    for peeled in peelings(modules):
        if own is not None and (found := fitted(peeled, own)) is not None:
            return dict(zip(found, layers, strict=True))
    converted, why = _converted(pairs, adapter, pipeline, own)
    if converted is None and transformer is not None:
        check_fit(str(path), Adapter(dict(zip(peeled, layers, strict=True))), transformer, why)
    if converted is None:
        first = ", ".join(pair.down for pair in pairs[:2])
        raise ValueError(
            f"is in no format that diffusers reads for a {_name_of(pipeline)} (its first names are {first}). {why}"
        )
    return converted


def _converted(
    pairs: Sequence[Pair], adapter: Adapter, pipeline: Any, own: Mapping[str, Any] | None
) -> tuple[Mapping[str, tuple[Tensor, Tensor]] | None, str]:
    """The factors by diffusers' names, by the converters of a pipeline's own LoRA loader; None if these do not read all of the
    names, with or without prefixes, and what they say of the names as they are."""
    if not hasattr(pipeline, "lora_state_dict"):
        return None, ""
    written = [name for pair in pairs for name in (pair.down, pair.up, pair.alpha) if name is not None]
    candidates = list(peelings(written))
    candidates.append([f"diffusion_model.{name}" for name in candidates[-1]])
    said = []
    for names in candidates:
        renamed = dict(zip(written, names, strict=True))
        tensors: dict[str, Tensor] = {}
        marked: dict[str, Tensor] = {}
        for mark, pair in enumerate(pairs, 1):
            down, up = adapter.layers[pair.down]
            tensors |= {renamed[pair.down]: down, renamed[pair.up]: up}
            marked |= {renamed[pair.down]: full((), float(mark)).expand(down.shape), renamed[pair.up]: ones(up.shape)}
            if pair.alpha is not None:  # multiplied in already: converters spread it over both factors, and none hang then
                alpha = tensor(float(len(down)))
                tensors[renamed[pair.alpha]] = marked[renamed[pair.alpha]] = alpha
        try:
            found, seen = (_by_converter(file, pipeline) for file in (tensors, marked))
        except Exception as error:  # whatever a converter meets in files that are not its own
            said.append("diffusers says: " + " ".join(str(error).split())[:200])
            continue
        kept = {float(value) for down, _ in seen.values() for value in down.flatten(1)[:, 0]}
        left = [pair.down for mark, pair in enumerate(pairs, 1) if mark not in kept]
        if not left and (own is None or fitted([*found], own) is not None):
            return found, ""
        said.append(f"diffusers leaves {left[0]} out" if left else "")
    return None, said[0]


def _by_converter(tensors: Mapping[str, Tensor], pipeline: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """What a pipeline's LoRA loader makes of a file."""
    alphas: dict[str, Any] = {}
    if "return_alphas" in inspect.signature(pipeline.lora_state_dict).parameters:
        found, alphas = pipeline.lora_state_dict(dict(tensors), return_alphas=True)
    else:
        found = pipeline.lora_state_dict(dict(tensors))
    # diffusers' kohya converter of FLUX leaves the prefix of some modules out
    named = {name.removeprefix(PREFIX): value for name, value in {**found, **(alphas or {})}.items()}
    last, original = f"norm_out.linear{UP}", re.compile(r"final_layer.adaLN_modulation.1.lora_(B|up)")
    if last in named and any(equal(named[last], value) for name, value in tensors.items() if original.search(name)):
        named[last] = cat(named[last].chunk(2)[::-1])  # diffusers' converter of FLUX.2 leaves the shift before the scale
    layers = {}
    for pair in pairs_in(named.keys()):
        down, up = named[pair.down], named[pair.up]
        if (used := up.any(0)).any() and len(down) == len(used):  # of a joint matrix, its own rows alone
            down, up = down[used], up[:, used]
        layers[pair.module] = (down, up)
    return layers


def _name_of(pipeline: Any) -> str:
    return getattr(pipeline, "__name__", "model without a class of diffusers")


def _shapes(transformer: nn.Module) -> dict[str, list[int]]:
    """The shapes of the weights that an adapter can change, by module."""
    own: dict[str, list[int]] = {}
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and "lora_" not in name:  # quantised weights are no parameters
            own[name.removesuffix(".base_layer")] = [module.out_features, module.in_features]
        elif isinstance(weight := module._parameters.get("weight"), Tensor) and weight.ndim > 1:
            own.setdefault(name, list(weight.shape))
    return own


def check_fit(place: str, adapter: Adapter, transformer: nn.Module, why: str = "") -> None:
    """UserError, which ends with `why`, for an adapter of another transformer."""
    own = _shapes(transformer)
    sizes = {module: [len(up), *down.shape[1:]] for module, (down, up) in adapter.layers.items()}
    absent, kind = [module for module in sizes if module not in own], type(transformer).__name__
    other = [f"{module} {size} (the model: {own[module]})" for module, size in sizes.items() if own.get(module, size) != size]
    if not absent and not other:
        return
    counted = [f"{len(absent)} are not in it, such as {', '.join(absent[:2])}"] if absent else []
    counted += [f"{len(other)} have another shape, such as {', '.join(other[:2])}"] if other else []
    near = f" The model has {', '.join(get_close_matches(absent[0], own, 2, cutoff=0))}, ..." if absent else ""
    others = f"of its {len(sizes)} modules {'; '.join(counted)}.{near} {why}".rstrip()
    raise UserError(f"{place}: is for another model than this {kind}: {others}")


def endings(modules: Collection[str], names: Iterable[str]) -> list[str]:
    """The shortest endings, as `policy.lora_targets` has them, that fit these modules and no others of `names`; a module whose
    whole name is an ending of others brings these along."""

    def tails(name: str) -> list[str]:
        parts = name.split(".")
        return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]

    every, mine = (Counter(tail for name in of for tail in tails(name)) for of in (names, modules))
    return sorted({next((tail for tail in tails(m) if every[tail] == mine[tail]), m) for m in modules})
