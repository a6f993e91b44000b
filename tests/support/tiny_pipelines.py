"""Tiny random pipelines of every class that `models.catalogue` describes, with real tiny text
encoders and tokenizers."""

import diffusers
import numpy as np
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler as Euler
from tokenizers import processors
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from g2rpo.models import catalogue
from g2rpo.models.anyflow import DiffusersPolicy
from g2rpo.models.modular import pipeline_class
from tests.support.tiny import (
    BLOCKS,
    HEADS,
    UNET,
    WORDS,
    clip_config,
    flux_pipeline,
    sd3_pipeline,
    tiny_t5,
    tiny_vae,
    tokenizer,
)

LANGUAGE = {
    "vocab_size": len(WORDS),
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}


def chat_tokenizer():
    made = tokenizer(512)
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}</s>"
    return made


def qwen3(width, layers, causal=True):
    shape = {**LANGUAGE, "hidden_size": width, "head_dim": width // 2, "num_hidden_layers": layers}
    return (transformers.Qwen3ForCausalLM if causal else transformers.Qwen3Model)(
        transformers.Qwen3Config(**shape, max_position_embeddings=512)
    )


def rope_of(*sections):
    return {"mrope_section": [*sections], "rope_type": "default", "rope_theta": 1e6}


def qwen_vl(width, words: int = len(WORDS), image=3, vision_start=3):
    rope = rope_of(1, 1, width // 4 - 2)
    text = {
        **LANGUAGE,
        "vocab_size": words,
        "hidden_size": width,
        "max_position_embeddings": 512,
        "rope_parameters": rope,
    }
    vision = {**VISION, "out_hidden_size": width, "patch_size": 14}
    special = {"image_token_id": image, "vision_start_token_id": vision_start}
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
    )


def qwen_vae():
    return diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1] * 4,
        latents_std=[0.8] * 4,
    )


def dynamic(**changes):
    """A scheduler whose shift depends on the picture's size."""
    options = {"base_image_seq_len": 16, "max_image_seq_len": 256, **changes}
    return Euler(use_dynamic_shifting=True, **options)


def louder(transformer, layer="proj_out", std=0.3):
    """The transformer, of which one layer would else be 0 or nearly."""
    torch.nn.init.normal_(getattr(transformer, layer).weight, std=std)
    return transformer


def pipeline(kind, transformer, encoder, words=None, vae=None, scheduler=None, **parts):
    """A pipeline of the class `kind` of diffusers; what is not named is as FLUX has it."""
    parts = {"tokenizer": words or tokenizer(512), "text_encoder": encoder, **parts}
    parts |= {"vae": vae or tiny_vae(), "scheduler": scheduler or dynamic()}
    return getattr(diffusers, kind)(transformer=transformer, **parts)


def flux2_vae():
    vae = diffusers.AutoencoderKLFlux2(**UNET, latent_channels=4, norm_num_groups=2)
    vae.bn.running_mean.normal_(std=0.2)
    vae.bn.running_var.uniform_(0.5, 1.5)
    return vae


def klein(distilled=False):
    transformer = louder(
        diffusers.Flux2Transformer2DModel(
            **BLOCKS,
            in_channels=16,
            joint_attention_dim=24,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        )
    )
    return pipeline(
        "Flux2KleinPipeline",
        transformer,
        qwen3(8, 27),
        words=chat_tokenizer(),
        vae=flux2_vae(),
        is_distilled=distilled,
    )


def qwen_image():
    transformer = louder(
        diffusers.QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=3,
            **HEADS,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
        ),
        "txt_in",
        0.5,
    )
    scheduler = dynamic(base_shift=0.5, max_shift=0.9, max_image_seq_len=512, shift_terminal=0.02)
    return pipeline(
        "QwenImagePipeline", transformer, qwen_vl(16), vae=qwen_vae(), scheduler=scheduler
    )


def z_image():
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[128, 32, 32],
    )
    return pipeline(
        "ZImagePipeline",
        transformer,
        qwen3(16, 3, causal=False),
        words=chat_tokenizer(),
        scheduler=Euler(shift=3.0),
    )


