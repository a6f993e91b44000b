"""The pipelines of diffusers that `DiffusersPolicy` can run, each described in a few lines."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from g2rpo.policies.anyflow import ATTENTION, DiffusersPolicy

Sizes = dict[str, tuple[int, ...]]


class Flux(DiffusersPolicy):
    """FLUX.1. `FluxPolicy` is the same model by hand, and faster where networks are tiny."""

    pipeline_class = "FluxPipeline"
    encoded = ("prompt_embeds", "pooled_prompt_embeds", "text_ids")
    unguided = None
    guidance = 3.5
    tokens = 512
    unsupported = ("negative_prompt", "num_frames")

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
    unsupported = ("num_frames",)

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
    unsupported = ("negative_prompt", "num_frames")

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
    unsupported = ("num_frames",)

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
    unsupported = ("num_frames",)

    def widths(self) -> Sizes:
        return {"prompt_embeds": (self.config.cap_feat_dim,)}


def classes() -> dict[str, type[DiffusersPolicy]]:
    """The descriptions by pipeline class."""
    found = [value for value in globals().values() if isinstance(value, type) and issubclass(value, DiffusersPolicy)]
    return {kind.pipeline_class: kind for kind in found if kind is not DiffusersPolicy}
