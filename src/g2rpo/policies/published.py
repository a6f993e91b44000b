"""Published configurations of open models, as far as sizes depend on them, so that plans need no download.

From diffusers' defaults and conversion scripts (scripts/convert_flux2_to_diffusers.py, convert_wan_to_diffusers.py) and the
config.json files of gated models and of text encoders.
"""

from __future__ import annotations

from typing import Any

_CLIP_L = {
    "vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "max_position_embeddings": 77, "projection_dim": 768, "hidden_act": "quick_gelu",
}  # fmt: skip
_CLIP_G = {
    **_CLIP_L, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280, "hidden_act": "gelu",
}  # fmt: skip
_T5_XXL = {
    "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
_VAE = {
    "sample_size": 1024, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16,
    "norm_num_groups": 32, "use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 0.3611,
    "shift_factor": 0.1159, "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
}  # fmt: skip
_FLUX = {
    "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
_SD3 = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16, "attention_head_dim": 64,
    "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "qk_norm": "rms_norm",
}  # fmt: skip
_SD35_MEDIUM = {
    **_SD3, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
}  # fmt: skip
_SD35_LARGE = {
    **_SD3, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
}  # fmt: skip
_QWEN3_4B = {
    "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN25_VL_7B = {
    "text_config": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584},
}  # fmt: skip
_UMT5_XXL = {
    "vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
_KLEIN_4B = {
    "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680, "guidance_embeds": False,
}  # fmt: skip
_WAN_1_3B = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}

Parts = dict[str, tuple[str, dict[str, Any]]]


def _parts(transformer: str, config: dict[str, Any], encoders: Parts, vae: str = "AutoencoderKL") -> Parts:
    own = _VAE if vae == "AutoencoderKL" else {}
    texts = {name: (f"transformers:{kind}", encoder) for name, (kind, encoder) in encoders.items()}
    return {"transformer": (f"diffusers:{transformer}", config), **texts, "vae": (f"diffusers:{vae}", own)}


def flux_parts(**changes: Any) -> Parts:
    encoders = {"text_encoder": ("CLIPTextModel", _CLIP_L), "text_encoder_2": ("T5EncoderModel", _T5_XXL)}
    return _parts("FluxTransformer2DModel", {**_FLUX, **changes}, encoders)


def _sd3(config: dict[str, Any]) -> Parts:
    encoders = {
        "text_encoder": ("CLIPTextModelWithProjection", _CLIP_L),
        "text_encoder_2": ("CLIPTextModelWithProjection", _CLIP_G),
        "text_encoder_3": ("T5EncoderModel", _T5_XXL),
    }
    vae = {**_VAE, "scaling_factor": 1.5305, "shift_factor": 0.0609}
    return {**_parts("SD3Transformer2DModel", config, encoders), "vae": ("diffusers:AutoencoderKL", vae)}


def sd35_medium() -> Parts:
    return _sd3(_SD35_MEDIUM)


def sd35_large() -> Parts:
    return _sd3(_SD35_LARGE)


def klein_4b() -> Parts:
    encoder = {"text_encoder": ("Qwen3ForCausalLM", _QWEN3_4B)}
    return _parts("Flux2Transformer2DModel", _KLEIN_4B, encoder, "AutoencoderKLFlux2")


def qwen_image_parts() -> Parts:
    encoder = {"text_encoder": ("Qwen2_5_VLForConditionalGeneration", _QWEN25_VL_7B)}
    return _parts("QwenImageTransformer2DModel", {}, encoder, "AutoencoderKLQwenImage")


def wan_1_3b() -> Parts:
    return _parts("WanTransformer3DModel", _WAN_1_3B, {"text_encoder": ("UMT5EncoderModel", _UMT5_XXL)}, "AutoencoderKLWan")


def z_image_parts() -> Parts:
    return _parts("ZImageTransformer2DModel", {}, {"text_encoder": ("Qwen3Model", _QWEN3_4B)})  # its VAE is FLUX.1's
