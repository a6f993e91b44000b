"""Adapters inside a diffusers transformer: added, read, set and switched as peft has them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from g2rpo.core.errors import UserError
from g2rpo.models.adapters import DOWN, UP, Adapter
from g2rpo.models.options import PolicyConfig

TRAINED, START = "default", "start"
"""The names of adapters in a transformer: the trained one, and the one that training began with."""
FACTORS = {DOWN: "lora_A", UP: "lora_B"}
"""The attributes in which a layer of peft has the factors of its adapters."""


def check_targets(transformer: nn.Module, targets: Sequence[str], *, each: bool) -> None:
    """UserError for a transformer without linear layers or convolutions of these names, which
    adapters change (`each`: without those of any one of them), and for names of other modules."""
    kind, modules = type(transformer).__name__, dict(transformer.named_modules())
    layers = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d)
        and getattr(module, "groups", 1) == 1
    ]
    named = {end: [name for name in modules if f".{name}".endswith(f".{end}")] for end in targets}
    if other := [name for names in named.values() for name in names if name not in {*layers}]:
        raise UserError(
            f"policy.lora_targets: {other[0]} of a {kind} is a {type(modules[other[0]]).__name__}; adapters change "
            "linear layers, and convolutions without groups"
        )
    absent = [end for end, names in named.items() if not names]
    if absent and (each or len(absent) == len(named)):
        ends = dict.fromkeys(
            re.sub(r".*\.(?=[a-z])", "", name) for name in layers if re.search(r"\.\d+\.", name)
        )
        raise UserError(
            f"policy.lora_targets: no layer of a {kind} is named {', '.join(absent)[:200]}; "
            f"those of its blocks are {', '.join(ends)[:300]}. Or set policy.tuning=full"
        )


def factors_of(transformer: nn.Module, adapter: str) -> dict[str, nn.Linear]:
    """The factors of an adapter by module and which of the two."""
    return {
        f"{name}{end}": getattr(layer, FACTORS[end])[adapter]
        for name, layer in transformer.named_modules()
        for end in (DOWN, UP)
        if adapter in getattr(layer, FACTORS[end], ())
    }


def inject(transformer: Any, name: str, config: Any, **options: Any) -> None:
    """Adds an adapter as peft initialises it."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, transformer, name, **options)
    transformer._hf_peft_config_loaded = True  # diffusers' own methods for adapters ask for it


def add_frozen(transformer: Any, name: str, adapter: Adapter, dtype: torch.dtype) -> None:
    """Adds a frozen adapter."""
    from peft import LoraConfig, set_peft_model_state_dict

    device = transformer.device
    ranks = {module: len(down) for module, (down, _) in adapter.layers.items()}
    config = LoraConfig(target_modules=list(ranks), rank_pattern=ranks, alpha_pattern=ranks)
    inject(transformer, name, config, low_cpu_mem_usage=True)  # draws no values first
    set_peft_model_state_dict(transformer, adapter.tensors(""), name, low_cpu_mem_usage=True)
    for factor in factors_of(transformer, name).values():
        factor.to(device, dtype)


def fill(factors: Mapping[str, nn.Linear], start: Adapter, scale: float) -> None:
    """Puts an adapter's values into an untrained one. Ranks and modules that it lacks stay at no
    change."""
    for module, (down, up) in start.layers.items():
        if module + DOWN not in factors or len(down) > len(factors[module + DOWN].weight):
            raise UserError(
                f"policy.adapter: its {module} of rank {len(down)} is not in policy.lora_rank and lora_targets"
            )
        into, out = factors[module + DOWN].weight.data, factors[module + UP].weight.data
        into[: len(down)] = down.to(into.device)
        out[:, : len(down)] = (up / scale).to(out.device)


