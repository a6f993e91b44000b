"""Published configurations of open models, as far as sizes depend on them: nothing needs to be downloaded to plan.

From diffusers' defaults and conversion scripts (scripts/convert_flux2_to_diffusers.py, convert_wan_to_diffusers.py) and the
config.json files of the text encoders.
"""

from __future__ import annotations

from typing import Any

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
PUBLISHED: dict[str, tuple[str, Parts, dict[str, Any]]] = {
    "black-forest-labs/FLUX.2-klein-base-4B": (
        "Flux2KleinPipeline",
        {
            "transformer": ("diffusers:Flux2Transformer2DModel", _KLEIN_4B),
            "text_encoder": ("transformers:Qwen3ForCausalLM", _QWEN3_4B),
            "vae": ("diffusers:AutoencoderKLFlux2", {}),
        },
        {"is_distilled": False},
    ),
    "Qwen/Qwen-Image": (
        "QwenImagePipeline",
        {
            "transformer": ("diffusers:QwenImageTransformer2DModel", {}),
            "text_encoder": ("transformers:Qwen2_5_VLForConditionalGeneration", _QWEN25_VL_7B),
            "vae": ("diffusers:AutoencoderKLQwenImage", {}),
        },
        {},
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (
        "WanPipeline",
        {
            "transformer": ("diffusers:WanTransformer3DModel", _WAN_1_3B),
            "text_encoder": ("transformers:UMT5EncoderModel", _UMT5_XXL),
            "vae": ("diffusers:AutoencoderKLWan", {}),
        },
        {},
    ),
    "Tongyi-MAI/Z-Image": (
        "ZImagePipeline",
        {
            "transformer": ("diffusers:ZImageTransformer2DModel", {}),
            "text_encoder": ("transformers:Qwen3Model", _QWEN3_4B),
        },
        {},
    ),
}
"""By hub id: pipeline class, parts, options. Z-Image's VAE is FLUX.1's."""
