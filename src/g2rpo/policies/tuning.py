"""Tuning of a diffusers transformer: LoRA or full fine-tuning, and saving the trained weights."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from g2rpo.core.errors import UserError
from g2rpo.core.files import add_metadata, refuse_pointer
from g2rpo.policies.adapters import ABOVE_KEY, DOWN, OWN_ALPHA, PREFIX, UP, Adapter, check_fit, read_adapter
from g2rpo.policies.options import LoraInit
from g2rpo.policies.quantized import Quantize, is_quantized, quantize
from g2rpo.runtime.sharding import Sharded

TuningMode = Literal["lora", "full", "frozen"]

ADAPTER_FILE = "pytorch_lora_weights.safetensors"
"""The file of a saved adapter."""


def check_targets(transformer: nn.Module, targets: Sequence[str]) -> None:
    """UserError for a transformer without linear layers or convolutions of these names, which adapters change."""
    names = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    if not any(name == end or name.endswith(f".{end}") for name in names for end in targets):
        ends = dict.fromkeys(re.sub(r".*\.(?=[a-z])", "", name) for name in names if re.search(r"\.\d+\.", name))
        raise UserError(
            f"policy.lora_targets: no layer of a {type(transformer).__name__} is named {', '.join(targets)[:200]}; "
            f"those of its blocks are {', '.join(ends)[:300]}. Or set policy.tuning=full"
        )


class Tuning:
    """The trained part of `transformer`, a diffusers model.

    "lora" freezes the weights in `dtype` and adds float32 adapters of `rank` to the modules named in `targets`; "full" trains
    all weights as float32 masters, computed in `dtype` under autocast; "frozen" trains nothing and is for sampling. Adapters
    start at zero, so the model is unchanged. `keep_base` keeps a copy of weights that "full" or `load` will change. `active` is
    the transformer to call: the trained one, or the untrained one inside `base`. `sharding` shards the weights that "full"
    trains; all ranks must then call `save`. `quantized` is how frozen weights are stored. Without
    `autocast` adapters compute in the dtype of their inputs.

    With `start` "lora" continues that adapter, "full" begins with it merged in, and "frozen" has it beside its weights; the
    untrained transformer has it too. The `assistant` is frozen and acts while `assisted`, or with `deployed` always. While
    `late`, what was learnt does not act, nor a `start` that acts at early steps alone.
    """

    def __init__(
        self,
        transformer: Any,
        mode: TuningMode,
        *,
        rank: int,
        alpha: float,
        targets: Sequence[str],
        init: LoraInit = "kaiming",
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        keep_base: bool,
        sharding: Sharded | None = None,
        quantized: Quantize = "none",
        autocast: bool = True,
        start: Adapter | None = None,
        assistant: Adapter | None = None,
        deployed: bool = False,
    ) -> None:
        self.transformer = self.active = transformer
        self.mode = mode
        self.own: str | None = "default" if mode == "lora" else None
        self._strength = 1.0
        self._untrained, self._assisted, self._deployed, self._autocast = False, False, deployed, autocast
        self._late, self._early_start = False, start is not None and start.above > 0
        if device.type == "meta":  # a plan's, which may have fewer blocks
            start, assistant = (adapter and adapter.of(transformer) for adapter in (start, assistant))
        for key, adapter in (("adapter", start), ("assistant", assistant)):
            if adapter is not None:
                check_fit(f"policy.{key}", adapter, transformer)
        self._kind = type(transformer)
        self._sharding = sharding
        self._divided: dict[str, nn.Parameter] = {}
        self._keep_base = keep_base
        self._frozen: Any = None
        self._changed = mode == "full"
        if mode == "lora":
            from peft import LoraConfig

            check_targets(transformer, targets)
            transformer.requires_grad_(False).to(dtype)
            if assistant is not None:
                _add(transformer, "assistant", assistant, dtype)
            with torch.random.fork_rng(devices=[]):  # the weights are on the CPU; do not initialise other GPUs
                torch.manual_seed(seed)  # peft draws the adapters' first factor from the global generator
                how: Any = "gaussian" if init == "gaussian" else True
                lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), init_lora_weights=how)
                for name in ("default", *(["start"] if start is not None else [])):
                    _inject(transformer, name, lora)
            trained = _factors(transformer, "default")
            for factor in (*trained.values(), *_factors(transformer, "start").values()):
                factor.to(transformer.device, torch.float32)
            if start is not None:
                _fill(trained, start, alpha / rank)
                for name, factor in _factors(transformer, "start").items():
                    factor.weight.data = trained[name].weight.data.clone()
        elif mode == "frozen":
            transformer.requires_grad_(False).to(dtype)
            for name, adapter in (("start", start), ("assistant", assistant)):
                if adapter is not None:
                    _add(transformer, name, adapter, torch.float32 if name == "start" else dtype)
        else:
            if start is not None:
                for module in start.layers:  # in float32, for less would round the change away
                    weight = transformer.get_submodule(module).weight
                    weight.data = weight.data.float() + start.delta(module).view_as(weight).to(weight.device)
            if keep_base:
                self._frozen = _twin(transformer)
            transformer.requires_grad_(True)
            if sharding is None:
                if keep_base:
                    self._frozen.to(device, dtype)
                transformer.to(device, torch.float32)
                if keep_base:
                    _part(transformer, self._frozen)
            else:
                sharding.shard(transformer, dtype)
                self._divided = self.named()  # FSDP replaces the parameters during a call
                if keep_base:
                    sharding.shard(self._frozen, dtype, trained=False)
        if quantized != "none":
            quantize(transformer, quantized, device)
        self._choose()

    def _choose(self) -> None:
        """Activates the adapters of the next calls, each with its strength. That of the trained one is of what was learnt:
        between 0 and 1 it leads from the start to the result."""
        learnt = 0.0 if self._untrained or self._late or self.own is None else self._strength
        start = 0.0 if self._late and self._early_start else 1 - learnt
        strengths = {"start": start, "assistant": float(self._assisted or self._deployed)}
        strengths |= {self.own: learnt} if self.own is not None else {}
        if not strengths.keys() & getattr(self.transformer, "peft_config", {}).keys():
            return
        for layer in self.transformer.modules():
            if hasattr(layer, "lora_A"):
                for name, strength in strengths.items():
                    layer.set_scale(name, strength or 1.0)
                layer.set_adapter([name for name, strength in strengths.items() if strength], inference_mode=True)
        if self.mode == "lora":
            for factor in _factors(self.transformer, "default").values():
                factor.requires_grad_(True)
        if not self._autocast:
            _compute_as_called(self.transformer)

    def named(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name."""
        return self._divided or {name: p for name, p in self.transformer.named_parameters() if p.requires_grad}

    @contextmanager
    def base(self) -> Iterator[None]:
        """While entered, `active` is the untrained transformer."""
        if self._changed:
            if self._frozen is None:
                raise UserError(
                    "the base model is not there: after full fine-tuning a policy has it only if built with keep_base=True"
                )
            self.active = self._frozen
            try:
                yield
            finally:
                self.active = self.transformer
        else:
            with self._with("_untrained"):
                yield

    def late(self) -> AbstractContextManager[None]:
        """While entered, adapters that act at early steps alone do not."""
        return self._with("_late")

    def assisted(self) -> AbstractContextManager[None]:
        """While entered, the assistant acts."""
        return self._with("_assisted")

    @contextmanager
    def _with(self, state: str) -> Iterator[None]:
        """While entered, `state` is true."""
        before = getattr(self, state)
        setattr(self, state, True)
        self._choose()
        try:
            yield
        finally:
            setattr(self, state, before)
            self._choose()

    def load(self, path: Path, pipeline: Any, strength: float) -> float:
        """Loads saved weights, an adapter at `strength` or a whole transformer: the folder that `save` wrote, or a single
        .safetensors file with diffusers' names. Returns the sigma above which they act."""
        file = path / ADAPTER_FILE if path.is_dir() else path
        if file.is_file():
            refuse_pointer(file)
        if file.is_file() and (path.is_dir() or _is_adapter(file)):
            adapter = read_adapter(file, type(pipeline), self.transformer)
            check_fit(str(file), adapter, self.transformer)
            _add(self.transformer, "tuned", adapter, torch.float32)
            self.own = "tuned"
            self.scale(strength)
            return adapter.above
        elif file.is_file() or (path / "config.json").is_file():
            if is_quantized(self.transformer):
                raise UserError(f"{path}: holds a whole transformer, and policy.quantize keeps the base's; set it to none")
            if self._keep_base and self._frozen is None:
                self._frozen = copy.deepcopy(self.transformer)
            if getattr(self.transformer, "peft_config", None):  # the adapter that training began with is in the weights
                self.transformer.unload_lora()
            if file.is_file():
                weights = _fitting(self.transformer, file)
            else:
                weights = type(self.transformer).from_pretrained(path, use_safetensors=True).state_dict()
            self._changed = True
            self.transformer.load_state_dict(weights)
        else:
            raise FileNotFoundError(f"{path}: holds neither pytorch_lora_weights.safetensors nor a transformer's config.json")
        return 0.0

    def scale(self, strength: float) -> None:
        """Sets the strength of the loaded adapter; 0 is the untrained model."""
        self._strength = strength
        self._choose()

    def save(self, directory: Path, above: float = 0.0) -> Path:
        """Writes what diffusers reads: `pytorch_lora_weights.safetensors`, or a transformer folder; returns where. The header
        says above which sigma the adapter acts, `above`.

        The factor alpha / rank of an adapter is multiplied into its weights, because loaders that do not read diffusers'
        metadata, such as ComfyUI's, assume 1.
        """
        if self.mode == "full":
            if (whole := self._whole()) is not None:
                whole.save_pretrained(directory, safe_serialization=True)
            return directory
        from peft.utils import get_peft_model_state_dict

        layers: dict[str, Tensor] = get_peft_model_state_dict(self.transformer)
        adapter = self.transformer.peft_config["default"].to_dict()
        rank, scale = adapter["r"], adapter["lora_alpha"] / adapter["r"]
        metadata = {key: sorted(value) if isinstance(value, set) else value for key, value in adapter.items()}
        config = {f"transformer.{key}": value for key, value in {**metadata, "lora_alpha": rank}.items()}
        saved = directory / ADAPTER_FILE
        directory.mkdir(parents=True, exist_ok=True)
        save_file({f"transformer.{name}": _folded(name, value, scale) for name, value in layers.items()}, saved)
        trained = {"g2rpo.transformer": self._kind.__name__, OWN_ALPHA: f"{adapter['lora_alpha']:g}"}
        trained |= {ABOVE_KEY: str(above)} if above else {}
        size = {"ss_network_dim": str(rank), "ss_network_alpha": str(rank)}
        peft = {"lora_adapter_metadata": json.dumps(config, indent=2, sort_keys=True)}  # equal runs must write equal bytes
        add_metadata(saved, {"format": "pt", **peft, **size, **trained})
        return saved

    def _whole(self) -> Any:
        """The transformer with whole weights; None on ranks that do not write."""
        if self._sharding is None:
            return self.transformer
        weights = self._sharding.gather(self.transformer.state_dict())
        if not self._sharding.world.is_main:
            return None
        with torch.device("meta"):
            whole = self._kind.from_config(self.transformer.config)
        whole.load_state_dict(weights, assign=True)
        return whole