def kontext():
    return diffusers.FluxKontextPipeline(**{**flux_pipeline().components, "scheduler": dynamic()})


class TinyProcessor:
    """Texts with pictures for Qwen2.5-VL, a token a picture; transformers' own processor needs
    torchvision."""

    def __init__(self):
        self.tokenizer = tokenizer(4096)
        words = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
        self.tokenizer.add_special_tokens({"additional_special_tokens": words})

    def __call__(self, text, images, padding, return_tensors):
        tokens = self.tokenizer(text, padding=padding, return_tensors=return_tensors)
        pictures = images if isinstance(images, list) else [images]
        values = [
            torch.from_numpy(np.array(picture.resize((28, 28)))).float() / 255 - 0.5
            for picture in pictures
        ]
        tokens["pixel_values"] = torch.cat([value.reshape(4, 588).repeat(1, 2) for value in values])
        tokens["image_grid_thw"] = torch.tensor([[1, 2, 2]] * len(pictures))
        return tokens


def qwen_edit(kind=diffusers.QwenImageEditPipeline):
    plain, processor = qwen_image(), TinyProcessor()
    words = processor.tokenizer
    special = words.convert_tokens_to_ids(["<|image_pad|>", "<|vision_start|>"])
    own = {"text_encoder": qwen_vl(16, len(words), *special), "tokenizer": words}
    return kind(**{**plain.components, **own, "processor": processor})


def wan_vae():
    return diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.1] * 4,
        latents_std=[0.5] * 4,
        scale_factor_spatial=4,
        scale_factor_temporal=2,
    )


def umt5(width):
    return transformers.UMT5EncoderModel(
        transformers.UMT5Config(
            vocab_size=len(WORDS), d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2
        )
    )


def wan_transformer():
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=16,
        num_layers=2,
        rope_max_seq_len=32,
    )


def wan():
    return pipeline(
        "WanPipeline",
        wan_transformer(),
        umt5(16),
        vae=wan_vae(),
        scheduler=Euler(shift=5.0),
    )


def ltx():
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=16,
    )
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, False),
        decoder_spatio_temporal_scaling=(True, False),
        decoder_inject_noise=(False, False, False),
        upsample_residual=(False, False),
        upsample_factor=(1, 1),
        patch_size=2,
    )
    scheduler = dynamic(base_shift=0.95, max_shift=2.05, shift_terminal=0.1)
    return pipeline("LTXPipeline", transformer, tiny_t5(16), vae=vae, scheduler=scheduler)


def gemma2(width):
    return transformers.Gemma2Model(
        transformers.Gemma2Config(
            **LANGUAGE, hidden_size=width, head_dim=8, max_position_embeddings=1024
        )
    )


def lumina2():
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=2,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(64, 32, 32),
        cap_feat_dim=16,
    )
    return pipeline("Lumina2Pipeline", transformer, gemma2(16), scheduler=Euler(shift=6.0))


def chroma():
    transformer = louder(
        diffusers.ChromaTransformer2DModel(
            **BLOCKS,
            in_channels=16,
            joint_attention_dim=24,
            axes_dims_rope=(4, 6, 6),
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        )
    )
    return pipeline("ChromaPipeline", transformer, tiny_t5(24))


def cogview4():
    transformer = diffusers.CogView4Transformer2DModel(
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        out_channels=4,
        text_embed_dim=16,
        time_embed_dim=16,
        condition_dim=4,
        rope_axes_dim=(32, 32),
    )
    glm = transformers.GlmModel(
        transformers.GlmConfig(**LANGUAGE, hidden_size=16, head_dim=8, pad_token_id=0)
    )
    scheduler = dynamic(base_shift=0.25, max_shift=0.75, time_shift_type="linear")
    return pipeline("CogView4Pipeline", transformer, glm, scheduler=scheduler)


def sana():
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=16,
        sample_size=8,
    )
    vae = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=0.4,
    )
    return pipeline(
        "SanaPipeline",
        transformer,
        gemma2(16),
        words=tokenizer(1024),
        vae=vae,
        scheduler=Euler(shift=3.0),
    )


