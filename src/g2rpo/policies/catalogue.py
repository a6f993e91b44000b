"""The pipelines of diffusers that `DiffusersPolicy` can run, each described in a few lines."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from g2rpo.policies.anyflow import ATTENTION, DiffusersPolicy
from g2rpo.policies.options import PolicyOptions

Sizes = dict[str, tuple[int, ...]]
VIDEOS = DiffusersPolicy.unsupported
PICTURES = ("num_frames", *VIDEOS)
"""Options that models of videos, and of pictures, do not have."""


class Flux(DiffusersPolicy):
    """FLUX.1. `FluxPolicy` is the same model by hand, and faster where networks are tiny."""

    pipeline_class = "FluxPipeline"
    encoded = ("prompt_embeds", "pooled_prompt_embeds", "text_ids")
    unguided = None
    guidance = 3.5
    tokens = 512
    unsupported = (*PICTURES, "negative_prompt")

    def widths(self) -> Sizes:
        return {"prompt_embeds": (self.config.joint_attention_dim,), "text_ids": (3,)}

    def pooled(self) -> Sizes:
        return {"pooled_prompt_embeds": (self.config.pooled_projection_dim,)}


class StableDiffusion3(DiffusersPolicy):
    """Stable Diffusion 3 and 3.5. `SD3Policy` is the same model by hand."""

    pipeline_class = "StableDiffusion3Pipeline"
    encoded = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    guidance = 4.5
    tokens = 256
    unsupported = PICTURES

    @property
    def multiple(self) -> int:
        return self.config.patch_size * super().multiple

    def widths(self) -> Sizes:
        return {"prompt_embeds": (self.config.joint_attention_dim,)}

    def pooled(self) -> Sizes:
        return {"pooled_prompt_embeds": (self.config.pooled_projection_dim,)}

    def text_tokens(self, clip_tokens: int) -> int:
        """A prompt is CLIP's and T5's tokens, one after the other."""
        return self.max_sequence_length + clip_tokens


class Flux2(DiffusersPolicy):
    """FLUX.2-dev: the scale is an input of the network."""

    pipeline_class = "Flux2Pipeline"
    encoded = ("prompt_embeds", "text_ids")
    dtypes = {"text_ids": torch.int64}
    shared = ()
    unguided: ClassVar[float | None] = None
    guidance = 4.0
    tokens = 512
    lora_targets = (*ATTENTION, "to_qkv_mlp_proj")
    unsupported = (*PICTURES, "negative_prompt")

    def widths(self) -> Sizes:
        return {"prompt_embeds": (self.config.joint_attention_dim,), "text_ids": (4,)}


class Flux2Klein(Flux2):
    """FLUX.2-klein: classifier-free guidance from an empty prompt; distilled ones ignore the scale."""

    pipeline_class = "Flux2KleinPipeline"
    unguided = 1.0

    @classmethod
    def is_guided(cls, pipeline: Any, scale: float | None) -> bool:
        return super().is_guided(pipeline, scale) and not pipeline.config.is_distilled


class QwenImage(DiffusersPolicy):
    """Qwen-Image: guided velocities have the norm of the prompt's, token by token."""

    pipeline_class = "QwenImagePipeline"
    encoded = ("prompt_embeds", "prompt_embeds_mask")
    masks = {"prompt_embeds": "prompt_embeds_mask"}
    scale = "true_cfg_scale"
    guidance = 4.0
    tokens = 512
    unsupported = PICTURES

    def widths(self) -> Sizes:
        return {"prompt_embeds": (self.config.joint_attention_dim,)}


class ZImage(DiffusersPolicy):
    """Z-Image: v + scale (v - v_negative), so that 0 is without guidance."""

    pipeline_class = "ZImagePipeline"
    encoded = ("prompt_embeds", "negative_prompt_embeds")
    lists = ("prompt_embeds",)
    unguided = 0.0
    guidance = 5.0
    tokens = 512
    fixed = {"cfg_truncation": None}  # the pipeline would compare a time for all rows with it
    unsupported = PICTURES

    def widths(self) -> Sizes:
        return {"prompt_embeds": (self.config.cap_feat_dim,)}