def _factors(transformer: nn.Module, adapter: str) -> dict[str, nn.Linear]:
    """The factors of an adapter by module and which of the two."""
    return {
        f"{name}{end}": getattr(layer, end[1:7])[adapter]
        for name, layer in transformer.named_modules()
        for end in (DOWN, UP)
        if adapter in getattr(layer, end[1:7], ())
    }


def _inject(transformer: Any, name: str, config: Any) -> None:
    """Adds an adapter as peft initialises it."""
    if hasattr(transformer, "add_adapter"):
        transformer.add_adapter(config, name)
    else:  # diffusers has no adapters for it (PRX)
        from peft import inject_adapter_in_model

        inject_adapter_in_model(config, transformer, name)


def loader_of(pipeline: Any) -> str | None:
    """The method of a pipeline, or of a part of it, that loads a saved adapter in plain diffusers; None: there is none, and
    a merged transformer is loaded."""
    if "transformer" in getattr(pipeline, "_lora_loadable_modules", ()):
        return "load_lora_weights"
    return "transformer.load_lora_adapter" if hasattr(pipeline.transformer, "load_lora_adapter") else None


def _add(transformer: Any, name: str, adapter: Adapter, dtype: torch.dtype) -> None:
    """Adds a frozen adapter."""
    device = transformer.device
    if hasattr(transformer, "load_lora_adapter"):
        transformer.load_lora_adapter(
            adapter.tensors(PREFIX), adapter_name=name, low_cpu_mem_usage=True
        )  # draws no values first
    else:
        from peft import LoraConfig, set_peft_model_state_dict

        ranks = {module: len(down) for module, (down, _) in adapter.layers.items()}
        _inject(transformer, name, LoraConfig(target_modules=list(ranks), rank_pattern=ranks, alpha_pattern=ranks))
        set_peft_model_state_dict(transformer, adapter.tensors(""), name)
    for factor in _factors(transformer, name).values():
        factor.to(device, dtype)


