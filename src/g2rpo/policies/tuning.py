"""Tuning of a diffusers transformer: LoRA or full fine-tuning, and saving the trained weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from g2rpo.core.errors import UserError
from g2rpo.core.files import add_metadata, refuse_pointer
from g2rpo.policies.adapter_files import read_adapter
from g2rpo.policies.adapters import ABOVE_KEY, OWN_ALPHA, Adapter, check_fit
from g2rpo.policies.lora_layers import add_frozen, check_targets, compute_as_called, factors_of, fill, inject
from g2rpo.policies.options import PolicyConfig, TuningMode
from g2rpo.policies.quantized import is_quantized, quantize
from g2rpo.runtime.sharding import Sharded

ADAPTER_FILE = "pytorch_lora_weights.safetensors"
"""The file of a saved adapter."""
TRAINED = "default"
"""The name of the trained adapter in a transformer."""


class Tuning:
    """The transformer of a policy, and what of it is trained: adapters (`LoRA`), all weights (`Full`) or nothing (`Frozen`).

    `active` is the transformer to call: the trained one, or the untrained one inside `base`. The untrained one has the adapter
    `start`, with which training begins. The `assistant` is frozen and acts while `assisted`, or always if the options say so.
    While `late`, what was learnt does not act, nor a `start` that acts at early steps alone. `keep_base` keeps a copy of
    weights that `Full` or `load` will change.
    """

    own: str | None = None
    """The adapter that has what was learnt."""

    def __init__(
        self,
        transformer: Any,
        options: PolicyConfig,
        device: torch.device,
        start: Adapter | None,
        assistant: Adapter | None,
        keep_base: bool,
    ) -> None:
        self.transformer = self.active = transformer
        self.options, self.dtype, self.device = options, getattr(torch, options.dtype), device
        self._kind = type(transformer)  # FSDP replaces it
        self._keep_base, self._base, self._changed = keep_base, None, False
        self._strength = 1.0
        self._untrained, self._assisted, self._late = False, False, False
        self._early_start = start is not None and start.above > 0
        if device.type == "meta":  # a plan's, which may have fewer blocks
            start, assistant = (adapter and adapter.of(transformer) for adapter in (start, assistant))
        for key, adapter in (("adapter", start), ("assistant", assistant)):
            if adapter is not None:
                check_fit(f"policy.{key}", adapter, transformer)
        self._prepare(start, assistant)
        if options.quantize != "none":
            quantize(transformer, options.quantize, device)
        self._choose()

    def _prepare(self, start: Adapter | None, assistant: Adapter | None) -> None:
        """Sets dtypes and gradients of the weights, and adds adapters."""
        raise NotImplementedError

    def _choose(self) -> None:
        """Activates the adapters of the next calls, each with its strength. That of the trained one is of what was learnt:
        between 0 and 1 it leads from the start to the result."""
        learnt = 0.0 if self._untrained or self._late or self.own is None else self._strength
        start = 0.0 if self._late and self._early_start else 1 - learnt
        strengths = {"start": start, "assistant": float(self._assisted or self.options.assistant_in_evaluation)}
        strengths |= {self.own: learnt} if self.own is not None else {}
        if not strengths.keys() & getattr(self.transformer, "peft_config", {}).keys():
            return
        for layer in self.transformer.modules():
            if hasattr(layer, "lora_A"):
                for name, strength in strengths.items():
                    layer.set_scale(name, strength or 1.0)
                layer.set_adapter([name for name, strength in strengths.items() if strength], inference_mode=True)
        for factor in factors_of(self.transformer, TRAINED).values():
            factor.requires_grad_(True)
        if not self.options.autocast:
            compute_as_called(self.transformer)

    def named(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name."""
        return {name: p for name, p in self.transformer.named_parameters() if p.requires_grad}

    def base(self) -> AbstractContextManager[None]:
        """While entered, `active` is the untrained transformer."""
        if self._changed and self._base is None:
            raise UserError(
                "the base model is not there: after full fine-tuning a policy has it only if built with keep_base=True"
            )
        return self._with("_untrained")

    def late(self) -> AbstractContextManager[None]:
        """While entered, adapters that act at early steps alone do not."""
        return self._with("_late")

    def assisted(self) -> AbstractContextManager[None]:
        """While entered, the assistant acts."""
        return self._with("_assisted")

    @contextmanager
    def _with(self, state: str) -> Iterator[None]:
        """While entered, `state` is true."""
        before = getattr(self, state), self.active
        setattr(self, state, True)
        if self._untrained and self._base is not None:
            self.active = self._base
        self._choose()
        try:
            yield
        finally:
            setattr(self, state, before[0])
            self.active = before[1]
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
            add_frozen(self.transformer, "tuned", adapter, torch.float32)
            self.own = "tuned"
            self.scale(strength)
            return adapter.above
        if not file.is_file() and not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path}: holds neither {ADAPTER_FILE} nor a transformer's config.json")
        if is_quantized(self.transformer):
            raise UserError(f"{path}: holds a whole transformer, and policy.quantize keeps the base's; set it to none")
        if self._keep_base and self._base is None:
            self._base = copy.deepcopy(self.transformer)
        if getattr(self.transformer, "peft_config", None):  # the adapter that training began with is in the weights
            self.transformer.unload_lora()
        if file.is_file():
            weights = _fitting(self.transformer, file)
        else:
            weights = self._kind.from_pretrained(path, use_safetensors=True).state_dict()
        self._changed = True
        self.transformer.load_state_dict(weights)
        return 0.0

    def scale(self, strength: float) -> None:
        """Sets the strength of the loaded adapter; 0 is the untrained model."""
        self._strength = strength
        self._choose()

    def save(self, directory: Path, above: float = 0.0) -> Path:
        """Writes what diffusers reads; returns where. The header of an adapter says above which sigma it acts, `above`."""
        raise NotImplementedError