def krea2_tokenizer():
    """The suffix that Krea 2 appends to a prompt is five tokens, as it counts on."""
    made = tokenizer(512)
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", special_tokens=[]
    )
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "\n"]})
    return made


def qwen3_vl(words):
    rope = rope_of(2, 1, 1)
    text = {"vocab_size": words, "hidden_size": 16, "head_dim": 8, "rope_parameters": rope}
    vision = {**VISION, "out_hidden_size": 16, "deepstack_visual_indexes": [0]}
    return transformers.Qwen3VLConfig(text_config=LANGUAGE | text, vision_config=vision)


def krea2():
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        **HEADS,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=16,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(8, 4, 4),
    )
    words = krea2_tokenizer()
    return pipeline(
        "Krea2Pipeline",
        transformer,
        transformers.Qwen3VLModel(qwen3_vl(len(words))),
        words=words,
        vae=qwen_vae(),
        text_encoder_select_layers=(0, 1),
    )


def ovis():
    transformer = louder(
        diffusers.OvisImageTransformer2DModel(
            **BLOCKS,
            in_channels=16,
            out_channels=16,
            joint_attention_dim=16,
            axes_dims_rope=(4, 6, 6),
        )
    )
    return pipeline(
        "OvisImagePipeline", transformer, qwen3(16, 2, causal=False), words=chat_tokenizer()
    )


def longcat():
    transformer = louder(
        diffusers.LongCatImageTransformer2DModel(
            **BLOCKS,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=[4, 6, 6],
        )
    )
    return pipeline(
        "LongCatImagePipeline",
        transformer,
        qwen_vl(16),
        vae=tiny_vae(channels=16),
        text_processor=None,
    )


def chatting(before):
    """A tokenizer whose chats begin with so many words; pipelines cut off as many as their real
    template has."""
    made = tokenizer(2048)
    made.chat_template = "{{ 'a ' * " + str(before) + " }}{{ messages[-1]['content'] }} left </s>"
    return made


def hunyuan_video():
    transformer = louder(
        diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            **HEADS,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(4, 6, 6),
        )
    )
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 3,
        up_block_types=("HunyuanVideoUpBlock3D",) * 3,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
        scaling_factor=0.5,
        spatial_compression_ratio=4,
        mid_block_add_attention=False,
    )
    clip = clip_config(8)
    clip.max_position_embeddings = 77
    llama = transformers.LlamaConfig(
        **LANGUAGE, hidden_size=16, head_dim=8, max_position_embeddings=1024
    )
    return pipeline(
        "HunyuanVideoPipeline",
        transformer,
        transformers.LlamaModel(llama),
        words=tokenizer(1024),
        vae=vae,
        scheduler=Euler(shift=7.0),
        text_encoder_2=transformers.CLIPTextModel(clip),
        tokenizer_2=tokenizer(77),
    )


def hunyuan_video_15():
    transformer = louder(
        diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            **HEADS,
            num_layers=1,
            num_refiner_layers=1,
            text_embed_dim=16,
            text_embed_2_dim=8,
            image_embed_dim=8,
            rope_axes_dim=(4, 6, 6),
            task_type="t2v",
        )
    )
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )
    rope = rope_of(1, 1, 2)
    text = {**LANGUAGE, "hidden_size": 16, "max_position_embeddings": 2048, "rope_parameters": rope}
    return pipeline(
        "HunyuanVideo15Pipeline",
        transformer,
        Qwen2_5_VLTextModel(transformers.Qwen2_5_VLConfig(text_config=text).text_config),
        words=chatting(108),
        vae=vae,
        scheduler=Euler(shift=5.0),
        text_encoder_2=tiny_t5(8),
        tokenizer_2=tokenizer(256),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
    )


class TinyVisionProcessor(TinyProcessor):
    """The same for Qwen3-VL, with chats."""

    def apply_chat_template(self, messages, tokenize, return_dict):
        return self.tokenizer([f"a a {messages[0]['content'][0]['text']}"])["input_ids"]

    def __call__(self, text, padding, padding_side, return_tensors):
        return self.tokenizer(
            text, padding=padding, padding_side=padding_side, return_tensors=return_tensors
        )


