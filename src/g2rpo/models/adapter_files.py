"""LoRA files, read as plain matrices: this package's own and, by diffusers' converters, those of
other trainers."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    model_validator,
)
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from g2rpo.core.errors import loading, shown
from g2rpo.core.files import refuse_pointer
from g2rpo.core.plain import parse_as, read_as
from g2rpo.models.adapter_names import (
    PEFT,
    Pair,
    adapters_in,
    by_original_names,
    common_peelings,
    in_model,
    own_rows,
    pairs_in,
    patterns_of,
    refuse_others,
    unwrapped,
)
from g2rpo.models.adapters import (
    ABOVE_KEY,
    CONFIG,
    OWN_ALPHA,
    PREFIX,
    UP,
    Adapter,
    Factors,
    check_fit,
    check_scale,
    shapes_in,
)
from g2rpo.models.comfyui import ComfyUI

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files that peft writes."""
FLOATS = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
)
"""The types of factors. Those of 8 bits are converted exactly; scales beside them are refused by
their names."""


def read_adapter(
    path: Path,
    pipeline: Any = None,
    transformer: nn.Module | None = None,
    names: ComfyUI | None = None,
) -> Adapter:
    """The adapter in a safetensors file with the names of diffusers or peft. For a `transformer`
    known prefixes are taken off where the names then fit it, and it may have those that the LoRA
    loader of `pipeline`, a class of diffusers, converts, or other programs' `names` (None: those
    that are known).

    UserError for a file that is no LoRA of a transformer, for one whose scale or base is another
    than it says, and for names that do not fit.
    """
    with loading(f"{path}: cannot be read"):
        refuse_pointer(path)
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
        tensors = load_file(path)
    with loading(str(path)):
        refuse_others(tensors.keys())
        header = parse_as(_Header, json.dumps(metadata))
        config = _peft_config_of(path, tensors.keys(), header)
        tensors = unwrapped(tensors)
        pairs = pairs_in(tensors.keys())
        read = Adapter(
            {
                pair.down: (_float32(tensors, pair.down), _float32(tensors, pair.up))
                for pair in pairs
            }
        ).layers
        scales = {
            pair.down: _scale_of(pair, len(read[pair.down][0]), tensors, config) for pair in pairs
        }
        scaled = Adapter({name: (down, up * scales[name]) for name, (down, up) in read.items()})
        factors = list(scaled.layers.values())
        if transformer is None:
            modules = (pair.module.removeprefix(PEFT).removeprefix(PREFIX) for pair in pairs)
            layers: Mapping[str, Factors] = dict(zip(modules, factors, strict=True))
        else:
            layers = _with_own_names(path, pairs, factors, pipeline, transformer, names)
        distinct = {*scales.values()}
        if distinct != {1.0}:  # the config says a scale that is now in the weights
            metadata.pop(CONFIG, None)
        scale = distinct.pop() if len(distinct) == 1 else 1.0
        return Adapter(layers, metadata, header.own_scale or scale)


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
        return (
            self.own_alpha / int(self.own_rank)
            if self.own_alpha and self.own_rank.isdigit()
            else None
        )

    @property
    def peft(self) -> dict[str, Any]:
        """peft's config of the transformer, as diffusers' pipelines write it, or its models, which
        use no prefix; {}: none."""
        of_pipeline = {
            key.removeprefix(PREFIX): value
            for key, value in self.config.items()
            if key.startswith(PREFIX)
        }
        return of_pipeline or (self.config if "r" in self.config else {})


def _peft_config_of(path: Path, names: Collection[str], header: _Header) -> PeftConfig | None:
    """peft's config of a file, which is in its header or beside it; None if neither has one.
    ValueError for a file of peft that nothing says the scale of."""
    if header.peft:
        try:
            return parse_as(PeftConfig, json.dumps(header.peft))
        except ValueError as error:
            raise ValueError(f"its header: {error}") from None
    beside, wrapped = path.with_name(PEFT_CONFIG), any(PEFT in name for name in names)
    if (wrapped or path.name == PEFT_WEIGHTS or adapters_in(names) != {""}) and beside.is_file():
        return read_as(PeftConfig, beside)
    if wrapped and not any(name.endswith("alpha") for name in names):
        raise ValueError(
            f"is peft's, whose scale, lora_alpha / r, is in {PEFT_CONFIG}; put that file beside it"
        )
    return None


