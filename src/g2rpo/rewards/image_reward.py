"""ImageReward v1.0 (Xu et al. 2023): BLIP encodes picture and prompt jointly, and a small head
computes the score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from g2rpo.core.rewards import RewardModel
from g2rpo.rewards.clip import LinearHead
from g2rpo.rewards.pixels import PictureReward, Preprocess
from g2rpo.rewards.weights import (
    TOKENIZER_FILES,
    build_module,
    fetch,
    parse_dtype,
    place_of,
    read_state_dict,
)

# of the raw scores on the training set, as published
SCORE_MEAN, SCORE_STD = 0.16717362830052426, 1.0333394966054072
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
    return {
        k.removeprefix(prefix): v
        for k, v in state.items()
        if k.startswith(prefix) and not k.startswith(_UNUSED)
    }


class ImageReward(PictureReward):
    """(r - 0.1672) / 1.0333 of BLIP's joint encoding of picture and prompt; about -2 to 2.

    The picture's shorter side becomes 224 pixels and the middle is cut out; a prompt has at most 35
    tokens. Args: `path`, the file ImageReward.pt, its folder or the repository; `tokenizer`,
    BERT's; `device`; `dtype` of BLIP's weights (the head stays float32); `batch_size`.
    """

    differentiable = True
    upstream, licence = "https://github.com/THUDM/ImageReward", "Apache-2.0"
    files = {"path": ("ImageReward.pt",), "tokenizer": TOKENIZER_FILES}
    picture: ClassVar[dict[str, Any]] = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 224, "patch_size": 16,
    }  # fmt: skip
    words: ClassVar[dict[str, Any]] = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "vocab_size": 30524, "encoder_hidden_size": 1024, "max_position_embeddings": 512,
    }  # fmt: skip
    """Sizes of the two towers, BLIP's large one for pictures and BERT with cross-attention, in
    transformers' terms."""

    def __init__(
        self,
        path: str = "THUDM/ImageReward",
        *,
        tokenizer: str = "google-bert/bert-base-uncased",
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        from transformers import BertTokenizerFast

        file = fetch(path, *self.files["path"])
        state = read_state_dict(file)
        self.device, self.dtype = torch.device(device), parse_dtype(dtype)

        def made(
            factory: Callable[[], nn.Module],
            own: Mapping[str, Tensor],
            what: str,
            kind: torch.dtype,
        ) -> Any:
            return build_module(factory, own, f"ImageReward's {what}", file, published=state).to(
                device=self.device, dtype=kind
            )

        self.vision = made(self.vision_tower, vision_state(state), "ViT", self.dtype)
        self.text = made(
            self.text_tower, part(state, "blip.text_encoder."), "text encoder", self.dtype
        )
        self.head = made(
            lambda: LinearHead(self.words["hidden_size"]),
            part(state, "mlp."),
            "head",
            torch.float32,
        )
        self.tokenizer = BertTokenizerFast.from_pretrained(place_of(tokenizer))
        self.preprocess = Preprocess(
            resize=self.picture["image_size"], crop=self.picture["image_size"]
        )
        self.batch_size = batch_size

    @classmethod
    def vision_tower(cls) -> Any:
        """transformers' module for pictures."""
        from transformers import BlipVisionConfig
        from transformers.models.blip.modeling_blip import BlipVisionModel

        return BlipVisionModel(
            BlipVisionConfig(**cls.picture, layer_norm_eps=1e-6, hidden_act="gelu")
        )

    @classmethod
    def text_tower(cls) -> Any:
        """Its module for prompts; as a decoder it has the layers of cross-attention, and it is run
        as an encoder."""
        from transformers import BlipTextConfig
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        config = BlipTextConfig(
            **cls.words, layer_norm_eps=1e-12, hidden_act="gelu", is_decoder=True
        )
        return BlipTextModel(config, add_pooling_layer=False)

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        """The two towers; the small head is left out."""
        vision, text, side = cls.vision_tower(), cls.text_tower(), cls.picture["image_size"]

        def score() -> None:
            patches = vision(pixel_values=torch.empty(1, 3, side, side)).last_hidden_state
            words = torch.zeros(1, MAX_TOKENS, dtype=torch.long)
            text(input_ids=words, encoder_hidden_states=patches, is_decoder=False)

        return RewardModel([vision, text], score)

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        pixels = self.preprocess(images).to(self.device, self.dtype)
        patches = self.vision(pixel_values=pixels).last_hidden_state
        options = {
            "padding": "max_length",
            "truncation": True,
            "max_length": MAX_TOKENS,
            "return_tensors": "pt",
        }
        words = self.tokenizer(prompts, **options).to(self.device)
        joint = self.text(
            input_ids=words["input_ids"],
            attention_mask=words["attention_mask"],
            encoder_hidden_states=patches,
            encoder_attention_mask=torch.ones(
                patches.shape[:2], dtype=torch.long, device=self.device
            ),
        ).last_hidden_state[:, 0]
        return (self.head(joint.float()) - SCORE_MEAN) / SCORE_STD