def qwen_image_21():
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        **HEADS,
        context_in_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    processor = TinyVisionProcessor()
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1] * 4,
        latents_std=[0.8] * 4,
    )
    encoder = transformers.Qwen3VLForConditionalGeneration(qwen3_vl(len(processor.tokenizer)))
    return diffusers.QwenImage21Pipeline(dynamic(), vae, encoder, processor, transformer)


def flux3(distilled=False):
    """The text encoder's eight layers are those that the pipeline reads."""
    transformer = louder(
        diffusers.Flux3Transformer2DModel(
            in_channels=16,
            cond_in_channels=16,
            num_layers=1,
            num_single_layers=2,
            **HEADS,
            joint_attention_dim=8 * 16,
            timestep_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            flow_map=distilled,
        )
    )
    words = chat_tokenizer()
    words.tokenizer = words  # as a processor has it
    config = qwen3_vl(len(WORDS))
    config.text_config.num_hidden_layers = 33
    kind = "Flux3DistilledModularPipeline" if distilled else "Flux3ModularPipeline"
    return pipeline_class(kind)(
        text_encoder=transformers.Qwen3VLForConditionalGeneration(config),
        tokenizer=words,
        transformer=transformer,
        vae=flux2_vae(),
    )


def bria():
    """A class that the catalogue does not describe: the example of docs/extending.md."""
    transformer = louder(
        diffusers.BriaTransformer2DModel(
            **BLOCKS, in_channels=16, joint_attention_dim=16, axes_dims_rope=[4, 6, 6]
        )
    )
    return pipeline("BriaPipeline", transformer, tiny_t5(16), words=tokenizer(128))


def prx():
    """Another one, whose transformer has no methods for adapters in diffusers."""
    transformer = diffusers.PRXTransformer2DModel(
        in_channels=4,
        context_in_dim=16,
        hidden_size=16,
        mlp_ratio=2.0,
        num_heads=2,
        depth=1,
        axes_dim=[4, 4],
    )
    return pipeline(
        "PRXPipeline", transformer, gemma2(16), words=tokenizer(24), scheduler=Euler(shift=3.0)
    )


MAKERS = {
    "FluxPipeline": flux_pipeline,
    "StableDiffusion3Pipeline": sd3_pipeline,
    "Flux2KleinPipeline": klein,
    "QwenImagePipeline": qwen_image,
    "ZImagePipeline": z_image,
    "FluxKontextPipeline": kontext,
    "QwenImageEditPipeline": qwen_edit,
    "QwenImageEditPlusPipeline": lambda: qwen_edit(diffusers.QwenImageEditPlusPipeline),
    "WanPipeline": wan,
    "LTXPipeline": ltx,
    "Lumina2Pipeline": lumina2,
    "ChromaPipeline": chroma,
    "CogView4Pipeline": cogview4,
    "SanaPipeline": sana,
    "Krea2Pipeline": krea2,
    "OvisImagePipeline": ovis,
    "LongCatImagePipeline": longcat,
    "QwenImage21Pipeline": qwen_image_21,
    "HunyuanVideoPipeline": hunyuan_video,
    "HunyuanVideo15Pipeline": hunyuan_video_15,
    "Flux3ModularPipeline": flux3,
    "BriaPipeline": bria,
    "PRXPipeline": prx,
}


CLASSES = {
    kind: DiffusersPolicy.of(spec) for kind, spec in catalogue.SPECS.items() if kind in MAKERS
}
"""The policies of the catalogue, by pipeline class."""


def tiny_pipeline(kind, seed=0):
    """A random pipeline of a class; seeded, and with biases and norms that are not at their first
    values."""
    torch.manual_seed(seed)
    pipeline = MAKERS[kind]()
    for name, value in pipeline.transformer.named_parameters():
        if value.ndim == 1:
            torch.nn.init.normal_(
                value, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.1
            )
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipeline


def save_tiny(kind, directory):
    tiny_pipeline(kind).save_pretrained(str(directory), safe_serialization=True)
    return directory
