"""What policies of diffusers pipelines have in common: loading, placing the parts, the deployed shift, decoding."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from g2rpo.policies.tuning import TuningMode


def load_pipeline(pipeline_class: Any, path: str | Path, dtype: torch.dtype, tuning: TuningMode = "lora") -> Any:
    """A pipeline in `dtype` from a directory or a hub id; parts that its index leaves empty (SD3 without T5) stay empty.

    A transformer that is trained whole is float32: rounded to `dtype` on its way, the masters would start elsewhere.
    """
    index = pipeline_class.load_config(str(path))
    empty = {name: None for name, entry in index.items() if entry == [None, None]}
    dtypes = {"transformer": torch.float32 if tuning == "full" else dtype, "default": dtype}
    pipeline = pipeline_class.from_pretrained(str(path), dtype=dtypes, use_safetensors=True, **empty)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def place(pipeline: Any, *, dtype: torch.dtype, device: torch.device, vae_tiling: bool, gradient_checkpointing: bool) -> None:
    """Moves the transformer, which `Tuning` looks after, and the VAE, frozen in `dtype`, to `device`."""
    pipeline.vae.requires_grad_(False).eval().to(dtype)
    pipeline.transformer.to(device)
    pipeline.vae.to(device)
    pipeline.vae.to(memory_format=torch.channels_last)  # convolutions on interleaved channels are faster, on CPU and GPU
    pipeline.transformer.eval()  # the models have no dropout; eval keeps adapters without it too
    if vae_tiling:
        pipeline.vae.enable_tiling()
    if gradient_checkpointing:
        pipeline.transformer.enable_gradient_checkpointing()


def decode_latents(vae: Any, latents: Tensor, published: bool = False) -> Tensor:
    """Images [B, 3, H, W], float32 in [0, 1], of unpacked latents [B, channels, h, w] at sigma = 0.

    `published` is how the published code of G2RPO decodes: a bfloat16 VAE under autocast, which on a GPU computes its norms in
    float32, and x / 2 + 1 / 2 in the dtype of the VAE's answer, as diffusers' image processor does.
    """
    latents = latents / vae.config.scaling_factor + vae.config.shift_factor
    autocast = published and vae.dtype != torch.float32 and not latents.is_meta  # torch has none for the meta device
    with torch.autocast(latents.device.type, vae.dtype) if autocast else nullcontext():
        images = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
    return ((images if published else images.float()) / 2 + 0.5).clamp(0, 1).float()


def deployed_shift(scheduler: Any, tokens: int) -> float:
    """The `shift` of `flow.sigma_grid` that the pipeline's own scheduler uses for pictures of `tokens` image tokens.

    Either a constant, or FLUX's dynamic one: mu is linear in the number of tokens, and a time shift by mu is SD3's
    with shift = exp(mu).
    """
    config = scheduler.config
    if not config.use_dynamic_shifting:
        return float(config.shift)
    slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
    mu = config.base_shift + slope * (tokens - config.base_image_seq_len)
    return math.exp(mu) if config.time_shift_type == "exponential" else mu