class FluxKontext(Flux):
    """FLUX.1-Kontext: the input picture's tokens stand behind the picture's own. Its scale is an input of the network."""

    pipeline_class = "FluxKontextPipeline"
    shared = ("text_ids", "image_ids")
    pictured = ("image_latents", "", "image_ids")

    @classmethod
    def arguments(cls, pipeline: Any, o: PolicyOptions, **changes: Any) -> dict[str, Any]:
        return {**super().arguments(pipeline, o, **changes), "max_area": o.height * o.width}  # else it would change the size

    def beside(self) -> Sizes:
        tokens = (1024 // self.multiple) ** 2
        return {"image_latents": (tokens, self.config.in_channels), "image_ids": (tokens, 3)}


class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit: the text encoder sees the input picture too."""

    pipeline_class = "QwenImageEditPipeline"
    pictured = ("image_latents",)
    seen = True
    picture_tokens = 1369
    """Of the text encoder, for an input picture of a megapixel."""

    def text_tokens(self, clip_tokens: int) -> int:
        return self.max_sequence_length + self.picture_tokens

    def beside(self) -> Sizes:
        return {"image_latents": ((1024 // self.multiple) ** 2, self.config.in_channels)}


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-2509 and later: up to three input pictures, and one row a call."""

    pipeline_class = "QwenImageEditPlusPipeline"
    most_pictures = 3
    one_row = True
    picture_tokens = 196


class Wan(DiffusersPolicy):
    """Wan 2.1 and Wan 2.2 TI2V-5B (videos, and pictures of one frame). The latter times every token, and so all rows alike."""

    pipeline_class = "WanPipeline"
    encoded = ("prompt_embeds", "negative_prompt_embeds")
    guidance = 5.0
    tokens = 512
    video = True
    unsupported = VIDEOS

    @property
    def one_time(self) -> bool:  # type: ignore[override]
        return bool(self.pipeline.config.expand_timesteps)

    @property
    def multiple(self) -> int:
        return int(self.config.patch_size[1]) * super().multiple

    @property
    def frames(self) -> int:
        return int(self.pipeline.vae_scale_factor_temporal)

    @property
    def fps(self) -> float:
        return 24 if self.one_time else 16

    def widths(self) -> Sizes:
        return {"prompt_embeds": (self.config.text_dim,)}


class LTX(DiffusersPolicy):
    """LTX-Video (videos, and pictures of one frame)."""

    pipeline_class = "LTXPipeline"
    encoded = ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask")
    dtypes = {"prompt_attention_mask": torch.bool}
    guidance = 3.0
    tokens = 128
    video = True
    unsupported = VIDEOS

    @property
    def frames(self) -> int:
        return int(self.pipeline.vae_temporal_compression_ratio)

    @property
    def fps(self) -> float:
        return 25  # the pipeline's default frame_rate

    def widths(self) -> Sizes:
        return {"prompt_embeds": (self.config.caption_channels,), "prompt_attention_mask": ()}


class Lumina2(DiffusersPolicy):
    """Lumina-Image 2: guided velocities have the norm of the prompt's, along the last axis."""

    pipeline_class = "Lumina2Pipeline"
    encoded = ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask")
    dtypes = {"prompt_attention_mask": torch.int64}
    guidance = 4.0
    tokens = 256
    unsupported = PICTURES

    def widths(self) -> Sizes:
        return {"prompt_embeds": (self.config.cap_feat_dim,), "prompt_attention_mask": ()}


class Chroma(DiffusersPolicy):
    """Chroma: FLUX.1's architecture with classifier-free guidance and a mask."""

    pipeline_class = "ChromaPipeline"
    encoded = (
        "prompt_embeds", "text_ids", "prompt_attention_mask",
        "negative_prompt_embeds", "negative_text_ids", "negative_prompt_attention_mask",
    )  # fmt: skip
    guidance = 5.0
    tokens = 512
    unsupported = (*PICTURES, "gradient_checkpointing")  # with which diffusers' single blocks lose the mask

    def widths(self) -> Sizes:
        return {"prompt_embeds": (self.config.joint_attention_dim,), "text_ids": (3,), "prompt_attention_mask": ()}


class CogView4(DiffusersPolicy):
    """CogView4: embeddings are multiples of 16 tokens, and the network sees times before the shift."""

    pipeline_class = "CogView4Pipeline"
    encoded = ("prompt_embeds", "negative_prompt_embeds")
    ragged = ("prompt_embeds",)
    guidance = 5.0
    tokens = 1024
    unsupported = PICTURES

    @property
    def multiple(self) -> int:
        return self.config.patch_size * super().multiple

    def widths(self) -> Sizes:
        return {"prompt_embeds": (self.config.text_embed_dim,)}


class Sana(DiffusersPolicy):
    """Sana: 32 pixels a latent, linear attention."""

    pipeline_class = "SanaPipeline"
    encoded = ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask")
    dtypes = {"prompt_attention_mask": torch.int64}
    guidance = 4.5
    tokens = 300
    fixed = {"use_resolution_binning": False}
    unsupported = PICTURES

    def widths(self) -> Sizes:
        return {"prompt_embeds": (self.config.caption_channels,), "prompt_attention_mask": ()}


class Krea2(DiffusersPolicy):
    """Krea 2: several layers of the text encoder; v + scale (v - v_negative), so that 0 is without guidance."""

    pipeline_class = "Krea2Pipeline"
    encoded = ("prompt_embeds", "prompt_embeds_mask")
    dtypes = {"prompt_embeds_mask": torch.bool}
    unguided = 0.0
    guidance = 4.5
    tokens = 512
    unsupported = PICTURES

    def widths(self) -> Sizes:
        layers, width = self.config.num_text_layers, self.config.text_hidden_dim
        return {"prompt_embeds": (layers, width), "prompt_embeds_mask": ()}


def classes() -> dict[str, type[DiffusersPolicy]]:
    """The descriptions by pipeline class."""
    found = [value for value in globals().values() if isinstance(value, type) and issubclass(value, DiffusersPolicy)]
    return {kind.pipeline_class: kind for kind in found if kind is not DiffusersPolicy}