class Acting:
    """Which adapters in a transformer act: what was learnt (`own`), and the `start` with which training
    began. While `late`, what was learnt does not act, nor a start that acts at early steps
    alone."""

    strength = 1.0
    """Of what was learnt: between 0 and 1 it leads from the start to the result."""
    untrained = late = False
    _own: dict[Any, Tensor] | None = None
    """While `merged`, the layers' own weights."""

    def __init__(
        self, transformer: Any, options: PolicyConfig, start: Adapter | None, own: str | None = None
    ) -> None:
        self.own, self._transformer, self._options = own, transformer, options
        self._early_start = start is not None and start.above > 0
        self._sums: dict[tuple[Any, ...], dict[Any, Tensor]] = {}
        """While `merged`, weights with what adapters add, by the adapters' strengths."""
        self.choose()

    @contextmanager
    def during(self, **states: bool) -> Iterator[None]:
        """While entered, these states hold."""
        before = {state: getattr(self, state) for state in states}
        self._set(states)
        try:
            yield
        finally:
            self._set(before)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """While entered, adapters, which must not change meanwhile, are added to float32 weights on
        a CPU: calls are faster, and the same but for rounding. bfloat16 would round small changes
        away, and a GPU's memory is worth more than the time."""
        o, here = self._options, next(self._transformer.parameters()).device.type
        able = (o.dtype, o.quantize, here) == ("float32", "none", "cpu") and o.compile is not True
        if self._own is not None or not able:
            yield
            return
        own = self._own = {layer: layer.weight.data for layer in self._layers()}
        try:
            self.choose()
            yield
        finally:
            self._own = None
            self._sums.clear()
            _put(own, merged=False)
            self.choose()

    def _set(self, states: Mapping[str, bool]) -> None:
        acting = self._strengths()
        vars(self).update(states)
        if self._strengths() != acting:  # visiting every layer takes as long as a tiny model's call
            self.choose()

    def _strengths(self) -> dict[str, float]:
        """Of the adapters in the next calls, by name."""
        learnt = 0.0 if self.untrained or self.late or self.own is None else self.strength
        start = 0.0 if self.late and self._early_start else 1 - learnt
        return {START: start} | ({self.own: learnt} if self.own is not None else {})

    def choose(self) -> None:
        """Activates the adapters of the next calls, each with its strength."""
        strengths = self._strengths()
        if not strengths.keys() & getattr(self._transformer, "peft_config", {}).keys():
            return
        if self._own is not None:
            key = (*strengths.items(),)
            if key not in self._sums:
                self._sums[key] = {
                    layer: _sum(layer, own, strengths) for layer, own in self._own.items()
                }
            _put(self._sums[key], merged=True)
            return
        for layer in self._layers():
            for name, strength in strengths.items():
                layer.set_scale(name, strength or 1.0)
            layer.set_adapter(
                [name for name, strength in strengths.items() if strength], inference_mode=True
            )
        for factor in factors_of(self._transformer, TRAINED).values():
            factor.requires_grad_(True)
        if not self._options.autocast:
            compute_as_called(self._transformer)

    def _layers(self) -> list[Any]:
        return [layer for layer in self._transformer.modules() if hasattr(layer, "lora_A")]


@torch.no_grad()
def _sum(layer: Any, own: Tensor, strengths: Mapping[str, float]) -> Tensor:
    """A layer's own weight and what adapters add to it."""
    for name, strength in strengths.items():
        if strength and name in layer.lora_A:
            layer.set_scale(name, strength)
            own = own + layer.get_delta_weight(name)
    return own


def _put(weights: Mapping[Any, Tensor], *, merged: bool) -> None:
    for layer, weight in weights.items():
        layer.weight.data = weight
        # with any name here a layer of peft calls its weight alone
        layer.merged_adapters = [TRAINED] if merged else []


class _Rounded:
    """A float32 factor of an adapter, rounded in each call to the dtype of its input."""

    weight: Tensor
    _conv_forward: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        return F.linear(x, weight) if weight.ndim == 2 else self._conv_forward(x, weight, None)


@functools.cache
def _rounded(kind: Any) -> Any:
    """Of a class of factors the one that rounds."""
    return kind if issubclass(kind, _Rounded) else type(kind.__name__, (_Rounded, kind), {})


def compute_as_called(transformer: Any) -> None:
    """Adapters compute in the dtype of their input, as under autocast; peft alone would use
    float32."""
    for module in transformer.modules():
        if hasattr(module, "lora_A"):
            module.cast_input_dtype_enabled = False
            for factor in (*module.lora_A.values(), *module.lora_B.values()):
                kind: Any = type(factor)
                factor.__class__ = _rounded(kind)
