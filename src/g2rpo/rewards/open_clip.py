"""CLIP checkpoints published by open_clip, as transformers' CLIPModel: configuration, state dict,
prompt cleaning.

open_clip itself needs torchvision and timm. Its plain vision and text transformers are the same
networks as CLIPModel's under other names; architectures that are not (ResNets, timm towers, pooled
or bidirectional text towers) are refused.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import ftfy
from torch import Tensor

from g2rpo.core.errors import shown
from g2rpo.rewards.pixels import CLIP_MEAN, CLIP_STD, Preprocess

VIT_H_14: dict[str, Any] = {
    "embed_dim": 1024,
    "vision_cfg": {
        "image_size": 224,
        "layers": 32,
        "width": 1280,
        "head_width": 80,
        "patch_size": 14,
    },
    "text_cfg": {
        "context_length": 77,
        "vocab_size": 49408,
        "width": 1024,
        "heads": 16,
        "layers": 24,
    },
}

VIT_L_14: dict[str, Any] = {
    "embed_dim": 768,
    "vision_cfg": {"image_size": 224, "layers": 24, "width": 1024, "patch_size": 14},
    "text_cfg": {
        "context_length": 77,
        "vocab_size": 49408,
        "width": 768,
        "heads": 12,
        "layers": 12,
    },
}
PUBLISHED_CLIPS = {
    "apple/DFN5B-CLIP-ViT-H-14": VIT_H_14,
    "apple/DFN5B-CLIP-ViT-H-14-384": {
        **VIT_H_14,
        "vision_cfg": {**VIT_H_14["vision_cfg"], "image_size": 378},
    },
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": VIT_H_14,
    "openai/clip-vit-large-patch14": VIT_L_14,
}
"""Published CLIPs in open_clip's terms."""

_VISION_DEFAULTS = {
    "layers": 12,
    "width": 768,
    "head_width": 64,
    "mlp_ratio": 4.0,
    "patch_size": 16,
    "image_size": 224,
    "pool_type": "tok",
    "patch_dropout": 0.0,
}
_TEXT_DEFAULTS = {
    "context_length": 77,
    "vocab_size": 49408,
    "width": 512,
    "heads": 8,
    "layers": 12,
    "mlp_ratio": 4.0,
    "pool_type": "argmax",
    "pad_id": 0,
    "proj": "mlp",
    "pooler_type": "mean_pooler",
}
# no effect on a plain transformer's output
_TRAINING_ONLY = {"patch_dropout", "pad_id", "proj", "pooler_type"}


