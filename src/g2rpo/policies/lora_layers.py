"""Adapters inside a diffusers transformer: added, read and set as peft has them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from g2rpo.core.errors import UserError
from g2rpo.policies.adapters import DOWN, PREFIX, UP, Adapter


def check_targets(transformer: nn.Module, targets: Sequence[str]) -> None:
    """UserError for a transformer without linear layers or convolutions of these names, which adapters change."""
    names = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    if not any(name == end or name.endswith(f".{end}") for name in names for end in targets):
        ends = dict.fromkeys(re.sub(r".*\.(?=[a-z])", "", name) for name in names if re.search(r"\.\d+\.", name))
        raise UserError(
            f"policy.lora_targets: no layer of a {type(transformer).__name__} is named {', '.join(targets)[:200]}; "
            f"those of its blocks are {', '.join(ends)[:300]}. Or set policy.tuning=full"
        )


def factors_of(transformer: nn.Module, adapter: str) -> dict[str, nn.Linear]:
    """The factors of an adapter by module and which of the two."""
    return {
        f"{name}{end}": getattr(layer, end[1:7])[adapter]
        for name, layer in transformer.named_modules()
        for end in (DOWN, UP)
        if adapter in getattr(layer, end[1:7], ())
    }


def inject(transformer: Any, name: str, config: Any) -> None:
    """Adds an adapter as peft initialises it."""
    if hasattr(transformer, "add_adapter"):
        transformer.add_adapter(config, name)
    else:  # diffusers has no adapters for it (PRX)
        from peft import inject_adapter_in_model

        inject_adapter_in_model(config, transformer, name)


def add_frozen(transformer: Any, name: str, adapter: Adapter, dtype: torch.dtype) -> None:
    """Adds a frozen adapter."""
    device = transformer.device
    if hasattr(transformer, "load_lora_adapter"):
        transformer.load_lora_adapter(
            adapter.tensors(PREFIX), adapter_name=name, low_cpu_mem_usage=True
        )  # draws no values first
    else:
        from peft import LoraConfig, set_peft_model_state_dict

        ranks = {module: len(down) for module, (down, _) in adapter.layers.items()}
        inject(transformer, name, LoraConfig(target_modules=list(ranks), rank_pattern=ranks, alpha_pattern=ranks))
        set_peft_model_state_dict(transformer, adapter.tensors(""), name)
    for factor in factors_of(transformer, name).values():
        factor.to(device, dtype)


def fill(factors: Mapping[str, nn.Linear], start: Adapter, scale: float) -> None:
    """Puts an adapter's values into an untrained one. Ranks and modules that it lacks stay at no change."""
    for module, (down, up) in start.layers.items():
        if module + DOWN not in factors or len(down) > len(factors[module + DOWN].weight):
            raise UserError(f"policy.adapter: its {module} of rank {len(down)} is not in policy.lora_rank and lora_targets")
        into, out = factors[module + DOWN].weight.data, factors[module + UP].weight.data
        into[: len(down)] = down.to(into.device)
        out[:, : len(down)] = (up / scale).to(out.device)


class _Factor(nn.Linear):
    """A float32 factor of an adapter, rounded in each call to the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def compute_as_called(transformer: Any) -> None:
    """Adapters compute in the dtype of their input, as under autocast; peft alone would use float32."""
    for module in transformer.modules():
        if hasattr(module, "lora_A"):
            module.cast_input_dtype_enabled = False
            for factor in (*module.lora_A.values(), *module.lora_B.values()):
                factor.__class__ = _Factor
