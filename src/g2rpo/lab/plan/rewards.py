"""Memory and operations of rewards, by what their classes say of their models
(`types.Reward.model_of`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from g2rpo.core.errors import loading
from g2rpo.core.types import Frames
from g2rpo.lab.plan.meter import Meter
from g2rpo.models.blueprint import size_of
from g2rpo.models.pipelines import keep_two_blocks
from g2rpo.rewards.catalogue import declared_by, defaults_of, reward_kind
from g2rpo.rewards.options import RewardConfig
from g2rpo.rewards.weights import parse_dtype


@dataclass(frozen=True)
class RewardCost:
    """A reward's weights in bytes, its device, and its floating-point operations for one picture or
    clip in `dtype`."""

    bytes: int
    flops: float
    device: str
    dtype: str


def cost_of_reward(entry: RewardConfig, device: str, length: int = 1) -> RewardCost | None:
    """The cost of one reward on `device`, unless its options name another; None if it is unknown.

    `length`: frames of a clip, of which the scored ones are counted. Preprocessing on the CPU is
    not counted.
    """
    kind: Any = declared_by(reward_kind(entry.kind, entry))
    given = {**entry.options, "device": entry.options.get("device", device)}
    options = {name: given.get(name, default) for name, default in defaults_of(kind).items()}
    model_options = {
        name: value for name, value in options.items() if name not in ("device", "dtype")
    }
    if (
        measured := _measured(kind, json.dumps(model_options, sort_keys=True, default=str))
    ) is None:
        return None
    parameters, flops = measured
    device, dtype = str(options.get("device", "cpu")), str(options.get("dtype", "float32"))
    frames = (entry.frames or Frames()).of(length)
    return RewardCost(parameters * parse_dtype(dtype).itemsize, frames * flops, device, dtype)


@cache  # `fit` needs the same rewards repeatedly
def _measured(kind: Any, options: str) -> tuple[int, float] | None:
    """Parameters of a reward's model, and its operations for one picture; `options` is JSON."""
    with torch.device("meta"), loading(f"the plan of reward {kind.__name__}"):
        if (model := kind.model_of(json.loads(options))) is None:
            return None
        size = sum(map(size_of, model.networks))  # in float32
        return size // 4 + model.parameters, count_flops(model.networks, model.score) + model.flops


def count_flops(networks: Sequence[nn.Module], run: Callable[[], Any]) -> float:
    """Floating-point operations of `run`, which calls `networks`. They lose all but two of equal
    blocks, which stand for the others."""
    entered: list[int] = []
    for network in networks:
        for module in list(network.modules()):
            lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
            times = keep_two_blocks(module)
            for block, count in zip(
                (block for each in lists for block in each), times, strict=True
            ):
                block.register_forward_pre_hook(lambda *_, count=count: entered.append(count))
                block.register_forward_hook(lambda *_: entered.pop() and None)
    with torch.no_grad(), Meter(times=lambda: math.prod(entered)) as meter:
        run()
    return sum(kernel.times * kernel.flops for kernel in meter.kernels)
