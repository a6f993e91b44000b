"""Stable Diffusion 3 and 3.5 through diffusers: true classifier-free guidance, three text encoders (the third optional)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from g2rpo.policies.options import PolicyOptions
from g2rpo.policies.pipelines import PipelinePolicy, Shapes, decode_latents
from g2rpo.policies.text import SD3Text
from g2rpo.types import Cond

LORA_TARGETS = tuple(
    f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)
"""Projections of the joint attention: the modules that diffusers' own SD3 LoRA script adapts. SD3.5's second, image-only
attention (attn2) is not among them."""


class SD3Policy(PipelinePolicy):
    """A `StableDiffusion3Pipeline` (arXiv 2403.03206) as a `Policy`.

    Latents are [B, channels, h, w]. With `guidance_scale` > 1 every row is evaluated twice in one call of 2B rows, with the
    prompt and with `negative_prompt`: v = v_negative + guidance_scale * (v_prompt - v_negative). At 1 and below there is no
    guidance and one evaluation, as in the pipeline. Height and width are multiples of 16 for SD3's VAE. The pipeline has its
    own sigma grid (docs/models.md).
    """

    pipeline_class = "StableDiffusion3Pipeline"
    lora_targets = LORA_TARGETS
    guidance = 4.5
    tokens = 256
    unsupported = ("num_frames",)

    def __init__(self, pipeline: Any, **options: Any) -> None:
        super().__init__(pipeline, **options)
        scale, o = pipeline.vae_scale_factor, self.options
        self._latent = (pipeline.transformer.config.in_channels, o.height // scale, o.width // scale)

    @classmethod
    def encoders(cls, pipeline: Any, **options: Any) -> SD3Text:
        o = PolicyOptions(**options)
        return SD3Text(
            pipeline,
            dtype=o.dtype,
            device=o.device,
            max_sequence_length=o.max_sequence_length or cls.tokens,
            negative_prompt=o.negative_prompt or "",
            guided=(cls.guidance if o.guidance_scale is None else o.guidance_scale) > 1,
        )

    @property
    def _patch(self) -> int:
        """Pixels of a token's side."""
        return self.pipeline.transformer.config.patch_size * self.pipeline.vae_scale_factor

    def check_size(self, height: int, width: int) -> None:
        patch, most = self._patch, self._patch * self.pipeline.transformer.config.pos_embed_max_size
        if height % patch or width % patch:
            raise ValueError(f"height and width must be multiples of {patch} for this model, got {height}x{width}")
        if max(height, width) > most:
            raise ValueError(f"this model has position embeddings up to {most} pixels, got {height}x{width}")

    @property
    def image_tokens(self) -> int:
        return (self.options.height // self._patch) * (self.options.width // self._patch)

    def shapes(self, clip_tokens: int) -> Shapes:
        """A prompt is CLIP's and T5's tokens, one after the other."""
        config, text = self.pipeline.transformer.config, self.max_sequence_length + clip_tokens
        cond: dict[str, tuple[int, ...]] = {
            "sequence": (text, config.joint_attention_dim),
            "pooled": (config.pooled_projection_dim,),
        }
        if self.guided:
            cond |= {f"negative_{name}": shape for name, shape in cond.items()}
        return Shapes(self._latent, cond, self.image_tokens, text, 2 if self.guided else 1)

    @property
    def guided(self) -> bool:
        """Whether guidance takes two network rows per velocity."""
        return self.guidance_scale > 1

    def encode(self, prompts: Sequence[str]) -> Cond:
        return self.text.encode(prompts, guided=self.guided)  # the demo changes the scale

    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        return torch.stack([torch.randn(self._latent, generator=generator) for generator in generators]).to(self._device)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        timestep = sigma * 1000
        timestep = timestep.floor() if self.truncates else timestep
        sequence, pooled = cond.tensors["sequence"], cond.tensors["pooled"]
        if self.guided:
            sequence = torch.cat([cond.tensors["negative_sequence"], sequence])
            pooled = torch.cat([cond.tensors["negative_pooled"], pooled])
            x, timestep = torch.cat([x, x]), torch.cat([timestep, timestep])
        with torch.autocast(x.device.type, self.dtype, enabled=self.autocast):
            v = self.tuning.active(
                hidden_states=x.to(self.dtype),
                timestep=timestep,
                pooled_projections=pooled,
                encoder_hidden_states=sequence,
                return_dict=False,
            )[0]
        if not self.guided:
            return v
        without, toward = v.float().chunk(2)  # the small difference is amplified, so it is taken in float32
        without = without.detach() if self.options.detach_negative else without
        return without + self.guidance_scale * (toward - without)

    def decode(self, x: Tensor) -> Tensor:
        return decode_latents(self.pipeline.vae, x, self.options.published_pictures)
