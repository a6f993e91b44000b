"""PickScore v1 (Kirstain et al. 2023): a ViT-H-14 CLIP fine-tuned on the choices of Pick-a-Pic users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from g2rpo.core.types import RewardModel
from g2rpo.rewards.clip_encoder import CLIPReward, clip_of, load_clip
from g2rpo.rewards.open_clip import VIT_H_14, clip_config
from g2rpo.rewards.weights import CLIP_FILES, TOKENIZER_FILES


class PickScore(CLIPReward):
    """exp(logit_scale) * cosine, as on the model card; about 18 to 26 for the published weights.

    Other trainers divide by 26, subtract 18 and divide by 8, or leave the scale away: their numbers are not these.
    Args: `path`, the model's folder or repository; `processor`, a folder or repository with the tokenizer and
    preprocessor_config.json, which the published model is used with but does not hold; `device`; `dtype` of the weights
    ("float32", "float16", "bfloat16"); `batch_size`, pictures per forward.
    """

    upstream = "https://github.com/yuvalkirstain/PickScore"
    files = {"path": CLIP_FILES, "processor": TOKENIZER_FILES}

    def __init__(
        self,
        path: str = "yuvalkirstain/PickScore_v1",
        *,
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        self.encoder = load_clip(
            path, tokenizer=processor, preprocessor=processor, format="transformers", device=device, dtype=dtype
        )
        self.scale = self.encoder.model.logit_scale.float().exp()
        self.batch_size = batch_size

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        return clip_of(clip_config(VIT_H_14))

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.scale * super().score_pictures(images, prompts)