def _complete(given: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`given` over `defaults`; ValueError for a setting that CLIPModel cannot express."""
    for key, value in given.items():
        fixed = key not in defaults or key == "pool_type"
        if (
            fixed
            and key not in _TRAINING_ONLY
            and value != defaults.get(key)
            and value not in (None, False, 0, "")
        ):
            raise ValueError(
                f"{where}.{key} = {shown(value)}: this open_clip architecture has no equivalent in CLIPModel"
            )
    return {**defaults, **{k: v for k, v in given.items() if k in defaults}}


def clip_config(model_cfg: Mapping[str, Any]) -> Any:
    """transformers' CLIPConfig for open_clip's `model_cfg`; ValueError if its architecture is
    another one."""
    from transformers import CLIPConfig

    for key in model_cfg.keys() - {
        "embed_dim",
        "vision_cfg",
        "text_cfg",
        "quick_gelu",
        "custom_text",
    }:
        if model_cfg[key] is not None and key != "init_logit_scale":
            raise ValueError(
                f"model_cfg.{key} = {shown(model_cfg[key])}: not a CLIP that CLIPModel can express"
            )
    vision = _complete(model_cfg["vision_cfg"], _VISION_DEFAULTS, "vision_cfg")
    text = _complete(model_cfg["text_cfg"], _TEXT_DEFAULTS, "text_cfg")
    if not isinstance(vision["layers"], int) or not isinstance(vision["image_size"], int):
        raise ValueError(
            "vision_cfg: only square vision transformers are supported, not ResNets or oblong inputs"
        )
    common = {
        "hidden_act": "quick_gelu" if model_cfg.get("quick_gelu") else "gelu",
        "layer_norm_eps": 1e-5,
    }
    # open_clip pools at the highest id of a sequence, which is the end token
    last = text["vocab_size"] - 1
    return CLIPConfig(
        projection_dim=model_cfg["embed_dim"],
        vision_config={
            **common,
            "hidden_size": vision["width"],
            "num_hidden_layers": vision["layers"],
            "num_attention_heads": vision["width"] // vision["head_width"],
            "intermediate_size": int(vision["width"] * vision["mlp_ratio"]),
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
            "projection_dim": model_cfg["embed_dim"],
        },
        text_config={
            **common,
            "hidden_size": text["width"],
            "num_hidden_layers": text["layers"],
            "num_attention_heads": text["heads"],
            "intermediate_size": int(text["width"] * text["mlp_ratio"]),
            "vocab_size": text["vocab_size"],
            "max_position_embeddings": text["context_length"],
            "projection_dim": model_cfg["embed_dim"],
            "bos_token_id": last - 1,
            "eos_token_id": last,
            "pad_token_id": last,
        },
    )


_NAMES = (
    ("visual.transformer.resblocks.", "vision_model.encoder.layers."),
    ("transformer.resblocks.", "text_model.encoder.layers."),
    ("visual.class_embedding", "vision_model.embeddings.class_embedding"),
    ("visual.positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    ("visual.conv1.", "vision_model.embeddings.patch_embedding."),
    ("visual.ln_pre.", "vision_model.pre_layrnorm."),
    ("visual.ln_post.", "vision_model.post_layernorm."),
    ("visual.proj", "visual_projection.weight"),
    ("token_embedding.", "text_model.embeddings.token_embedding."),
    ("positional_embedding", "text_model.embeddings.position_embedding.weight"),
    ("ln_final.", "text_model.final_layer_norm."),
    ("text_projection", "text_projection.weight"),
    (".ln_1.", ".layer_norm1."),
    (".ln_2.", ".layer_norm2."),
    (".attn.", ".self_attn."),
    (".mlp.c_fc.", ".mlp.fc1."),
    (".mlp.c_proj.", ".mlp.fc2."),
)


def clip_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's state dict under CLIPModel's names; an unknown name is kept, so that loading
    reports it.

    Three things besides names: the fused query, key and value are cut apart; the projections,
    matrices that multiply from the right, become the transposed weights of Linear layers;
    `attn_mask`, a constant that old files store, is dropped. A text tower under the prefix "text."
    (open_clip's CustomTextCLIP) is the same tower.
    """
    out: dict[str, Tensor] = {}
    for original, tensor in state.items():
        name = original.removeprefix("text.")
        if name == "attn_mask":
            continue
        for old, new in _NAMES:
            name = name.replace(old, new)
        if ".in_proj_" in name:
            for part, piece in zip("qkv", tensor.chunk(3, dim=0), strict=True):
                out[name.replace(".in_proj_", f".{part}_proj.")] = piece
        elif name in ("visual_projection.weight", "text_projection.weight"):
            out[name] = tensor.T.contiguous()
        else:
            out[name] = tensor.reshape(()) if name == "logit_scale" else tensor
    return out


def preprocess_from(model_cfg: Mapping[str, Any], preprocess_cfg: Mapping[str, Any]) -> Preprocess:
    """open_clip's preprocessing of pictures at evaluation; `preprocess_cfg` may be empty, the
    defaults are open_clip's."""
    size = model_cfg["vision_cfg"].get("image_size", _VISION_DEFAULTS["image_size"])
    return Preprocess(
        resize=size,
        crop=size,
        mode=preprocess_cfg.get("resize_mode", "shortest"),
        interpolation=preprocess_cfg.get("interpolation", "bicubic"),
        mean=tuple(preprocess_cfg.get("mean", CLIP_MEAN)),
        std=tuple(preprocess_cfg.get("std", CLIP_STD)),
    )


def clean_prompt(prompt: str) -> str:
    """open_clip's cleaning of a prompt before BPE: ftfy repairs text that was decoded wrongly, HTML
    entities are resolved, letters are lower case."""
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(prompt))).split()).lower()
