"""LoRA files, read as plain matrices: this package's own and, by diffusers' converters, those of other trainers."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json, model_validator
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from g2rpo.core.errors import loading
from g2rpo.core.files import refuse_pointer
from g2rpo.core.plain import parse_as, read_as
from g2rpo.policies.adapters import ABOVE_KEY, CONFIG, OWN_ALPHA, PREFIX, UP, Adapter, check_fit, check_scale, shapes_in

RANK = f"{PREFIX}r"
PEFT_CONFIG = "adapter_config.json"
"""What lies beside the files that peft writes."""
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
"""The types of factors. Those of 8 bits are converted exactly; scales beside them are refused by their names."""


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
            folded[CONFIG] = json.dumps({**header.config, f"{PREFIX}lora_alpha": header.config[RANK]}, indent=2, sort_keys=True)
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
    own = None if transformer is None else shapes_in(transformer)
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
            marked |= {
                renamed[pair.down]: torch.full((), float(mark)).expand(down.shape),
                renamed[pair.up]: torch.ones(up.shape),
            }
            if pair.alpha is not None:  # multiplied in already: converters spread it over both factors, and none hang then
                alpha = torch.tensor(float(len(down)))
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
    if last in named and any(torch.equal(named[last], value) for name, value in tensors.items() if original.search(name)):
        named[last] = torch.cat(named[last].chunk(2)[::-1])  # diffusers' converter of FLUX.2 leaves the shift before the scale
    layers = {}
    for pair in pairs_in(named.keys()):
        down, up = named[pair.down], named[pair.up]
        if (used := up.any(0)).any() and len(down) == len(used):  # of a joint matrix, its own rows alone
            down, up = down[used], up[:, used]
        layers[pair.module] = (down, up)
    return layers


def _name_of(pipeline: Any) -> str:
    return getattr(pipeline, "__name__", "model without a class of diffusers")


# --- names of tensors, as trainers, peft and wrappers of modules write them

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


# --- peft's config: what of it says how an adapter acts, and what may be ignored

HARMLESS = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the file has the modules
        "lora_dropout",  # of their training
        *("megatron_core", "qalora_group_size"),  # say nothing without megatron_config and use_qalora
    }
)
"""Settings with which the change of the weights is (alpha / rank) up @ down, whatever their value."""
PLAIN_SETTINGS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),
}
"""The values of other settings with which it is so, beside empty ones. Other initialisations begin elsewhere: PiSSA, OLoRA,
CorDA, LoftQ and LoRA-GA change the base weights, EVA divides the ranks anew."""


class PeftConfig(BaseModel):
    """A LoRA's config. Whatever else it says must be empty or known to be harmless."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    r: Annotated[int, Field(ge=1, le=10**6)]
    lora_alpha: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def _is_plain(self) -> PeftConfig:
        for key, value in (self.model_extra or {}).items():
            if value and key not in HARMLESS and value not in PLAIN_SETTINGS.get(key, ()):
                raise ValueError(f"has {key}, which is not supported ({value!r:.60}); a LoRA of one rank and alpha is")
        return self

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.lora_alpha / self.r
