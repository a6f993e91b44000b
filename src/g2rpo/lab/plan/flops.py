"""Floating-point operations of a transformer: torch's own count of one traced evaluation, whatever the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from g2rpo.assembly.blueprint import Blueprint, shapes_of
from g2rpo.config.schema import Config
from g2rpo.lab.plan.trace import inputs, shallow_policy

ATTENTION = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
"""Queries with keys and weights with values, where attention is computed in steps."""


def _product(left: tuple[int, int], right: tuple[int, int], *_: Any, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[1]


FLOAT8 = {torch.ops.aten._scaled_mm_v2: _product} if hasattr(torch.ops.aten, "_scaled_mm_v2") else {}
"""Products that torch's counter has no formula for: those of `policies.quantized.Float8Linear`."""


@dataclass(frozen=True)
class Operations:
    """Of one evaluation, with all its network rows: products with weights, of attention, and with weights that are trained."""

    linear: float
    attention: float
    trained: float

    @property
    def forward(self) -> float:
        return self.linear + self.attention

    def training(self, checkpointed: bool, attention_backward: float = 2.5) -> float:
        """Of one row of the training pass.

        Forward, once more if blocks are checkpointed; backward through every layer (as much as forward), and again for the
        weights that are trained. Flash attention's backward recomputes the scores: five products where forward has two.
        """
        forward = (2 if checkpointed else 1) * self.forward
        return forward + self.linear + self.trained + attention_backward * self.attention


def operations(blueprint: Blueprint, config: Config) -> Operations:
    """Traces one evaluation of a shallow copy of the model, whose blocks represent all blocks."""
    with shallow_policy(blueprint, config) as (policy, times), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False, custom_mapping=FLOAT8) as counter:
            policy.velocity(*inputs(policy, shapes_of(policy, blueprint), 1))
        transformer = policy.pipeline.transformer
        standing = dict(zip(policy.blocks, times, strict=True))
        return _summed(transformer, counter.get_flop_counts(), standing, config.policy.tuning == "full")


def _summed(transformer: nn.Module, counts: Mapping[str, Any], standing: Mapping[nn.Module, int], full: bool) -> Operations:
    """Counts by module name, where a block counts as often as it stands for others."""
    root, linear, attention, trained = type(transformer).__name__, 0.0, 0.0, 0.0
    often = {name: standing[module] for name, module in transformer.named_modules() if module in standing}
    for name, factor in {"": 1, **{name: factor - 1 for name, factor in often.items()}}.items():
        own = counts.get(f"{root}.{name}" if name else root, {})
        attention += factor * sum(flops for op, flops in own.items() if op in ATTENTION)
        linear += factor * sum(flops for op, flops in own.items() if op not in ATTENTION)
    for name, module in transformer.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.requires_grad:
            factor = next((times for block, times in often.items() if name.startswith(f"{block}.")), 1)
            trained += factor * sum(counts.get(f"{root}.{name}", {}).values())
    return Operations(linear, attention, linear if full else trained)
