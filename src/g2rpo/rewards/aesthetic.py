"""LAION's aesthetic predictor v2 (Schuhmann 2022): a linear head on OpenAI CLIP ViT-L/14 image features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from g2rpo.core.types import RewardModel
from g2rpo.rewards.clip_encoder import clip_model, load_clip
from g2rpo.rewards.pixels import PictureReward, Preprocess
from g2rpo.rewards.weights import CLIP_FILES, build, fetch, read_state_dict

WEIGHTS = "sac+logos+ava1-l14-linearMSE.pth"


class LinearHead(nn.Module):
    """Five linear layers without activations, `width` -> 1024 -> 128 -> 64 -> 16 -> 1, under the published names.

    The published numbering counts dropouts too: layers.0, 2, 4, 6 and 7.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = {0: (width, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}
        self.layers = nn.ModuleDict({str(i): nn.Linear(*size) for i, size in sizes.items()})

    def forward(self, features: Tensor) -> Tensor:
        """Scores [B] of features [B, width]."""
        for layer in self.layers.values():
            features = layer(features)
        return features.squeeze(-1)


class Aesthetic(PictureReward):
    """The aesthetic quality of a picture, about 1 to 10; it ignores the prompt, so it is easily hacked.

    Args: `path`, the head's file (sac+logos+ava1-l14-linearMSE.pth) or its folder; `clip`, the folder or repository of
    OpenAI's CLIP ViT-L/14; `device`; `dtype` of CLIP's weights (the head stays float32); `batch_size`.
    """

    differentiable = True
    upstream = "https://github.com/christophschuhmann/improved-aesthetic-predictor"
    files = {"path": (WEIGHTS,), "clip": CLIP_FILES}

    def __init__(
        self,
        path: str,
        *,
        clip: str = "openai/clip-vit-large-patch14",
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        file = fetch(path, WEIGHTS)
        self.encoder = load_clip(clip, device=device, dtype=dtype, text=False)
        self.device = self.encoder.device
        # The head was trained on features of OpenAI's own preprocessing, which cuts an odd margin as torchvision does.
        self.encoder.preprocess = replace(cast(Preprocess, self.encoder.preprocess), odd_margin="round")
        width = self.encoder.model.config.projection_dim
        self.head = build(lambda: LinearHead(width), read_state_dict(file), f"an aesthetic head for {clip}", file).to(device)
        self.batch_size = batch_size

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        return clip_model(options["clip"])

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        return cast(Tensor, self.head(self.encoder.image_features(images)))
