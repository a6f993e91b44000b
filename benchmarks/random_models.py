"""Models of published shapes with random weights, which cost what trained ones do, and of the same
classes at a tiny size."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.core.data import Cond
from g2rpo.core.noise import generator_for
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.blueprint import Blueprint, published

DEPTHS = ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers")
"""How transformers call their numbers of blocks."""
_FLUX = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32}
_QWEN = {**_FLUX, "axes_dims_rope": (8, 4, 4)}
_VAE = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1}
_CLIPS = {"base_dim": 4, "num_res_blocks": 1}
TINY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FluxTransformer2DModel": (
        {**_FLUX, "pooled_projection_dim": 16, "axes_dims_rope": (4, 6, 6)},
        _VAE,
    ),
    "Flux2Transformer2DModel": (
        {**_FLUX, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16},
        _VAE,
    ),
    "SD3Transformer2DModel": (
        {**_FLUX, "caption_projection_dim": 32, "pooled_projection_dim": 16},
        _VAE,
    ),
    "QwenImageTransformer2DModel": (_QWEN, _CLIPS),
    "ZImageTransformer2DModel": (
        {"dim": 32, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 16, "axes_dims": [8, 4, 4]},
        _VAE,
    ),
    "WanTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 16,
        },
        _CLIPS,
    ),
}
"""What is smaller in a tiny transformer and its VAE."""


def shape_of(path: str, tiny: bool, blocks: int | None = None) -> Blueprint:
    """The blueprint of a hub id's transformer and VAE, with at most so many blocks of every
    kind."""
    import diffusers

    blueprint = published(path)
    assert blueprint is not None, path
    (transformer, wide), (vae, decoder) = (blueprint.parts[name] for name in ("transformer", "vae"))
    name = transformer.removeprefix("diffusers:")
    less, smaller = TINY[name] if tiny else ({}, {})
    usual = inspect.signature(getattr(diffusers, name).__init__).parameters
    depths = {key: wide.get(key, usual[key].default) for key in DEPTHS if key in usual}
    less = {**less, **{key: min(depth, blocks or depth) for key, depth in depths.items()}}
    return replace(
        blueprint,
        parts={
            "transformer": (transformer, {**wide, **less}),
            "vae": (vae, {**decoder, **smaller}),
        },
    )


def random_pipeline(blueprint: Blueprint, device: torch.device, dtype: torch.dtype) -> Any:
    """The pipeline, drawn on the device itself: 24 GB never pass through the host."""
    import diffusers

    kind = getattr(diffusers, blueprint.kind)
    parameters = inspect.signature(kind).parameters.values()
    absent = {each.name: None for each in parameters if each.default is inspect.Parameter.empty}
    models = {
        name: _drawn(getattr(diffusers, part.removeprefix("diffusers:")), config, device, dtype)
        for name, (part, config) in blueprint.parts.items()
    }
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return kind(**{**absent, **blueprint.options, **models, "scheduler": scheduler})


@torch.no_grad()
def _drawn(kind: Any, config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    from accelerate import init_empty_weights  # which peft needs

    # buffers are computed: positions, and a VAE's statistics
    with init_empty_weights(include_buffers=False):
        model = kind.from_config(config)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            made = torch.empty(parameter.shape, dtype=dtype, device=device)
            if made.ndim > 1:
                made.normal_(std=0.5 * made[0].numel() ** -0.5)
            else:
                made.fill_(1.0 if name == "weight" else 0.0)
            setattr(module, name, nn.Parameter(made))
    return model.to(device)


class RandomText:
    """Random embeddings of the true shape, in the place of text encoders."""

    def __init__(self, policy: DiffusersPolicy) -> None:
        self.policy, self.device = policy, policy.device

    def at_work(self) -> AbstractContextManager[None]:
        """There is nothing to move."""
        return nullcontext()

    def park(self) -> None:
        """There is nothing to move."""

    def encode(self, prompts: Sequence[str]) -> Cond:
        blank = self.policy.like(self.policy.shapes(clip_tokens=77), len(prompts))
        tensors = {
            name: torch.stack(_random(name, value.unbind(), prompts))
            for name, value in blank.tensors.items()
        }
        return Cond(
            tensors,
            {name: tuple(_random(name, value, prompts)) for name, value in blank.ragged.items()},
        ).to(self.device)


def _random(name: str, like: Sequence[Tensor], prompts: Sequence[str]) -> list[Tensor]:
    """Rows of normal numbers in the shapes and dtypes of `like`, each of its prompt; integers,
    which are places, stay."""
    return [
        torch.randn(row.shape, generator=generator_for(prompt, name)).to(row.dtype)
        if row.is_floating_point() and row.numel()
        else row
        for row, prompt in zip(like, prompts, strict=True)
    ]