def _fill(factors: Mapping[str, nn.Linear], start: Adapter, scale: float) -> None:
    """Puts an adapter's values into an untrained one. Ranks and modules that it lacks stay at no change."""
    for module, (down, up) in start.layers.items():
        if module + DOWN not in factors or len(down) > len(factors[module + DOWN].weight):
            raise UserError(f"policy.adapter: its {module} of rank {len(down)} is not in policy.lora_rank and lora_targets")
        into, out = factors[module + DOWN].weight.data, factors[module + UP].weight.data
        into[: len(down)] = down.to(into.device)
        out[:, : len(down)] = (up / scale).to(out.device)


def _is_adapter(file: Path) -> bool:
    with safe_open(file, "pt") as tensors:
        return any("lora" in name for name in tensors.keys())  # noqa: SIM118  no mapping


def _fitting(transformer: nn.Module, file: Path) -> dict[str, Tensor]:
    """The tensors of a file by the transformer's names, without a prefix that all of them have; UserError for others."""
    tensors, own = load_file(file), {name: value.shape for name, value in transformer.state_dict().items()}
    one = min(own)
    prefixes = [name.removesuffix(one) for name in tensors if name.endswith(one)]
    prefix = next((each for each in prefixes if each[-1:] == "." and all(name.startswith(each) for name in tensors)), "")
    found = {name.removeprefix(prefix): value for name, value in tensors.items()}
    lacks, others = sorted(own.keys() - found.keys()), sorted(found.keys() - own.keys())
    differ = sorted(name for name in own.keys() & found.keys() if found[name].shape != own[name])
    if lacks or others or differ:
        such = ", ".join(names[0] for names in (lacks, others, differ) if names)
        raise UserError(
            f"{file}: is no {type(transformer).__name__} of this size in diffusers' names: {len(lacks)} of its {len(own)} "
            f"tensors are missing, {len(others)} are unknown and {len(differ)} have another shape, such as {such}"
        )
    return found


def _twin(transformer: nn.Module) -> Any:
    """A frozen copy that shares the weights' memory."""
    weights = {id(p): nn.Parameter(p.data, requires_grad=False) for p in transformer.parameters()}
    return copy.deepcopy(transformer, weights)


def _part(trained: nn.Module, frozen: nn.Module) -> None:
    """Replaces weights of `frozen` that share memory with `trained` by copies."""
    for weight, other in zip(trained.parameters(), frozen.parameters(), strict=True):
        if weight.data_ptr() == other.data_ptr():
            other.data = other.data.clone()


def _folded(name: str, weight: Tensor, scale: float) -> Tensor:
    return (weight * scale if "lora_B" in name else weight).contiguous()


class _Factor(nn.Linear):
    """A float32 factor of an adapter, rounded in each call to the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def _compute_as_called(transformer: Any) -> None:
    """Adapters compute in the dtype of their input, as under autocast; peft alone would use float32."""
    for module in transformer.modules():
        if hasattr(module, "lora_A"):
            module.cast_input_dtype_enabled = False
            for factor in (*module.lora_A.values(), *module.lora_B.values()):
                factor.__class__ = _Factor
