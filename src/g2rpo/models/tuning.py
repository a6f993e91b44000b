"""Tuning of a diffusers transformer: what of it is trained, and how the trained weights are
saved."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from g2rpo.core.errors import UserError, refuse
from g2rpo.core.files import refuse_pointer
from g2rpo.core.holding import holding
from g2rpo.models.adapter_files import read_adapter
from g2rpo.models.adapters import (
    ABOVE_KEY,
    ADAPTER_FILE,
    CONFIG,
    PREFIX,
    Adapter,
    AdapterFile,
    check_fit,
    own_header,
    write_tensors,
)
from g2rpo.models.comfyui import ComfyUI
from g2rpo.models.lora_layers import (
    START,
    TRAINED,
    Acting,
    add_frozen,
    check_targets,
    factors_of,
    fill,
    inject,
)
from g2rpo.models.offload import offloads
from g2rpo.models.options import PolicyConfig, TuningMode
from g2rpo.models.pipeline_files import is_adapter, weights_of_file
from g2rpo.models.pipelines import cast, separate, shared_copy, trainable
from g2rpo.models.quantized import is_quantized, quantize
from g2rpo.models.sharding import Sharded

LOADED = "tuned"
"""The name of an adapter from a file in a transformer."""


class _WithAdapters:
    """A transformer in which adapters act. `base` is the untrained one, which has the adapter with
    which training begins."""

    _acting: Acting

    def late(self) -> AbstractContextManager[None]:
        """While entered, adapters that act at early steps alone do not."""
        return self._acting.during(late=True)

    def merged(self) -> AbstractContextManager[None]:
        """While entered, calls may be rounded otherwise, where that is faster."""
        return self._acting.merged()


class LoRA(_WithAdapters):
    """Float32 adapters of the modules in `targets` are trained, which begin as `start` or at zero,
    so that the model is unchanged; the weights are frozen. Without policy.autocast adapters compute
    in the dtype of their inputs."""

    def __init__(
        self,
        transformer: Any,
        options: PolicyConfig,
        start: Adapter | None,
        *,
        targets: Sequence[str],
        seed: int,
    ) -> None:
        from peft import LoraConfig

        self.active, dtype = transformer, getattr(torch, options.dtype)
        self._above = options.lora_above
        # a plan's transformer may have fewer blocks
        each = options.lora_targets is not None and transformer.device.type != "meta"
        check_targets(transformer, targets, each=each)
        cast(transformer.requires_grad_(False), dtype)
        rank, alpha = options.lora_rank, options.lora_alpha
        how: Any = "gaussian" if options.lora_init == "gaussian" else True
        # the weights are on the CPU; do not initialise other GPUs
        with torch.random.fork_rng(devices=[]):
            # peft draws the adapters' first factor from the global generator
            torch.manual_seed(seed)
            lora = LoraConfig(
                r=rank, lora_alpha=alpha, target_modules=list(targets), init_lora_weights=how
            )
            for name in [TRAINED] if start is None else [TRAINED, START]:
                inject(transformer, name, lora)
        trained, kept = factors_of(transformer, TRAINED), factors_of(transformer, START)
        device = transformer.device  # looked up among all modules
        for factor in (*trained.values(), *kept.values()):
            factor.to(device, torch.float32)
        if start is not None:
            fill(trained, start, alpha / rank)
            for name, factor in kept.items():
                factor.weight.data = trained[name].weight.data.clone()
        self._acting = Acting(transformer, options, start, TRAINED)

    def named(self) -> dict[str, nn.Parameter]:
        return trainable(self.active)

    def base(self) -> AbstractContextManager[None]:
        return self._acting.during(untrained=True)

    @property
    def file(self) -> AdapterFile:
        """The form in which it is saved. The header says above which sigma it acts. The factor
        alpha / rank is multiplied into the weights, because loaders that do not read diffusers'
        metadata, such as ComfyUI's, assume 1."""
        adapter = self.active.peft_config[TRAINED].to_dict()
        rank, alpha = adapter["r"], adapter["lora_alpha"]
        factors = {
            PREFIX + name.replace(f".{TRAINED}.", "."): alpha / rank if ".lora_B." in name else 1.0
            for name in self.named()
        }
        plain = {
            key: sorted(value) if isinstance(value, set) else value
            for key, value in adapter.items()
        }
        config = {PREFIX + key: value for key, value in {**plain, "lora_alpha": rank}.items()}
        # equal runs must write equal bytes
        header = {CONFIG: json.dumps(config, indent=2, sort_keys=True)}
        header |= own_header(type(self.active).__name__, rank, alpha) | (
            {ABOVE_KEY: str(self._above)} if self._above else {}
        )
        return AdapterFile(factors, header)

    def save(self, directory: Path) -> Path:
        """Writes `pytorch_lora_weights.safetensors`; returns where."""
        file = self.file
        directory.mkdir(parents=True, exist_ok=True)
        tensors = file.tensors(value.detach() for value in self.named().values())
        write_tensors(directory / ADAPTER_FILE, tensors, file.header)
        return directory / ADAPTER_FILE


