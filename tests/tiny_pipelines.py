"""Tiny random pipelines of every class that `policies.catalogue` describes, with real tiny text encoders and tokenizers."""

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from g2rpo.policies import catalogue
from tests.tiny import WORDS, flux_pipeline, sd3_pipeline, tokenizer

CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}</s>"


def chat_tokenizer(length: int = 512):
    made = tokenizer(length)
    made.chat_template = CHAT
    return made


def qwen3(width: int, layers: int, causal: bool = True):
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=width,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=width // 2,
        max_position_embeddings=512,
    )
    return (Qwen3ForCausalLM if causal else Qwen3Model)(config)


def qwen_vl(width: int):
    text = {
        "vocab_size": len(WORDS),
        "hidden_size": width,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"mrope_section": [1, 1, width // 4 - 2], "rope_type": "default", "rope_theta": 1e6},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": width,
        "patch_size": 14,
    }
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def kl_vae(**changes):
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        layers_per_block=1,
        latent_channels=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.7,
        shift_factor=0.1,
        **changes,
    )


def qwen_vae(mean: float = 0.1, std: float = 0.8):
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[mean] * 4,
        latents_std=[std] * 4,
    )


def dynamic(**changes):
    """A scheduler whose shift depends on the picture's size."""
    options = {"use_dynamic_shifting": True, "base_image_seq_len": 16, "max_image_seq_len": 256, **changes}
    return FlowMatchEulerDiscreteScheduler(**options)


def louder(module: torch.nn.Module, std: float) -> None:
    torch.nn.init.normal_(module.weight, std=std)


def flux2_vae():
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        latent_channels=4,
        norm_num_groups=2,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    vae.bn.running_mean.normal_(std=0.2)
    vae.bn.running_var.uniform_(0.5, 1.5)
    return vae


def klein(distilled: bool = False):
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    louder(transformer.proj_out, 0.3)
    return Flux2KleinPipeline(
        scheduler=dynamic(),
        vae=flux2_vae(),
        text_encoder=qwen3(8, 27),
        tokenizer=chat_tokenizer(),
        transformer=transformer,
        is_distilled=distilled,
    )


def qwen_image():
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    louder(transformer.txt_in, 0.5)
    scheduler = dynamic(base_shift=0.5, max_shift=0.9, max_image_seq_len=512, shift_terminal=0.02)
    return QwenImagePipeline(
        scheduler=scheduler, vae=qwen_vae(), text_encoder=qwen_vl(16), tokenizer=tokenizer(512), transformer=transformer
    )


def z_image():
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[128, 32, 32],
    )
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=kl_vae(),
        text_encoder=qwen3(16, 3, causal=False),
        tokenizer=chat_tokenizer(),
        transformer=transformer,
    )


MAKERS = {
    "FluxPipeline": flux_pipeline,
    "StableDiffusion3Pipeline": sd3_pipeline,
    "Flux2KleinPipeline": klein,
    "QwenImagePipeline": qwen_image,
    "ZImagePipeline": z_image,
}


CLASSES = {kind: described for kind, described in catalogue.classes().items() if kind in MAKERS}
"""The descriptions, by pipeline class."""


def tiny_pipeline(kind: str, seed: int = 0):
    """A random pipeline of a class; seeded, and with biases and norms that are not at their first values."""
    torch.manual_seed(seed)
    pipeline = MAKERS[kind]()
    for name, value in pipeline.transformer.named_parameters():
        if value.ndim == 1:
            torch.nn.init.normal_(value, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.1)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipeline


def save_tiny(kind: str, directory):
    tiny_pipeline(kind).save_pretrained(directory, safe_serialization=True)
    return directory
