"""ImageReward v1.0 (Xu et al. 2023): BLIP encodes picture and prompt jointly, and a small head computes the score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.core.types import RewardModel
from g2rpo.rewards.aesthetic import LinearHead
from g2rpo.rewards.pixels import PictureReward, Preprocess
from g2rpo.rewards.weights import TOKENIZER_FILES, build, fetch, guess_model, parse_dtype, read_state_dict

WEIGHTS = "ImageReward.pt"
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the raw scores on the training set, as published
MAX_TOKENS = 35
_UNUSED = ("blip.vision_proj.", "blip.text_proj.", "blip.text_encoder.embeddings.position_ids")

_VISION = (
    ("cls_token", "embeddings.class_embedding"),
    ("pos_embed", "embeddings.position_embedding"),
    ("patch_embed.proj.", "embeddings.patch_embedding."),
    ("blocks.", "encoder.layers."),
    (".attn.proj.", ".self_attn.projection."),
    (".attn.", ".self_attn."),
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
)


def vision_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The ViT part of a published state dict under the names of transformers' BlipVisionModel."""
    out = {}
    for original, tensor in state.items():
        if original.startswith("blip.visual_encoder."):
            name = original.removeprefix("blip.visual_encoder.")
            for old, new in _VISION:
                name = name.replace(old, new)
            out[f"post_layernorm.{name[5:]}" if name.startswith("norm.") else name] = tensor
    return out


def part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The entries under `prefix` that affect a score, with the prefix removed."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix) and not k.startswith(_UNUSED)}


def blip_configs(state: Mapping[str, Tensor], heads: tuple[int, int]) -> tuple[Any, Any]:
    """transformers' configurations of the two towers, their sizes read off the state dict; `heads` = (vision, text)."""
    from transformers import BlipTextConfig, BlipVisionConfig

    def layers(prefix: str) -> int:
        return len({name[len(prefix) :].split(".")[0] for name in state if name.startswith(prefix)})

    vision, text = "blip.visual_encoder.", "blip.text_encoder."
    width, _, patch, _ = state[f"{vision}patch_embed.proj.weight"].shape
    side = round((state[f"{vision}pos_embed"].shape[1] - 1) ** 0.5)
    words, positions = (state[f"{text}embeddings.{n}_embeddings.weight"] for n in ("word", "position"))
    vision_config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=state[f"{vision}blocks.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=layers(f"{vision}blocks."),
        num_attention_heads=heads[0],
        image_size=side * patch,
        patch_size=patch,
        layer_norm_eps=1e-6,
        hidden_act="gelu",
    )
    text_config = BlipTextConfig(
        vocab_size=words.shape[0],
        hidden_size=words.shape[1],
        encoder_hidden_size=width,
        intermediate_size=state[f"{text}encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=layers(f"{text}encoder.layer."),
        num_attention_heads=heads[1],
        max_position_embeddings=positions.shape[0],
        bos_token_id=words.shape[0] - 2,  # [DEC], unused in scores; the default is outside small vocabularies
        layer_norm_eps=1e-12,
        hidden_act="gelu",
        is_decoder=True,  # builds the layers of cross-attention; the model is run as an encoder
    )
    return vision_config, text_config


class ImageReward(PictureReward):
    """(r - 0.1672) / 1.0333 of BLIP's joint encoding of picture and prompt; about -2 to 2.

    The picture's shorter side becomes 224 pixels and the middle is cut out; a prompt has at most 35 tokens.
    Args: `path`, the file ImageReward.pt, its folder or the repository; `tokenizer`, BERT's; `device`; `dtype` of BLIP's
    weights (the head stays float32); `batch_size`; `heads`, attention heads of the vision and text towers.
    """

    differentiable = True
    upstream, licence = "https://github.com/THUDM/ImageReward", "Apache-2.0"
    files = {"path": (WEIGHTS,), "tokenizer": TOKENIZER_FILES}

    def __init__(
        self,
        path: str = "THUDM/ImageReward",
        *,
        tokenizer: str = "google-bert/bert-base-uncased",
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
        heads: tuple[int, int] = (16, 12),
    ) -> None:
        from transformers import BertTokenizerFast
        from transformers.models.blip.modeling_blip import BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        file = fetch(path, WEIGHTS)
        state = read_state_dict(file)
        if "blip.visual_encoder.patch_embed.proj.weight" not in state:
            raise ValueError(f"{file} is not ImageReward v1.0. It seems to be {guess_model(state)}.")
        vision, text = blip_configs(state, heads)
        self.device, self.dtype = torch.device(device), parse_dtype(dtype)

        def made(factory: Callable[[], nn.Module], own: Mapping[str, Tensor], what: str, kind: torch.dtype) -> Any:
            return build(factory, own, f"ImageReward's {what}", file, published=state).to(device=self.device, dtype=kind)

        self.vision = made(lambda: BlipVisionModel(vision), vision_state(state), "ViT", self.dtype)
        words = part(state, "blip.text_encoder.")
        self.text = made(lambda: BlipTextModel(text, add_pooling_layer=False), words, "text encoder", self.dtype)
        self.head = made(lambda: LinearHead(text.hidden_size), part(state, "mlp."), "head", torch.float32)
        self.tokenizer = BertTokenizerFast.from_pretrained(tokenizer)
        self.preprocess = Preprocess(resize=vision.image_size, crop=vision.image_size)
        self.batch_size = batch_size

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        """BLIP's large vision tower and BERT with cross-attention, as published; the small head is left out."""
        from transformers import BlipTextConfig, BlipVisionConfig
        from transformers.models.blip.modeling_blip import BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        vision = BlipVisionModel(BlipVisionConfig(**wide, image_size=224, patch_size=16))
        base = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
        base |= {"vocab_size": 30524, "encoder_hidden_size": 1024, "max_position_embeddings": 512}
        text = BlipTextModel(BlipTextConfig(**base, is_decoder=True), add_pooling_layer=False)

        def score() -> None:
            patches = vision(pixel_values=torch.empty(1, 3, 224, 224)).last_hidden_state
            words = torch.zeros(1, MAX_TOKENS, dtype=torch.long)
            text(input_ids=words, encoder_hidden_states=patches, is_decoder=False)

        return RewardModel([vision, text], score)

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        pixels = self.preprocess(images).to(self.device, self.dtype)
        patches = self.vision(pixel_values=pixels).last_hidden_state
        words = self.tokenizer(prompts, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt").to(
            self.device
        )
        joint = self.text(
            input_ids=words["input_ids"],
            attention_mask=words["attention_mask"],
            encoder_hidden_states=patches,
            encoder_attention_mask=torch.ones(patches.shape[:2], dtype=torch.long, device=self.device),
        ).last_hidden_state[:, 0]
        return (self.head(joint.float()) - MEAN) / STD
