"""Models of published shapes with random weights, which cost what trained ones do, and of the same classes at a tiny size."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from g2rpo.assembly.blueprint import Blueprint, on_meta, published
from g2rpo.core.data import Cond
from g2rpo.core.seeding import generator_for
from g2rpo.policies.anyflow import DiffusersPolicy

MODELS = {
    "flux1-dev": published("black-forest-labs/FLUX.1-dev"),
    "klein-4b": published("black-forest-labs/FLUX.2-klein-base-4B"),
}
_SMALL = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
}
TINY: dict[str, dict[str, dict[str, Any]]] = {
    "flux1-dev": {
        "transformer": {**_SMALL, "pooled_projection_dim": 16, "axes_dims_rope": (4, 6, 6)},
        "vae": {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1},
    },
    "klein-4b": {
        "transformer": {**_SMALL, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16},
        "vae": {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1},
    },
}


def shape_of(model: str, tiny: bool, **changes: int) -> Blueprint:
    """A model's blueprint without text encoders; `changes` are of its transformer."""
    blueprint = MODELS[model]
    assert blueprint is not None
    less = TINY[model] if tiny else {"transformer": {}, "vae": {}}
    less = {**less, "transformer": {**less["transformer"], **changes}}
    parts = {name: (blueprint.parts[name][0], {**blueprint.parts[name][1], **less[name]}) for name in less}
    return replace(blueprint, parts=parts)


def random_pipeline(blueprint: Blueprint, device: torch.device, dtype: torch.dtype) -> Any:
    """The pipeline, drawn on the device itself: 24 GB never pass through the host."""
    import diffusers

    kind = getattr(diffusers, blueprint.kind)
    parameters = inspect.signature(kind).parameters.values()
    absent = {each.name: None for each in parameters if each.default is inspect.Parameter.empty}
    models = {name: _drawn(on_meta(part), device, dtype) for name, part in blueprint.parts.items()}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return kind(**{**absent, **blueprint.options, **models, "scheduler": scheduler})


@torch.no_grad()
def _drawn(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    model = model.to(dtype).to_empty(device=device)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.5 * parameter[0].numel() ** -0.5)
        else:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
    for name, buffer in model.named_buffers():  # of a VAE's batch norm
        buffer.fill_(1 if name.endswith("var") else 0)
    return model


class RandomText:
    """Random embeddings of the true shape, in the place of text encoders."""

    def __init__(self, policy: DiffusersPolicy) -> None:
        self.policy, self.device = policy, policy.device

    def park(self) -> None:
        """There is nothing to move."""

    def encode(self, prompts: Sequence[str]) -> Cond:
        blank = self.policy.like(self.policy.shapes(clip_tokens=77), len(prompts))
        if blank.ragged:
            raise ValueError(f"a {type(self.policy).__name__} keeps prompts of different lengths, which are not drawn here")
        return Cond({name: _random(name, value, prompts) for name, value in blank.tensors.items()}).to(self.device)


def _random(name: str, like: Tensor, prompts: Sequence[str]) -> Tensor:
    """Rows of normal numbers in the shape and dtype of `like`, each of its prompt; integers, which are places, stay."""
    if not like.is_floating_point():
        return like
    shape = like.shape[1:]
    drawn = [torch.randn(shape, generator=generator_for(prompt, name)) for prompt in prompts]
    return torch.stack(drawn).to(like.dtype) if math.prod(shape) else like