class Full:
    """All weights are trained, as float32 masters that compute in the policy's dtype under
    autocast. A `start` is merged in. `keep_base` keeps a copy of the untrained weights. `sharding`
    divides the weights over ranks, which must then all call `save`."""

    def __init__(
        self,
        transformer: Any,
        options: PolicyConfig,
        start: Adapter | None,
        *,
        device: torch.device,
        keep_base: bool,
        sharding: Sharded | None,
    ) -> None:
        dtype = getattr(torch, options.dtype)
        self.active = self._trained = transformer
        self._kind, self._sharding = type(transformer), sharding  # FSDP replaces the class
        if start is not None:
            for module in start.layers:  # in float32, for less would round the change away
                weight = transformer.get_submodule(module).weight
                weight.data = weight.data.float() + start.delta(module).view_as(weight).to(
                    weight.device
                )
        self._base = shared_copy(transformer) if keep_base else None
        transformer.requires_grad_(True)
        if sharding is not None:
            sharding.shard(transformer, dtype)
            if self._base is not None:
                sharding.shard(self._base, dtype, trained=False)
        else:
            if self._base is not None:
                cast(self._base, dtype)
                self._base.to(device)
            transformer.to(device, torch.float32)
            if self._base is not None:
                separate(transformer, self._base)
        self._named = trainable(transformer)  # FSDP replaces the parameters during a call

    def named(self) -> dict[str, nn.Parameter]:
        return self._named

    def base(self) -> AbstractContextManager[None]:
        """While entered, `active` is the untrained transformer. UserError if that was not kept."""
        if self._base is None:
            raise UserError(NO_BASE)
        return holding(self, active=self._base)

    def late(self) -> AbstractContextManager[None]:
        return nullcontext()

    merged = late

    def save(self, directory: Path) -> Path:
        """Writes a transformer's folder, which diffusers reads; returns where."""
        if (whole := self._whole()) is not None:
            whole.save_pretrained(directory, safe_serialization=True)
        return directory

    def _whole(self) -> Any:
        """The transformer with whole weights; None on ranks that do not write."""
        if self._sharding is None:
            return self._trained
        weights = self._sharding.gather(self._trained.state_dict())
        if not self._sharding.world.is_main:
            return None
        with torch.device("meta"):
            whole = self._kind.from_config(self._trained.config)
        whole.load_state_dict(weights, assign=True)
        return whole


