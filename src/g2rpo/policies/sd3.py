"""Stable Diffusion 3 and 3.5 through diffusers: true classifier-free guidance, three text encoders (the third optional)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.policies.pipelines import decode_latents, deployed_shift, load_pipeline, place
from g2rpo.policies.text import SD3Text
from g2rpo.policies.tuning import Tuning, TuningMode
from g2rpo.sharding import Sharded
from g2rpo.types import Cond

LORA_TARGETS = tuple(
    f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)
"""Projections of the joint attention: the modules that diffusers' own SD3 LoRA script adapts. SD3.5's second, image-only
attention (attn2) is not among them."""


class SD3Policy:
    """A `StableDiffusion3Pipeline` (arXiv 2403.03206) as a `Policy`.

    Latents are [B, channels, h, w]. With `guidance_scale` > 1 every row is evaluated twice in one call of 2B rows, with the
    prompt and with `negative_prompt`: v = v_negative + guidance_scale * (v_prompt - v_negative). At 1 and below there is no
    guidance and one evaluation, as in the pipeline. `truncate_timesteps` feeds the network floor(1000 sigma), as the
    published code of G2RPO does; diffusers' pipeline does not. `published_pictures`: see `pipelines.decode_latents`. Height
    and width are pixels, multiples of 16 for SD3's VAE.
    """

    def __init__(
        self,
        pipeline: Any,
        *,
        height: int,
        width: int,
        guidance_scale: float = 4.5,
        negative_prompt: str = "",
        max_sequence_length: int = 256,
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
        text: SD3Text | None = None,
    ) -> None:
        config, scale = pipeline.transformer.config, pipeline.vae_scale_factor
        patch = config.patch_size * scale
        if height % patch or width % patch:
            raise ValueError(f"height and width must be multiples of {patch} for this model, got {height}x{width}")
        if max(height, width) > patch * config.pos_embed_max_size:
            raise ValueError(
                f"this model knows positions up to {patch * config.pos_embed_max_size} pixels, got {height}x{width}"
            )
        self.pipeline = pipeline
        self.height, self.width = height, width
        self.guidance_scale = guidance_scale
        self.max_sequence_length = max_sequence_length
        self.truncate_timesteps = truncate_timesteps
        self.published_pictures = published_pictures
        self.dtype = dtype
        self._device = torch.device(device)
        self.text = text or self.encoders(
            pipeline,
            dtype=dtype,
            device=device,
            guidance_scale=guidance_scale,
            negative_prompt=negative_prompt,
            max_sequence_length=max_sequence_length,
        )
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
        self._latent = (config.in_channels, height // scale, width // scale)
        self._tokens = (height // patch) * (width // patch)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> SD3Policy:
        """Loads a StableDiffusion3Pipeline from a directory or a hub id; `options` are the constructor's."""
        return cls(cls.load_pipeline(path, dtype=dtype, **options), dtype=dtype, **options)

    @staticmethod
    def load_pipeline(path: str | Path, *, dtype: torch.dtype, **options: Any) -> Any:
        """The StableDiffusion3Pipeline in a directory or of a hub id, on the CPU, for a policy with these options."""
        from diffusers import StableDiffusion3Pipeline

        return load_pipeline(StableDiffusion3Pipeline, path, dtype, options.get("tuning", "lora"))

    @staticmethod
    def encoders(
        pipeline: Any,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        guidance_scale: float = 4.5,
        negative_prompt: str = "",
        max_sequence_length: int = 256,
        **options: Any,
    ) -> SD3Text:
        """The text encoders of a policy with these options: they work before there is a policy, too."""
        return SD3Text(
            pipeline,
            dtype=dtype,
            device=device,
            max_sequence_length=max_sequence_length,
            negative_prompt=negative_prompt,
            guided=guidance_scale > 1,
        )

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def shift(self) -> float:
        """The time shift with which the pipeline itself samples this size (on a grid of its own, see docs/models.md)."""
        return deployed_shift(self.pipeline.scheduler, self._tokens)

    @property
    def guided(self) -> bool:
        """Whether a velocity takes two evaluations."""
        return self.guidance_scale > 1

    def encode(self, prompts: Sequence[str]) -> Cond:
        return self.text.encode(prompts, guided=self.guided)

    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        return torch.stack([torch.randn(self._latent, generator=generator) for generator in generators]).to(self._device)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        timestep = sigma * 1000
        timestep = timestep.floor() if self.truncate_timesteps else timestep
        sequence, pooled = cond.tensors["sequence"], cond.tensors["pooled"]
        if self.guided:
            sequence = torch.cat([cond.tensors["negative_sequence"], sequence])
            pooled = torch.cat([cond.tensors["negative_pooled"], pooled])
            x, timestep = torch.cat([x, x]), torch.cat([timestep, timestep])
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
            v = self.tuning.active(
                hidden_states=x.to(self.dtype),
                timestep=timestep,
                pooled_projections=pooled,
                encoder_hidden_states=sequence,
                return_dict=False,
            )[0]
        if not self.guided:
            return v
        without, toward = v.float().chunk(2)  # their difference is small and is multiplied: not in bfloat16
        return without + self.guidance_scale * (toward - without)

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        return decode_latents(self.pipeline.vae, x, self.published_pictures)

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
