"""A run's model without weights, and what is known of it for several plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from g2rpo.config.schema import PolicyConfig
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.blueprint import Blueprint, build_shallow, on_meta, shapes_of, size_of
from g2rpo.models.pipelines import Shapes
from g2rpo.models.quantized import weights_of


@dataclass(frozen=True)
class Encoder:
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
    encoders: Sequence[Encoder]

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
        inside = [
            [p for p in block.parameters() if p.requires_grad] for block in self.policy.blocks
        ]
        known = {id(p) for block in inside for p in block}
        outside = [p for p in self.policy.trainable_parameters() if id(p) not in known]
        return [
            *outside,
            *(p for block, times in zip(inside, self.times, strict=True) for p in block * times),
        ]

    def total(self, of: Callable[[nn.Module], int]) -> int:
        """`of`, a sum over weights, of the whole transformer."""
        blocks = zip(self.policy.blocks, self.times, strict=True)
        return of(self.policy.transformer) + sum((times - 1) * of(block) for block, times in blocks)


@dataclass
class KnownModels:
    """Models and calls that several plans need."""

    models: dict[str, Model] = field(default_factory=dict)
    encoders: dict[tuple[str, str], Sequence[Encoder]] = field(default_factory=dict)
    calls: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """Traced calls, by what they depend on."""

    def model(self, blueprint: Blueprint, config: PolicyConfig) -> Model:
        """The model of a config. UserError for a size or option that it refuses."""
        key = config.model_dump_json()
        if key not in self.models:
            policy, times = build_shallow(blueprint, config)
            self.models[key] = Model(blueprint, policy, times, self._encoders(blueprint, config))
        return self.models[key]

    def _encoders(self, blueprint: Blueprint, config: PolicyConfig) -> Sequence[Encoder]:
        key = config.path, config.dtype
        if key not in self.encoders:
            names = [name for name in blueprint.parts if name.startswith("text_encoder")]
            self.encoders[key] = [
                _encoder(on_meta(blueprint.parts[name]), config) for name in names
            ]
        return self.encoders[key]


def _encoder(module: Any, config: PolicyConfig) -> Encoder:
    module.to(getattr(torch, config.dtype))
    # CLIP's is 77, T5 has none
    longest = getattr(module.config, "max_position_embeddings", math.inf)
    return Encoder(size_of(module), sum(p.numel() for p in module.parameters()), longest)
