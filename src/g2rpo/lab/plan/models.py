"""A run's models without weights, and what is known of them for several plans: the policy, how many
tokens a run's own prompts have where they are not padded to one length, and the memory and
operations of rewards, by what their classes say of their models (`types.Reward.model_of`)."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.core.errors import UserError, loading
from g2rpo.core.files import is_hub_id, local
from g2rpo.core.rewards import Frames
from g2rpo.lab.plan.kernels import Meter
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.blueprint import Blueprint, build_shallow, read_blueprint, shapes_of, size_of
from g2rpo.models.load import find_pipeline
from g2rpo.models.meta import on_meta
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipeline_files import index_of
from g2rpo.models.pipelines import Shapes, keep_two_blocks
from g2rpo.models.quantized import weights_of
from g2rpo.models.spec import PipelineSpec
from g2rpo.models.text import Answer, TextEncoders
from g2rpo.rewards.catalogue import RewardConfig, find_reward
from g2rpo.rewards.weights import parse_dtype


@dataclass(frozen=True)
class EncoderSize:
    """A text encoder: its size, and the most tokens that it takes."""

    bytes: int
    parameters: int
    longest: float


@dataclass(frozen=True)
class Model:
    """The policy on the meta device with two blocks of every kind, of which each stands for `times`
    of the whole one's, and the text encoders."""

    blueprint: Blueprint
    policy: DiffusersPolicy
    times: Sequence[int]
    encoders: Sequence[EncoderSize]

    @property
    def shapes(self) -> Shapes:
        return shapes_of(self.policy, self.blueprint)

    @property
    def parameters(self) -> int:
        """Parameters of the published model, without adapters."""
        return self.total(weights_of)

    @property
    def trained(self) -> list[torch.Tensor]:
        """The trained weights of the whole transformer; those of equal blocks are the same
        tensors."""
        trained, known = list[Tensor](), set[int]()
        for block, times in zip(self.policy.blocks, self.times, strict=True):
            own = [p for p in block.parameters() if p.requires_grad]
            trained += own * times
            known |= set(map(id, own))
        return [*(p for p in self.policy.trainable_parameters() if id(p) not in known), *trained]

    def total(self, of: Callable[[nn.Module], int]) -> int:
        """`of`, a sum over weights, of the whole transformer."""
        blocks = zip(self.policy.blocks, self.times, strict=True)
        return of(self.policy.transformer) + sum((times - 1) * of(block) for block, times in blocks)


@dataclass
class KnownModels:
    """Models and calls that several plans need."""

    models: dict[str, Model] = field(default_factory=dict)
    encoders: dict[tuple[str, str], Sequence[EncoderSize]] = field(default_factory=dict)
    calls: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """Traced calls, by what they depend on."""

    def model(self, blueprint: Blueprint, config: PolicyConfig) -> Model:
        """The model of a config. UserError for a size or option that it refuses."""
        key = config.model_dump_json()
        if key not in self.models:
            policy, times = build_shallow(blueprint, config)
            self.models[key] = Model(blueprint, policy, times, self._encoders(blueprint, config))
        return self.models[key]

    def _encoders(self, blueprint: Blueprint, config: PolicyConfig) -> Sequence[EncoderSize]:
        key = config.path, config.dtype
        if key not in self.encoders:
            names = [name for name in blueprint.parts if name.startswith("text_encoder")]
            self.encoders[key] = [
                _encoder(on_meta(blueprint.parts[name]), config) for name in names
            ]
        return self.encoders[key]


def _encoder(module: Any, config: PolicyConfig) -> EncoderSize:
    module.to(getattr(torch, config.dtype))
    # CLIP's is 77, T5 has none
    longest = getattr(module.config, "max_position_embeddings", math.inf)
    return EncoderSize(size_of(module), weights_of(module), longest)


LONGEST_PROMPTS = 32
"""Prompts whose tokens are counted: those with the most characters."""


def longest_prompt(config: PolicyConfig, prompts: Sequence[str]) -> int | None:
    """The tokens of the longest prompt, as the pipeline's own call encodes it with the tokenizer on
    this machine. None where the model pads (or reads input pictures, whose tokens are assumed), is
    not on this machine, or needs more than zeros in the place of its text encoder; UserError if the
    pipeline or its tokenizer fails."""
    path = str(local(config.path))
    index = index_of(path) if os.path.isdir(path) or is_hub_id(path) else None
    if index is None or not prompts:
        return None
    spec, folder = find_pipeline(config).spec, index.parent
    padded = not (spec.masks or spec.lists or spec.ragged)
    if spec.pictured or padded or not (folder / "tokenizer").is_dir():
        return None
    try:
        return _counted(config, spec, folder, sorted(set(prompts), key=len)[-LONGEST_PROMPTS:])
    except Exception as error:  # of tokenizers and pipelines, which are the library's or the user's
        raise UserError(
            f"{config.path}: the tokens of the prompts cannot be counted ({error})"
        ) from error


def _counted(config: PolicyConfig, spec: PipelineSpec, folder: Path, prompts: Sequence[str]) -> int:
    from transformers import AutoTokenizer

    policy, _ = build_shallow(read_blueprint(config), config)
    parts: dict[str, Any] = {}
    for place in filter(Path.is_dir, folder.iterdir()):
        if place.name.startswith("tokenizer"):
            parts[place.name] = AutoTokenizer.from_pretrained(str(place))
        elif place.name.startswith("text_encoder"):
            parts[place.name] = _Zeros()
    policy.pipeline.register_modules(**parts)
    encoders = TextEncoders(policy.pipeline, spec, config, "cpu")
    rows = [encoders.encode([prompt], guided=False).ragged for prompt in prompts]
    return max(len(row[name][0]) for row in rows for name in row.keys() & spec.widths)


class _Zeros(nn.Module):
    """In the place of a text encoder: a zero for every token."""

    dtype, device = torch.float32, torch.device("cpu")

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return Answer(torch.zeros(*input_ids.shape, 1))


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
    found = find_reward(f"rewards.{entry.kind}", entry)
    kind: Any = found.declared
    given = {**entry.options, "device": entry.options.get("device", device)}
    options = {name: given.get(name, default) for name, default in found.defaults.items()}
    device, dtype = str(options.pop("device", "cpu")), str(options.pop("dtype", "float32"))
    measured = _measured(kind, json.dumps(options, sort_keys=True, default=str))
    if measured is None:
        return None
    parameters, flops = measured
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
            for block, count in zip(itertools.chain(*lists), times, strict=True):
                block.register_forward_pre_hook(lambda *_, count=count: entered.append(count))
                block.register_forward_hook(lambda *_: entered.pop() and None)
    with torch.no_grad(), Meter(times=lambda: math.prod(entered)) as meter:
        run()
    return sum(kernel.times * kernel.flops for kernel in meter.kernels)
