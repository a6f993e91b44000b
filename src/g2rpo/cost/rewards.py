"""Memory and operations of reward models, from their kind and options, on the meta device."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from g2rpo.config.schema import RewardConfig
from g2rpo.cost.blueprint import size_of
from g2rpo.errors import loading
from g2rpo.files import local
from g2rpo.rewards.open_clip import VIT_H_14, clip_config
from g2rpo.rewards.weights import check_config
from g2rpo.rollout.frames import Frames

LARGE_14 = {
    "embed_dim": 768,
    "vision_cfg": {"image_size": 224, "layers": 24, "width": 1024, "patch_size": 14},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 768, "heads": 12, "layers": 12},
}
CLIPS = {
    "apple/DFN5B-CLIP-ViT-H-14": VIT_H_14,
    "apple/DFN5B-CLIP-ViT-H-14-384": {**VIT_H_14, "vision_cfg": {**VIT_H_14["vision_cfg"], "image_size": 378}},
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": VIT_H_14,
    "openai/clip-vit-large-patch14": LARGE_14,
}
"""Published CLIPs in open_clip's terms."""
NO_WEIGHTS = ("http", "vlm_judge", "function", "jpeg_size", "brightness", "saturation", "scene_accuracy", "ocr")
"""Rewards without a known torch model in this process; a `function` may have one, which is not counted."""


@dataclass(frozen=True)
class RewardCost:
    """A reward's weights in bytes, its device, and its floating-point operations for one picture or clip in `dtype`."""

    bytes: int
    flops: float
    device: str
    dtype: str


def cost_of_reward(entry: RewardConfig, device: str, length: int = 1) -> RewardCost | None:
    """The cost of one reward on `device`, unless its options name another; None if it is unknown.

    `length`: frames of a clip, of which the scored ones are counted. Pictures only: a prompt's text features are computed once
    and kept. Preprocessing on the CPU is not counted.
    """
    options = {"device": device, "dtype": "bfloat16" if entry.kind == "hpsv3" else "float32", **entry.options}
    if entry.kind in NO_WEIGHTS or entry.kind.startswith("word_"):
        return RewardCost(0, 0.0, "cpu", "float32")
    if entry.kind.startswith("scene_"):  # the testbed's own, always on the CPU
        options |= {"device": "cpu", "dtype": "float32"}
    config = {name: value for name, value in options.items() if name not in ("device", "dtype")}
    measured = _measured(entry.kind, json.dumps(config, sort_keys=True, default=str))
    if measured is None:
        return None
    weights, flops = measured
    width = torch.finfo(getattr(torch, options["dtype"])).bits // 8
    frames = (entry.frames or Frames()).of(length)
    return RewardCost(weights * width // 4, frames * flops, options["device"], options["dtype"])


@cache  # `advice` needs the same rewards repeatedly
def _measured(kind: str, options: str) -> tuple[int, float] | None:
    """(bytes in float32, operations for one picture) of a reward model; `options` is JSON."""
    with torch.device("meta"):
        if kind == "image_reward":
            return _image_reward()
        if kind == "hpsv3":
            return _hpsv3()
        config = _clip(kind, json.loads(options))
        if config is None:
            return None
        from transformers import CLIPModel

        model = CLIPModel(config)
        pixels = torch.empty(1, 3, *[config.vision_config.image_size] * 2)
    return size_of(model), count_flops(lambda: model.get_image_features(pixel_values=pixels))


def _clip(kind: str, options: dict[str, Any]) -> Any:
    """The CLIPConfig of a reward, None if its folder or repository is not known."""
    from transformers import CLIPConfig

    from g2rpo.testbed import assets_dir

    if kind in ("hpsv2", "pickscore"):
        return clip_config(options.get("model_cfg") or VIT_H_14)
    if kind.startswith("scene_"):
        return CLIPConfig.from_pretrained(assets_dir() / kind.removeprefix("scene_"))
    path = str(options.get("clip", "openai/clip-vit-large-patch14") if kind == "aesthetic" else options.get("path"))
    if path in CLIPS:
        return clip_config(CLIPS[path])
    folder = local(path)
    if (folder / "open_clip_config.json").is_file():
        return clip_config(json.loads((folder / "open_clip_config.json").read_text(encoding="utf-8"))["model_cfg"])
    if not (folder / "config.json").is_file():
        return None
    with loading(f"the plan of reward {kind}"):
        check_config(folder)
    return CLIPConfig.from_pretrained(folder)


def _image_reward() -> tuple[int, float]:
    """BLIP's large vision tower and BERT with cross-attention, as published; the small head is left out."""
    from transformers import BlipTextConfig, BlipVisionConfig
    from transformers.models.blip.modeling_blip import BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    from g2rpo.rewards.image_reward import MAX_TOKENS

    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    vision = BlipVisionModel(BlipVisionConfig(**wide, image_size=224, patch_size=16))
    base = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    text = BlipTextModel(
        BlipTextConfig(**base, vocab_size=30524, encoder_hidden_size=1024, max_position_embeddings=512, is_decoder=True),
        add_pooling_layer=False,
    )
    pixels, words = torch.empty(1, 3, 224, 224), torch.zeros(1, MAX_TOKENS, dtype=torch.long)
    flops = count_flops(
        lambda: text(input_ids=words, encoder_hidden_states=vision(pixel_values=pixels).last_hidden_state, is_decoder=False)
    )
    return size_of(vision) + size_of(text), flops


def count_flops(run: Callable[[], Any]) -> float:
    """Floating-point operations of matrix products, convolutions and attention in `run`, by torch's own counter."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops())


def _hpsv3() -> tuple[int, float]:
    """Qwen2-VL 7B without its output layer; operations are those of the weights alone, on 1024 patches and about 900 tokens."""
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, Qwen2VLTextModel

    text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    text |= {"num_key_value_heads": 4, "vocab_size": 151658}
    config = Qwen2VLConfig(text_config=text, vision_config={"hidden_size": 3584})
    vision, language = Qwen2VisionTransformerPretrainedModel(config.vision_config), Qwen2VLTextModel(config.text_config)
    parameters = sum(p.numel() for p in vision.parameters()), sum(p.numel() for p in language.layers.parameters())
    return size_of(vision) + size_of(language), 2.0 * (1024 * parameters[0] + 900 * parameters[1])
