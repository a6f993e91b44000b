"""PickScore v1 (Kirstain et al. 2023): a ViT-H-14 CLIP fine-tuned on the choices of Pick-a-Pic users."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from g2rpo.rewards.clip_encoder import load_clip
from g2rpo.rewards.pixels import score_in_batches


class PickScore:
    """exp(logit_scale) * cosine, as on the model card; about 18 to 26 for the published weights.

    Other trainers divide by 26, subtract 18 and divide by 8, or leave the scale away: their numbers are not these.
    Args: `path`, the model's folder or repository; `processor`, a folder or repository with the tokenizer and
    preprocessor_config.json, which the published model is used with but does not hold; `device`; `dtype` of the weights
    ("float32", "float16", "bfloat16"); `batch_size`, pictures per forward.
    Raises FileNotFoundError, OSError or ValueError, which say what is missing or does not fit.
    """

    differentiable = True

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

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores [B], float32 on CPU, of images [B, 3, H, W] in [0, 1]; NaN where a picture is not finite."""
        return score_in_batches(images, prompts, self._score, self.batch_size)

    def _score(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.scale * self.encoder.similarity(images, prompts)
