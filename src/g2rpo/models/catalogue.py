"""The pipelines of diffusers that can be trained: one `PipelineSpec` each. `published.json` has the
models of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from g2rpo.core import plugins
from g2rpo.models import comfyui
from g2rpo.models.published import PublishedModel
from g2rpo.models.spec import ATTENTION_TARGETS, RARE, PipelineSpec

NEGATIVE_TOO = (
    "prompt_embeds",
    "prompt_attention_mask",
    "negative_prompt_embeds",
    "negative_prompt_attention_mask",
)

flux = PipelineSpec(  # arXiv 2506.15742
    pipeline_class="FluxPipeline",
    encoded=("prompt_embeds", "pooled_prompt_embeds", "text_ids"),
    widths={"prompt_embeds": ("joint_attention_dim",), "text_ids": (3,)},
    pooled={"pooled_prompt_embeds": ("pooled_projection_dim",)},
    tokens=512,
    guidance=3.5,
    unguided=None,
    own_grid=False,
    unsupported=("detach_negative", "negative_prompt"),
    comfyui=comfyui.FLUX,
)

kontext = replace(
    flux,  # the input picture's tokens follow the picture's own
    pipeline_class="FluxKontextPipeline",
    shared=("text_ids", "image_ids"),
    pictured={"image_latents": ("in_channels",), "": (), "image_ids": (3,)},
    fixed={"max_area": lambda o: o.height * o.width},  # else the pipeline would change the size
    own_grid=True,
    unsupported=(*RARE, "negative_prompt"),
)

sd3 = PipelineSpec(  # arXiv 2403.03206
    pipeline_class="StableDiffusion3Pipeline",
    encoded=(
        "prompt_embeds",
        "negative_prompt_embeds",
        "pooled_prompt_embeds",
        "negative_pooled_prompt_embeds",
    ),
    widths={"prompt_embeds": ("joint_attention_dim",)},
    pooled={"pooled_prompt_embeds": ("pooled_projection_dim",)},
    tokens=256,
    with_clip=True,
    guidance=4.5,
    patched=True,
    own_grid=False,
    optional=("text_encoder_3",),
    # of diffusers' own script: not SD3.5's image-only attn2
    lora_targets=tuple(f"attn.{name}" for name in ATTENTION_TARGETS),
    unsupported=(),
    comfyui=comfyui.SD3,
)

flux2 = PipelineSpec(
    pipeline_class="Flux2Pipeline",
    encoded=("prompt_embeds", "text_ids"),
    widths={"prompt_embeds": ("joint_attention_dim",), "text_ids": (4,)},
    shared=(),
    dtypes={"text_ids": torch.int64},
    tokens=512,
    guidance=4.0,
    unguided=None,
    lora_targets=(*ATTENTION_TARGETS, "to_qkv_mlp_proj"),
    unsupported=(*RARE, "negative_prompt"),
    comfyui=comfyui.FLUX2_NAMES,
)

klein = replace(
    flux2,  # classifier-free guidance from an empty prompt
    pipeline_class="Flux2KleinPipeline",
    unguided=1.0,
    distilled=lambda pipeline: getattr(pipeline.config, "is_distilled", False),
)

# windows of 80 tokens, whose padding the network attends to; the block that rewrites prompts is left out
flux3 = PipelineSpec(
    pipeline_class="Flux3ModularPipeline",
    encoded=("prompt_embeds", "negative_prompt_embeds"),
    widths={"prompt_embeds": ("joint_attention_dim",)},
    ragged=("prompt_embeds",),
    tokens=560,
    guidance=3.5,
    guider=True,
)

qwen_image = PipelineSpec(  # guided velocities have the norm of the prompt's, token by token
    pipeline_class="QwenImagePipeline",
    encoded=("prompt_embeds", "prompt_embeds_mask"),
    widths={"prompt_embeds": ("joint_attention_dim",)},
    masks={"prompt_embeds": "prompt_embeds_mask"},
    tokens=512,
    guidance=4.0,
    scale="true_cfg_scale",
    comfyui=comfyui.QWEN_IMAGE,
)

qwen_edit = replace(
    qwen_image,  # the text encoder sees the input picture too
    pipeline_class="QwenImageEditPipeline",
    pictured={"image_latents": ("in_channels",)},
    seen=True,
    picture_tokens=1369,
)

qwen_edit_plus = replace(
    qwen_edit,  # Qwen-Image-Edit-2509 and later
    pipeline_class="QwenImageEditPlusPipeline",
    most_pictures=3,
    one_row=True,
    picture_tokens=196,
)

z_image = PipelineSpec(  # v + scale (v - v_negative), so that 0 is without guidance
    pipeline_class="ZImagePipeline",
    encoded=("prompt_embeds", "negative_prompt_embeds"),
    widths={"prompt_embeds": ("cap_feat_dim",)},
    lists=("prompt_embeds",),
    tokens=512,
    guidance=5.0,
    unguided=0.0,
    fixed={"cfg_truncation": None},  # the pipeline would compare a time for all rows with it
    comfyui=comfyui.Z_IMAGE,
)

# Wan 2.1; and 2.2-TI2V-5B, which times every token, and so all rows alike
wan = PipelineSpec(
    pipeline_class="WanPipeline",
    encoded=("prompt_embeds", "negative_prompt_embeds"),
    widths={"prompt_embeds": ("text_dim",)},
    tokens=512,
    guidance=5.0,
    frames="vae_scale_factor_temporal",
    fps=lambda pipeline: 24 if pipeline.config.expand_timesteps else 16,
    patched=True,
    exact_vae=True,  # diffusers' documentation and flow_grpo's train_wan2_1.py
    one_time=lambda pipeline: bool(pipeline.config.expand_timesteps),
    comfyui=comfyui.WAN,
)

ltx = PipelineSpec(
    pipeline_class="LTXPipeline",
    encoded=NEGATIVE_TOO,
    widths={"prompt_embeds": ("caption_channels",), "prompt_attention_mask": ()},
    dtypes={"prompt_attention_mask": torch.bool},
    tokens=128,
    guidance=3.0,
    frames="vae_temporal_compression_ratio",
    fps=lambda pipeline: 25,  # its default frame_rate
    comfyui=comfyui.LTX,
)

lumina2 = PipelineSpec(  # guided velocities have the norm of the prompt's, along the last axis
    pipeline_class="Lumina2Pipeline",
    encoded=NEGATIVE_TOO,
    widths={"prompt_embeds": ("cap_feat_dim",), "prompt_attention_mask": ()},
    dtypes={"prompt_attention_mask": torch.int64},
    tokens=256,
    guidance=4.0,
    comfyui=comfyui.LUMINA2,
    unsupported=(*RARE, "offload"),  # its refiners are not checkpointed
)

chroma = PipelineSpec(  # FLUX.1's architecture with classifier-free guidance and a mask
    pipeline_class="ChromaPipeline",
    encoded=(
        "prompt_embeds", "text_ids", "prompt_attention_mask",
        "negative_prompt_embeds", "negative_text_ids", "negative_prompt_attention_mask",
    ),
    widths={"prompt_embeds": ("joint_attention_dim",), "text_ids": (3,), "prompt_attention_mask": ()},
    tokens=512,
    guidance=5.0,
    # with which diffusers' single blocks lose the mask
    unsupported=(*RARE, "gradient_checkpointing", "offload"),
    comfyui=comfyui.CHROMA,
)  # fmt: skip

# embeddings are multiples of 16 tokens, and the network sees times before the shift
cogview4 = PipelineSpec(
    pipeline_class="CogView4Pipeline",
    encoded=("prompt_embeds", "negative_prompt_embeds"),
    widths={"prompt_embeds": ("text_embed_dim",)},
    ragged=("prompt_embeds",),
    tokens=1024,
    guidance=5.0,
    patched=True,
)

sana = PipelineSpec(  # 32 pixels a latent, linear attention
    pipeline_class="SanaPipeline",
    encoded=NEGATIVE_TOO,
    widths={"prompt_embeds": ("caption_channels",), "prompt_attention_mask": ()},
    dtypes={"prompt_attention_mask": torch.int64},
    tokens=300,
    guidance=4.5,
    fixed={"use_resolution_binning": False},
)

# several layers of the text encoder; v + scale (v - v_negative), so that 0 is without guidance
krea2 = PipelineSpec(
    pipeline_class="Krea2Pipeline",
    encoded=("prompt_embeds", "prompt_embeds_mask"),
    widths={"prompt_embeds": ("num_text_layers", "text_hidden_dim"), "prompt_embeds_mask": ()},
    dtypes={"prompt_embeds_mask": torch.bool},
    tokens=512,
    guidance=4.5,
    unguided=0.0,
    comfyui=comfyui.KREA2,
)

ovis = PipelineSpec(
    pipeline_class="OvisImagePipeline",
    encoded=("prompt_embeds", "negative_prompt_embeds", "text_ids", "negative_text_ids"),
    widths={"prompt_embeds": ("joint_attention_dim",), "text_ids": (3,)},
    tokens=256,
    guidance=5.0,
)

longcat = PipelineSpec(  # guided velocities have at most the norm of the prompt's, token by token
    pipeline_class="LongCatImagePipeline",
    encoded=("prompt_embeds", "text_ids"),
    widths={"prompt_embeds": ("joint_attention_dim",), "text_ids": (3,)},
    tokens=512,
    guidance=4.5,
    # by the text encoder, which would sample other prompts than were given
    fixed={"enable_prompt_rewrite": False},
)

# pictures with transparency; 16 pixels a latent, four latents a slot of the text's layout
qwen_image_21 = PipelineSpec(
    pipeline_class="QwenImage21Pipeline",
    encoded=("prompt_embeds", "prompt_embeds_mask", "image_pad_mask"),
    widths={"prompt_embeds": ("context_in_dim",), "image_pad_mask": ()},
    ragged=("prompt_embeds", "image_pad_mask"),  # padding would move the picture's positions
    dtypes={"image_pad_mask": torch.bool},
    tokens=512,
    guidance=1.0,
    scale="true_cfg_scale",
    fixed={"use_kv_cache": False},  # it would be filled in every call, and never read
    grouped=2,
)

hunyuan_video = PipelineSpec(
    pipeline_class="HunyuanVideoPipeline",
    encoded=("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask"),
    widths={"prompt_embeds": ("text_embed_dim",), "prompt_attention_mask": ()},
    pooled={"pooled_prompt_embeds": ("pooled_projection_dim",)},
    dtypes={"prompt_attention_mask": torch.int64},
    tokens=256,
    guidance=6.0,
    unguided=None,
    frames="vae_scale_factor_temporal",
    fps=lambda pipeline: 24,
    patched=True,
    unsupported=(*RARE, "negative_prompt"),
)

hunyuan_video_15 = PipelineSpec(
    pipeline_class="HunyuanVideo15Pipeline",
    encoded=("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2"),
    widths={"prompt_embeds": ("text_embed_dim",), "prompt_embeds_mask": ()},
    # of words in quotation marks
    pooled={"prompt_embeds_2": (256, "text_embed_2_dim"), "prompt_embeds_mask_2": (256,)},
    tokens=1000,
    guidance=6.0,
    guider=True,
    one_row=True,  # diffusers' VAE decodes one clip at a time
    frames="vae_scale_factor_temporal",
    fps=lambda pipeline: 24,
    patched=True,
)

FLOW_MAPS = ("Flux3DistilledModularPipeline",)
"""Pipelines of flow maps: their network is also given the time to which a step goes, so a stochastic
step, or one of another size, would ask for another function than was distilled."""

SPECS: Mapping[str, PipelineSpec] = {
    value.pipeline_class: value
    for value in list(vars().values())
    if isinstance(value, PipelineSpec)
}
"""All of them, by the class of the pipeline."""


def find_policy(name: str) -> Any:
    """The spec, or the policy's class, called `name`: a pipeline class of this table or of an
    installed package, or code of the user's (FILE.py:NAME)."""
    return (
        SPECS[name]
        if name in SPECS
        else plugins.find_class("policies", name, dict.fromkeys(SPECS, ""))
    )


def pipeline_names() -> list[str]:
    """The pipeline classes that can be trained here."""
    return list(plugins.available("policies", dict.fromkeys(SPECS, "")))


def model_of(path: str, kind: str | None = None) -> tuple[PipelineSpec, PublishedModel] | None:
    """The published weights with the hub id `path`; None if unknown. `kind` is policy.kind."""
    specs = SPECS.values() if kind is None else [spec_of(kind)]
    return next(
        ((spec, spec.known[path]) for spec in specs if spec is not None and path in spec.known),
        None,
    )


def licence_of(path: str, kind: str | None = None) -> str | None:
    """The licence of published weights; None if unknown. The text on the hub is decisive."""
    known = model_of(path, kind)
    return known[1].licence if known else None


def names_of(kind: str | None) -> comfyui.ComfyUI | None:
    """Other programs' names of the spec that `kind` (policy.kind) names; None without one."""
    spec = None if kind is None else spec_of(kind)
    return None if spec is None else spec.comfyui


def spec_of(name: str) -> PipelineSpec | None:
    """The spec for the name; None for a policy class without one."""
    found = find_policy(name)
    found = getattr(found, "spec", found)
    return found if isinstance(found, PipelineSpec) else None