def _float32(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A factor in float32, which has all values of the smaller types; ValueError for numbers of
    another kind."""
    if tensors[name].dtype not in FLOATS:
        said = (
            f"{name}: has numbers of the type {tensors[name].dtype}; factors are read of {FLOATS}"
        )
        raise ValueError(said.replace("torch.", ""))
    return tensors[name].float()


def _scale_of(
    pair: Pair, rank: int, tensors: Mapping[str, Tensor], config: PeftConfig | None
) -> float:
    """alpha / rank of a module; 1, as for diffusers, where a file does not say it."""
    if config is not None:
        if pair.alpha is not None:
            raise ValueError(f"has alpha twice, in the config of peft and as {pair.alpha}")
        scale, said = config.scale(pair, rank), f"{pair.down}: lora_alpha / r"
    elif pair.alpha is None:
        return 1.0
    elif tensors[pair.alpha].numel() != 1:
        raise ValueError(
            f"{pair.alpha}: should be one number, has the shape {list(tensors[pair.alpha].shape)}"
        )
    else:
        scale, said = float(tensors[pair.alpha]) / rank, f"{pair.alpha} / rank"
    check_scale(said, scale)
    return scale


def _with_own_names(
    path: Path,
    pairs: Sequence[Pair],
    layers: Sequence[Factors],
    pipeline: Any,
    transformer: nn.Module,
    others: ComfyUI | None,
) -> Mapping[str, Factors]:
    """The factors of these pairs by the names of the transformer's modules; UserError if these are
    not found."""
    modules, own = [pair.module for pair in pairs], patterns_of(shapes_in(transformer))
    found = [in_model(module, own) for module in modules]
    if None not in found:
        for name, count in Counter(found).items():
            if count > 1:
                raise ValueError(
                    f"holds two adapters of {name}, under different prefixes; one is read"
                )
        return dict(zip(map(str, found), layers, strict=True))
    converted, why = _converted(pairs, layers, pipeline, own)
    if converted is None:
        converted = by_original_names(modules, layers, transformer, others)
    if converted is None:
        names = [name or module for name, module in zip(found, modules, strict=True)]
        converted = dict(zip(names, layers, strict=True))
        check_fit(str(path), Adapter(converted), transformer, why)
    return converted


def _converted(
    pairs: Sequence[Pair], layers: Sequence[Factors], pipeline: Any, own: Mapping[str, str]
) -> tuple[Mapping[str, Factors] | None, str]:
    """The factors by diffusers' names, by the converters of a pipeline's own LoRA loader; None if
    these do not read all of the names, with or without prefixes, and what they say of the names as
    they are."""
    if not hasattr(pipeline, "lora_state_dict"):
        return None, ""
    written = [
        name for pair in pairs for name in (pair.down, pair.up, pair.alpha) if name is not None
    ]
    candidates = list(common_peelings(written))
    candidates.append([f"diffusion_model.{name}" for name in candidates[-1]])
    marks = [
        (torch.full(down.shape, float(mark)), torch.ones(up.shape))  # some write into them
        for mark, (down, up) in enumerate(layers, 1)
    ]
    said = []
    for names in candidates:
        renamed = dict(zip(written, names, strict=True))
        try:
            found, seen = (
                _by_converter(_as_in_file(pairs, each, renamed), pipeline)
                for each in (layers, marks)
            )
        except Exception as error:  # whatever a converter meets in files that are not its own
            said.append("diffusers says: " + " ".join(str(error).split())[:200])
            continue
        kept = {float(value) for down, _ in seen.values() for value in down.flatten(1)[:, 0]}
        left = [pair.down for mark, pair in enumerate(pairs, 1) if mark not in kept]
        if not left and all(in_model(name, own) == name for name in found):
            return found, ""
        said.append(f"diffusers leaves {left[0]} out" if left else "")
    return None, said[0]


def _as_in_file(
    pairs: Sequence[Pair], layers: Sequence[Factors], renamed: Mapping[str, str]
) -> dict[str, Tensor]:
    """The tensors of a file with these factors. Of an alpha, which is multiplied in already, the
    value that changes nothing: converters spread it over both factors, and hang on some others."""
    tensors: dict[str, Tensor] = {}
    for pair, (down, up) in zip(pairs, layers, strict=True):
        tensors |= {renamed[pair.down]: down, renamed[pair.up]: up}
        if pair.alpha is not None:
            tensors[renamed[pair.alpha]] = torch.tensor(float(len(down)))
    return tensors


def _by_converter(tensors: Mapping[str, Tensor], pipeline: Any) -> dict[str, Factors]:
    """What a pipeline's LoRA loader makes of a file."""
    alphas: dict[str, Any] = {}
    if "return_alphas" in inspect.signature(pipeline.lora_state_dict).parameters:
        found, alphas = pipeline.lora_state_dict(dict(tensors), return_alphas=True)
    else:
        found = pipeline.lora_state_dict(dict(tensors))
    # diffusers' kohya converter of FLUX leaves the prefix of some modules out
    named = {
        name.removeprefix(PREFIX): value for name, value in {**found, **(alphas or {})}.items()
    }
    last, original = (
        f"norm_out.linear{UP}",
        re.compile(r"final_layer.adaLN_modulation.1.lora_(B|up)"),
    )
    if last in named and any(
        torch.equal(named[last], value) for name, value in tensors.items() if original.search(name)
    ):
        # diffusers' converter of FLUX.2 leaves the shift before the scale
        named[last] = torch.cat(named[last].chunk(2)[::-1])
    layers = {}
    for pair in pairs_in(named.keys()):
        layers[pair.module] = own_rows(named[pair.down], named[pair.up])
    return layers


# --- peft's config: what of it says how an adapter acts, and what may be ignored

HARMLESS: Mapping[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(
        (
            "task_type",
            "auto_mapping",
            "peft_version",
            "base_model_name_or_path",
            "revision",
            "inference_mode",
        )
    ),
    # the file has the modules
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")),
    # say nothing after training, or without others
    **dict.fromkeys(("lora_dropout", "megatron_core", "qalora_group_size")),
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
"""Settings that leave the change of the weights alone, by name, with the values that do (None:
all). Other initialisations begin elsewhere: PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change the base
weights, EVA divides the ranks anew."""
Rank = Annotated[int, Field(ge=1, le=10**6)]
Alpha = Annotated[float, Field(gt=0)]


def _ending(text: str) -> str:
    """ValueError for an expression with repetitions or choices, which could be matched for ever."""
    if not re.fullmatch(r"\^?[\w.\\]+\$?", text):
        raise ValueError(
            f"{text!r:.80} is a regular expression; only names of modules, or their endings, are read: write one entry "
            "for each module that it means, such as transformer_blocks.0.attn.to_q"
        )
    return text


OfModule = Annotated[str, AfterValidator(_ending)]
"""The ending of a module's name, as an expression."""


class PeftConfig(BaseModel):
    """A LoRA's config. Whatever else it says must be empty or known to be harmless."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    r: Rank
    lora_alpha: Alpha
    rank_pattern: dict[OfModule, Rank] | None = None
    alpha_pattern: dict[OfModule, Alpha] | None = None
    use_rslora: bool | None = None

    @model_validator(mode="after")
    def _is_plain(self) -> PeftConfig:
        for key, value in (self.model_extra or {}).items():
            allowed = HARMLESS.get(key, ())
            if value and allowed is not None and value not in allowed:
                raise ValueError(
                    f"has {key}, which is not supported ({shown(value)}); a plain LoRA is"
                )
        return self

    def scale(self, pair: Pair, rank: int) -> float:
        """alpha / rank of a module, or by rsLoRA (arXiv 2312.03732) alpha / sqrt(rank)."""
        module = pair.module.removeprefix(PEFT).removeprefix(PREFIX)
        expected = _matching(self.rank_pattern, module, self.r)
        if expected != rank:
            raise ValueError(
                f"{pair.down}: has rank {rank}, but r={expected} in the config of peft"
            )
        return _matching(self.alpha_pattern, module, self.lora_alpha) / (
            math.sqrt(rank) if self.use_rslora else rank
        )


def _matching(table: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The entry for a module by the first name, or ending of names, that matches it, as peft looks
    it up."""
    for ending, value in (table or {}).items():
        if re.match(rf"(.*\.)?({ending})$", module):
            return value
    return default