class Frozen(Tuning):
    """Nothing is trained, for sampling: the start and the assistant act beside the weights."""

    def _prepare(self, start: Adapter | None, assistant: Adapter | None) -> None:
        self.transformer.requires_grad_(False).to(self.dtype)
        if start is not None:
            add_frozen(self.transformer, "start", start, torch.float32)
        if assistant is not None:
            add_frozen(self.transformer, "assistant", assistant, self.dtype)


class LoRA(Tuning):
    """Float32 adapters of the modules in `targets` are trained, which begin as `start` or at zero, so that the model is
    unchanged; the weights are frozen. Without policy.autocast adapters compute in the dtype of their inputs."""

    own = TRAINED

    def __init__(self, *parts: Any, targets: Sequence[str], seed: int) -> None:
        self._targets, self._seed = targets, seed
        super().__init__(*parts)

    def _prepare(self, start: Adapter | None, assistant: Adapter | None) -> None:
        from peft import LoraConfig

        transformer, o = self.transformer, self.options
        check_targets(transformer, self._targets)
        transformer.requires_grad_(False).to(self.dtype)
        if assistant is not None:
            add_frozen(transformer, "assistant", assistant, self.dtype)
        with torch.random.fork_rng(devices=[]):  # the weights are on the CPU; do not initialise other GPUs
            torch.manual_seed(self._seed)  # peft draws the adapters' first factor from the global generator
            how: Any = "gaussian" if o.lora_init == "gaussian" else True
            lora = LoraConfig(r=o.lora_rank, lora_alpha=o.lora_alpha, target_modules=list(self._targets), init_lora_weights=how)
            for name in (TRAINED, *(["start"] if start is not None else [])):
                inject(transformer, name, lora)
        trained, kept = factors_of(transformer, TRAINED), factors_of(transformer, "start")
        device = transformer.device  # looked up among all modules
        for factor in (*trained.values(), *kept.values()):
            factor.to(device, torch.float32)
        if start is not None:
            fill(trained, start, o.lora_alpha / o.lora_rank)
            for name, factor in kept.items():
                factor.weight.data = trained[name].weight.data.clone()

    def save(self, directory: Path, above: float = 0.0) -> Path:
        """Writes `pytorch_lora_weights.safetensors`. The factor alpha / rank is multiplied into the weights, because loaders
        that do not read diffusers' metadata, such as ComfyUI's, assume 1."""
        from peft.utils import get_peft_model_state_dict

        layers: dict[str, Tensor] = get_peft_model_state_dict(self.transformer)
        adapter = self.transformer.peft_config[TRAINED].to_dict()
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


