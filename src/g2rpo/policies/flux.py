"""FLUX.1 through diffusers: the policy that trains FLUX.1-dev, and the testbed's tiny FLUX just the same."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.policies.pipelines import decode_latents, deployed_shift, load_pipeline, place
from g2rpo.policies.text import FluxText
from g2rpo.policies.tuning import Tuning, TuningMode
from g2rpo.sharding import Sharded
from g2rpo.types import Cond

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Attention projections of both streams: the modules that diffusers' own FLUX LoRA script adapts."""


class FluxPolicy:
    """A `FluxPipeline` (arXiv 2506.15742 for the architecture) as a `Policy`.

    Latents are packed 2x2: [B, tokens, 4 * channels]. `guidance_scale` feeds the guidance embedding of distilled models and
    is ignored by those without one. `truncate_timesteps` feeds the network floor(1000 sigma) / 1000, as the published code
    of G2RPO does; diffusers' pipeline does not. `published_pictures`: see `pipelines.decode_latents`. Height and width are
    pixels, multiples of 16 for FLUX's VAE.
    """

    def __init__(
        self,
        pipeline: Any,
        *,
        height: int,
        width: int,
        guidance_scale: float = 3.5,
        max_sequence_length: int = 512,
        tuning: TuningMode = "lora",
        lora_rank: int = 32,
        lora_alpha: float = 64,
        lora_targets: Sequence[str] = LORA_TARGETS,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        truncate_timesteps: bool = False,
        published_pictures: bool = False,
        vae_tiling: bool = False,
        gradient_checkpointing: bool = False,
        keep_base: bool = True,
        sharding: Sharded | None = None,
        text: FluxText | None = None,
    ) -> None:
        patch = 2 * pipeline.vae_scale_factor
        if height % patch or width % patch:
            raise ValueError(f"height and width must be multiples of {patch} for this model, got {height}x{width}")
        self.pipeline = pipeline
        self.height, self.width = height, width
        self.guidance_scale = guidance_scale
        self.max_sequence_length = max_sequence_length
        self.truncate_timesteps = truncate_timesteps
        self.published_pictures = published_pictures
        self.dtype = dtype
        self._device = torch.device(device)
        self.text = text or self.encoders(pipeline, dtype=dtype, device=device, max_sequence_length=max_sequence_length)
        self.tuning = Tuning(
            pipeline.transformer,
            tuning,
            rank=lora_rank,
            alpha=lora_alpha,
            targets=lora_targets,
            seed=seed,
            dtype=dtype,
            device=self._device,
            keep_base=keep_base,
            sharding=sharding,
        )
        place(
            pipeline,
            dtype=dtype,
            device=self._device,
            vae_tiling=vae_tiling,
            gradient_checkpointing=gradient_checkpointing,
        )
        self._latent = (pipeline.transformer.config.in_channels // 4, 2 * (height // patch), 2 * (width // patch))
        self._image_ids = pipeline._prepare_latent_image_ids(1, self._latent[1] // 2, self._latent[2] // 2, self._device, dtype)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> FluxPolicy:
        """Loads a FluxPipeline from a directory or a hub id; `options` are the constructor's."""
        return cls(cls.load_pipeline(path, dtype=dtype, **options), dtype=dtype, **options)

    @staticmethod
    def load_pipeline(path: str | Path, *, dtype: torch.dtype, **options: Any) -> Any:
        """The FluxPipeline in a directory or of a hub id, on the CPU, for a policy with these options."""
        from diffusers import FluxPipeline

        return load_pipeline(FluxPipeline, path, dtype, options.get("tuning", "lora"))

    @staticmethod
    def encoders(
        pipeline: Any, *, dtype: torch.dtype, device: torch.device | str, max_sequence_length: int = 512, **options: Any
    ) -> FluxText:
        """The text encoders of a policy with these options: they work before there is a policy, too."""
        return FluxText(pipeline, dtype=dtype, device=device, max_sequence_length=max_sequence_length)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def shift(self) -> float:
        """The time shift with which the pipeline itself samples this size."""
        return deployed_shift(self.pipeline.scheduler, len(self._image_ids))

    def encode(self, prompts: Sequence[str]) -> Cond:
        return self.text.encode(prompts)

    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        latents = torch.stack([torch.randn(self._latent, generator=generator) for generator in generators])
        return self.pipeline._pack_latents(latents, len(latents), *self._latent).to(self._device)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        timestep = sigma * 1000
        timestep = timestep.floor() if self.truncate_timesteps else timestep.to(self.dtype)  # as the pipeline rounds it
        sequence = cond.tensors["sequence"]
        guidance = None
        if self.tuning.active.config.guidance_embeds:
            guidance = torch.full((len(x),), self.guidance_scale, device=x.device)
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
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

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        latents = self.pipeline._unpack_latents(x, self.height, self.width, self.pipeline.vae_scale_factor)
        return decode_latents(self.pipeline.vae, latents, self.published_pictures)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return list(self.tuning.named().values())

    def base(self) -> AbstractContextManager[None]:
        return self.tuning.base()

    def load(self, path: Path, strength: float = 1.0) -> None:
        """Puts tuned weights to work, as `save` wrote them; `strength` scales an adapter."""
        self.tuning.load(path, self.pipeline, strength)

    def save(self, directory: Path) -> Path:
        """Writes the tuned weights in diffusers' format, and returns where."""
        return self.tuning.save(directory, type(self.pipeline))
