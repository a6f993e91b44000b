"""Tuning of a diffusers transformer: LoRA or full fine-tuning, and saving the trained weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from g2rpo.core.errors import UserError
from g2rpo.core.files import add_metadata
from g2rpo.policies.options import LoraInit
from g2rpo.policies.quantized import Quantize, is_quantized, quantize
from g2rpo.runtime.sharding import Sharded

TuningMode = Literal["lora", "full", "frozen"]

ADAPTER = "pytorch_lora_weights.safetensors"
"""The file of a saved adapter."""


def check_lora(transformer: type) -> None:
    """UserError for a class of transformers that takes no adapters."""
    if not hasattr(transformer, "add_adapter"):
        raise UserError(f"policy.tuning=lora: diffusers has no adapters for {transformer.__name__}; set policy.tuning=full")


class Tuning:
    """The trained part of `transformer`, a diffusers model.

    "lora" freezes the weights in `dtype` and adds float32 adapters of `rank` to the modules named in `targets`; "full" trains
    all weights as float32 masters, computed in `dtype` under autocast; "frozen" trains nothing and is for sampling. Adapters
    start at zero, so the model is unchanged. `keep_base` keeps a copy of weights that "full" or `load` will change. `active` is
    the transformer to call: the trained one, or the untrained one inside `base`. `sharding` shards the weights that "full"
    trains; all ranks must then call `save`. `quantized` is how frozen weights are stored. Without
    `autocast` adapters compute in the dtype of their inputs.
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
    ) -> None:
        self.transformer = self.active = transformer
        self.mode = mode
        self._kind = type(transformer)
        self._sharding = sharding
        self._divided: dict[str, nn.Parameter] = {}
        self._keep_base = keep_base
        self._frozen: Any = None
        self._changed = mode == "full"
        if mode == "lora":
            from peft import LoraConfig

            check_lora(type(transformer))
            transformer.requires_grad_(False).to(dtype)
            with torch.random.fork_rng(devices=[]):  # the weights are on the CPU; do not initialise other GPUs
                torch.manual_seed(seed)  # peft draws the adapters' first factor from the global generator
                how: Any = "gaussian" if init == "gaussian" else True
                transformer.add_adapter(
                    LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), init_lora_weights=how)
                )
            for parameter in self.named().values():
                parameter.data = parameter.data.float()
            if not autocast:
                _compute_as_called(transformer)
        elif mode == "frozen":
            transformer.requires_grad_(False).to(dtype)
        else:
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
        elif not getattr(self.transformer, "peft_config", None):
            yield
        else:
            self.transformer.disable_adapters()
            try:
                yield
            finally:
                self.transformer.enable_adapters()

    def load(self, path: Path, pipeline: Any, strength: float) -> None:
        """Loads saved weights, an adapter at `strength` or a whole transformer: the folder that `save` wrote, or a single
        .safetensors file with diffusers' names."""
        file = path / ADAPTER if path.is_dir() else path
        if file.is_file() and (path.is_dir() or _is_adapter(file)):
            # pipelines compare adapters with weights by name, which quantized ones lack; some pipelines have no loader
            own = is_quantized(self.transformer) or not hasattr(pipeline, "load_lora_weights")
            load = self.transformer.load_lora_adapter if own else pipeline.load_lora_weights
            load(file.parent, weight_name=file.name, adapter_name="tuned")
            self.scale(strength)
        elif file.is_file() or (path / "config.json").is_file():
            if is_quantized(self.transformer):
                raise UserError(f"{path}: holds a whole transformer, and policy.quantize keeps the base's; set it to none")
            if file.is_file():
                weights = _fitting(self.transformer, file)
            else:
                weights = type(self.transformer).from_pretrained(path, use_safetensors=True).state_dict()
            if self._keep_base and self._frozen is None:
                self._frozen = copy.deepcopy(self.transformer)
            self._changed = True
            self.transformer.load_state_dict(weights)
        else:
            raise FileNotFoundError(f"{path}: holds neither pytorch_lora_weights.safetensors nor a transformer's config.json")

    def scale(self, strength: float) -> None:
        """Sets the strength of the loaded adapter; 0 is the base model."""
        self.transformer.set_adapters("tuned", strength)

    def save(self, directory: Path) -> Path:
        """Writes what diffusers reads: `pytorch_lora_weights.safetensors`, or a transformer folder; returns where.

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
        saved = directory / ADAPTER
        directory.mkdir(parents=True, exist_ok=True)
        save_file({f"transformer.{name}": _folded(name, value, scale) for name, value in layers.items()}, saved)
        trained = {"g2rpo.transformer": self._kind.__name__, "g2rpo.lora_alpha": f"{adapter['lora_alpha']:g}"}
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
