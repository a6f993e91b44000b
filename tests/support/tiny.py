"""Tiny random models of the real classes, saved as diffusers saves them."""

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
BLOCKS = {**HEADS, "num_layers": 1, "num_single_layers": 1}
"""Of transformers like FLUX."""
UNET = {
    "block_out_channels": (8, 8),
    "layers_per_block": 1,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
"""Of VAEs like that of Stable Diffusion."""
VOCABULARY = "<pad> <bos> </s> <unk> a red blue circle square left of two"
WORDS = VOCABULARY.split()


def tokenizer(length):
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=length,
    )


def tiny_vae(channels=4):
    scale = {"scaling_factor": 0.7, "shift_factor": 0.1}
    return AutoencoderKL(**UNET, **scale, norm_num_groups=4, latent_channels=channels)


def clip_config(width, layers=1):
    return CLIPTextConfig(
        vocab_size=len(WORDS),
        hidden_size=width,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=12,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
        projection_dim=width,
    )


def tiny_t5(width):
    return T5EncoderModel(
        T5Config(vocab_size=len(WORDS), d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )


def flux_pipeline(seed=0):
    """A random FLUX of 0.1 M parameters for 32x32 pictures."""
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        **BLOCKS,
        in_channels=16,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    # diffusers starts it at zero: no velocity at all
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.3)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=False),
        vae=tiny_vae(),
        text_encoder=CLIPTextModel(clip_config(20)),
        tokenizer=tokenizer(12),
        text_encoder_2=tiny_t5(24),
        tokenizer_2=tokenizer(12),
        transformer=transformer,
    )


def save_flux(directory, **options):
    flux_pipeline(**options).save_pretrained(directory, safe_serialization=True)
    return directory


def sd3_pipeline(seed=0, t5=True):
    """A random SD3.5 of 0.1 M parameters for 32x32 pictures: dual attention and RMS norms, with or
    without T5."""
    torch.manual_seed(seed)
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        **HEADS,
        joint_attention_dim=48,
        caption_projection_dim=32,
        pooled_projection_dim=36,
        pos_embed_max_size=12,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    # random text encoders say little: turn them up
    torch.nn.init.normal_(transformer.context_embedder.weight, std=0.5)
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=False),
        vae=tiny_vae(),
        text_encoder=CLIPTextModelWithProjection(clip_config(20, layers=2)),
        tokenizer=tokenizer(12),
        text_encoder_2=CLIPTextModelWithProjection(clip_config(16, layers=2)),
        tokenizer_2=tokenizer(12),
        text_encoder_3=tiny_t5(48) if t5 else None,
        tokenizer_3=tokenizer(12) if t5 else None,
        transformer=transformer,
    )


def save_sd3(directory, **options):
    sd3_pipeline(**options).save_pretrained(directory, safe_serialization=True)
    return directory