class Full(Tuning):
    """All weights are trained, as float32 masters that compute in the policy's dtype under autocast. A start is merged in.
    `sharding` divides the weights over ranks, which must then all call `save`."""

    def __init__(self, *parts: Any, sharding: Sharded | None) -> None:
        self._sharding = sharding
        self._divided: dict[str, nn.Parameter] = {}
        super().__init__(*parts)

    def _prepare(self, start: Adapter | None, assistant: Adapter | None) -> None:
        transformer = self.transformer
        if start is not None:
            for module in start.layers:  # in float32, for less would round the change away
                weight = transformer.get_submodule(module).weight
                weight.data = weight.data.float() + start.delta(module).view_as(weight).to(weight.device)
        base = _twin(transformer) if self._keep_base else None
        self._base, self._changed = base, True
        transformer.requires_grad_(True)
        if self._sharding is not None:
            self._sharding.shard(transformer, self.dtype)
            self._divided = self.named()  # FSDP replaces the parameters during a call
            if base is not None:
                self._sharding.shard(base, self.dtype, trained=False)
        else:
            if base is not None:
                base.to(self.device, self.dtype)
            transformer.to(self.device, torch.float32)
            if base is not None:
                _part(transformer, base)

    def named(self) -> dict[str, nn.Parameter]:
        return self._divided or super().named()

    def save(self, directory: Path, above: float = 0.0) -> Path:
        """Writes a transformer's folder."""
        if (whole := self._whole()) is not None:
            whole.save_pretrained(directory, safe_serialization=True)
        return directory

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


def tuned(
    transformer: Any,
    options: PolicyConfig,
    mode: TuningMode,
    *,
    targets: Sequence[str],
    device: torch.device,
    pipeline_class: Any = None,
    seed: int = 0,
    keep_base: bool = False,
    sharding: Sharded | None = None,
) -> Tuning:
    """`transformer` as these options tune it, with the adapters in their files; `targets` are those of its model."""
    start, assistant = (
        read_adapter(Path(name), pipeline_class, transformer) if name is not None else None
        for name in (options.adapter, options.assistant)
    )
    above = options.lora_above
    if start is not None and start.above not in (0, above):
        raise UserError(f"policy.adapter: acts above sigma {start.above:g} alone; set policy.lora_above={start.above:g}")
    if start is not None and mode == "lora" and start.above != above:
        raise UserError(
            f"policy.lora_above={above:g}: policy.adapter acts at all steps, and the saved adapter would hold both; "
            "take lora_above out, or merge your adapter into policy.path (diffusers' fuse_lora)"
        )
    if assistant is not None and assistant.above:
        raise UserError(f"policy.assistant: acts above sigma {assistant.above:g} alone, and would act at all steps")
    parts = (transformer, options, device, start, assistant, keep_base)
    if mode == "full":
        return Full(*parts, sharding=sharding)
    if mode == "frozen":
        return Frozen(*parts)
    return LoRA(*parts, targets=options.lora_targets or targets, seed=seed)


def loader_of(pipeline: Any) -> str | None:
    """The method of a pipeline, or of a part of it, that loads a saved adapter in plain diffusers; None: there is none, and
    a merged transformer is loaded."""
    if "transformer" in getattr(pipeline, "_lora_loadable_modules", ()):
        return "load_lora_weights"
    return "transformer.load_lora_adapter" if hasattr(pipeline.transformer, "load_lora_adapter") else None


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