class Frozen(_WithAdapters):
    """Nothing is trained, for sampling: the start acts beside the weights, and tuned weights may
    be loaded. `keep_base` keeps a copy of the weights that `load` changes."""

    own: str | None = None
    """The adapter that was loaded."""

    def __init__(
        self,
        transformer: Any,
        options: PolicyConfig,
        start: Adapter | None,
        *,
        keep_base: bool,
    ) -> None:
        dtype = getattr(torch, options.dtype)
        self.active, self._options = transformer, options
        self._transformer = transformer
        self._keep_base, self._base, self._changed = keep_base, None, False
        cast(transformer.requires_grad_(False), dtype)
        if start is not None:
            add_frozen(transformer, START, start, torch.float32)
        self._acting = Acting(transformer, options, start)

    def named(self) -> dict[str, nn.Parameter]:
        return {}

    @contextmanager
    def base(self) -> Iterator[None]:
        if self._changed and self._base is None:
            raise UserError(NO_BASE)
        active = self._base or self._transformer
        with holding(self, active=active), self._acting.during(untrained=True):
            yield

    def scale(self, strength: float) -> None:
        """Sets the strength of the loaded adapter; 0 is the untrained model."""
        self._acting.strength = strength
        self._acting.choose()

    def load(
        self, path: Path, pipeline: Any, strength: float, names: ComfyUI | None = None
    ) -> float:
        """Loads saved weights, an adapter at `strength` or a whole transformer: the folder that
        `save` wrote, or a single .safetensors file with diffusers' names, of an adapter also with
        other `names` (`read_adapter`). Returns the sigma above which they act."""
        transformer, file = self._transformer, path / ADAPTER_FILE if path.is_dir() else path
        if self.own is not None or self._changed:
            raise UserError(f"{path}: other tuned weights are loaded; build a new policy for these")
        if file.exists():
            refuse_pointer(file)
        if file.is_file() and (path.is_dir() or is_adapter(file)):
            adapter = read_adapter(file, type(pipeline), transformer, names)
            check_fit(str(file), adapter, transformer)
            add_frozen(transformer, LOADED, adapter, torch.float32)
            self.own = self._acting.own = LOADED
            self.scale(strength)
            return adapter.above
        if not file.is_file() and not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"{path}: holds neither {ADAPTER_FILE} nor a transformer's config.json"
            )
        if strength != 1:
            raise UserError(
                f"{path}: holds a whole transformer, and a strength is an adapter's; leave {strength:g} out"
            )
        if is_quantized(transformer) or self._options.offload:
            raise UserError(
                f"{path}: holds a whole transformer, and policy.quantize and policy.offload keep the base's; take them out"
            )
        if self._keep_base and self._base is None:
            self._base = copy.deepcopy(transformer)
        # the adapter that training began with is in the weights
        if getattr(transformer, "peft_config", None):
            transformer.unload_lora()
        if file.is_file():
            weights = weights_of_file(file, transformer)
        else:
            weights = type(transformer).from_pretrained(path, use_safetensors=True).state_dict()
        self._changed = True
        transformer.load_state_dict(weights)
        return 0.0


NO_BASE = "the base model is not there: after full fine-tuning a policy has it only if built with keep_base=True"


def tuned(
    transformer: Any,
    options: PolicyConfig,
    mode: TuningMode,
    *,
    targets: Sequence[str],
    device: torch.device,
    pipeline_class: Any = None,
    names: ComfyUI | None = None,
    seed: int = 0,
    keep_base: bool = False,
    sharding: Sharded | None = None,
) -> LoRA | Full | Frozen:
    """`transformer` as these options tune it, with the adapters in their files; `targets` and other
    programs' `names` are those of its model."""
    start = _start_of(transformer, options, mode, pipeline_class, names)
    if mode == "full":
        tuning: LoRA | Full | Frozen = Full(
            transformer, options, start, device=device, keep_base=keep_base, sharding=sharding
        )
    elif mode == "frozen":
        tuning = Frozen(transformer, options, start, keep_base=keep_base)
    else:
        tuning = LoRA(
            transformer,
            options,
            start,
            targets=options.lora_targets or targets,
            seed=seed,
        )
    if options.quantize != "none":
        kept = torch.device("cpu") if offloads(options, device) else device
        quantize(transformer, options.quantize, device, kept)
    return tuning


def _start_of(
    transformer: Any,
    options: PolicyConfig,
    mode: TuningMode,
    pipeline_class: Any,
    names: ComfyUI | None,
) -> Adapter | None:
    """The adapter that training begins with, which fits the transformer and acts where the options
    say."""
    if options.adapter is None:
        return None
    start = read_adapter(Path(options.adapter), pipeline_class, transformer, names)
    refuse(_faults_of_steps(start, options.lora_above, mode))
    # a plan's transformer may have fewer blocks
    here = start.of(transformer) if transformer.device.type == "meta" else start
    if here is not None:
        check_fit("policy.adapter", here, transformer)
    return here


def _faults_of_steps(start: Adapter, above: float, mode: TuningMode) -> Iterator[str]:
    """Why the adapter cannot act at the steps that the options say."""
    if start.above not in (0, above):
        yield f"policy.adapter: acts above sigma {start.above:g} alone; set policy.lora_above={start.above:g}"
    if mode == "lora" and start.above != above:
        yield (
            f"policy.lora_above={above:g}: policy.adapter acts at all steps, and the saved adapter would hold both; "
            "take lora_above out, or merge your adapter into policy.path (diffusers' fuse_lora)"
        )
