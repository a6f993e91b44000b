"""CLIP score: similarity of a picture and its prompt under any CLIP.

Published "CLIP scores" differ in checkpoint, preprocessing and scale; here it is the cosine, with the checkpoint's own
preprocessing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from g2rpo.core.types import RewardModel
from g2rpo.rewards.clip_encoder import CLIPReward, clip_model, load_clip
from g2rpo.rewards.weights import CLIP_FILES, TOKENIZER_FILES


class CLIPScore(CLIPReward):
    """Cosine between a picture and its prompt, by any CLIP on disk or on the Hugging Face Hub (Hessel et al. 2021).

    Scores are in [-1, 1]; about 0.2 to 0.45 for the DFN5B models. Args: `path`, a folder or repository id in transformers
    or open_clip format; `tokenizer`, where the model's folder has none; `format`, to force one of the two; `device`;
    `dtype` of the weights ("float32", "float16", "bfloat16"); `batch_size`, pictures per forward.
    """

    files = {"path": CLIP_FILES, "tokenizer": TOKENIZER_FILES}

    def __init__(
        self,
        path: str,
        *,
        tokenizer: str | None = None,
        format: Literal["auto", "transformers", "open_clip"] = "auto",
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        self.encoder = load_clip(path, tokenizer=tokenizer, format=format, device=device, dtype=dtype)
        self.batch_size = batch_size

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        return clip_model(options["path"])
