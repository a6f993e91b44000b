"""FLUX.1 through diffusers: the policy of FLUX.1-dev and of the testbed's tiny FLUX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from g2rpo.policies.options import PolicyOptions
from g2rpo.policies.pipelines import PipelinePolicy, Shapes, decode_latents
from g2rpo.policies.text import FluxText
from g2rpo.types import Cond

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Attention projections of both streams: the modules that diffusers' own FLUX LoRA script adapts."""


class FluxPolicy(PipelinePolicy):
    """A `FluxPipeline` (arXiv 2506.15742 for the architecture) as a `Policy`.

    Latents are packed 2x2: [B, tokens, 4 * channels]. `guidance_scale` feeds the guidance embedding of distilled models and
    is ignored by those without one. Height and width are multiples of 16 for FLUX's VAE.
    """

    pipeline_class = "FluxPipeline"
    lora_targets = LORA_TARGETS
    guidance = 3.5
    tokens = 512
    unsupported = ("negative_prompt", "num_frames", "detach_negative")

    def __init__(self, pipeline: Any, **options: Any) -> None:
        super().__init__(pipeline, **options)
        patch, o = 2 * pipeline.vae_scale_factor, self.options
        self._latent = (pipeline.transformer.config.in_channels // 4, 2 * (o.height // patch), 2 * (o.width // patch))
        grid = self._latent[1] // 2, self._latent[2] // 2
        self._image_ids = pipeline._prepare_latent_image_ids(1, *grid, self._device, o.dtype)

    @classmethod
    def encoders(cls, pipeline: Any, **options: Any) -> FluxText:
        o = PolicyOptions(**options)
        return FluxText(pipeline, dtype=o.dtype, device=o.device, max_sequence_length=o.max_sequence_length or cls.tokens)

    def check_size(self, height: int, width: int) -> None:
        patch = 2 * self.pipeline.vae_scale_factor
        if height % patch or width % patch:
            raise ValueError(f"height and width must be multiples of {patch} for this model, got {height}x{width}")

    @property
    def image_tokens(self) -> int:
        return len(self._image_ids)

    def shapes(self, clip_tokens: int) -> Shapes:
        config, text = self.pipeline.transformer.config, self.max_sequence_length
        cond = {"sequence": (text, config.joint_attention_dim), "pooled": (config.pooled_projection_dim,)}
        return Shapes((self.image_tokens, config.in_channels), cond, self.image_tokens, text, 1)

    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        latents = torch.stack([torch.randn(self._latent, generator=generator) for generator in generators])
        return self.pipeline._pack_latents(latents, len(latents), *self._latent).to(self._device)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        timestep = sigma * 1000
        timestep = timestep.floor() if self.truncates else timestep.to(self.dtype)  # as the pipeline rounds it
        sequence = cond.tensors["sequence"]
        guidance = None
        if self.tuning.active.config.guidance_embeds:
            guidance = torch.full((len(x),), self.guidance_scale, device=x.device)
        with torch.autocast(x.device.type, self.dtype, enabled=self.autocast):
            return self.tuning.active(
                hidden_states=x.to(self.dtype),
                timestep=timestep / 1000,
                guidance=guidance,
                pooled_projections=cond.tensors["pooled"],
                encoder_hidden_states=sequence,
                txt_ids=torch.zeros(sequence.shape[1], 3, device=x.device, dtype=self.dtype),
                img_ids=self._image_ids,
                return_dict=False,
            )[0]

    def decode(self, x: Tensor) -> Tensor:
        o = self.options
        latents = self.pipeline._unpack_latents(x, o.height, o.width, self.pipeline.vae_scale_factor)
        return decode_latents(self.pipeline.vae, latents, o.published_pictures)
