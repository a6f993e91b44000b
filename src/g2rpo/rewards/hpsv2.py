"""HPSv2.1, the human preference score of Wu et al. 2023: a fine-tuned ViT-H-14 CLIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from g2rpo.core.types import RewardModel
from g2rpo.rewards.clip_encoder import ClipEncoder, CLIPReward, build_open_clip, clip_of, load_clip_tokenizer
from g2rpo.rewards.open_clip import VIT_H_14, clean_prompt, clip_config
from g2rpo.rewards.pixels import normalise
from g2rpo.rewards.weights import TOKENIZER_FILES, fetch, read_state_dict

WEIGHTS = "HPS_v2.1_compressed.pt"


def pad_to_square(images: Tensor, size: int, antialias: bool = True) -> Tensor:
    """uint8 `images` [B, 3, H, W] -> float in [0, 1] (bicubic may overshoot a little), [B, 3, size, size].

    The longer side becomes `size`, and black bars fill the rest; nothing is cut off. The resize works on the tensor, as
    upstream's does. A picture whose longer side is already `size` is padded too (upstream fails if it is not square).
    """
    height, width = images.shape[-2:]
    scale = size / max(height, width)
    height, width = round(height * scale), round(width * scale)
    x = images.float() / 255
    if scale != 1.0:
        x = torch.nn.functional.interpolate(x, size=(height, width), mode="bicubic", align_corners=False, antialias=antialias)
    left, top = (size - width) // 2, (size - height) // 2
    return torch.nn.functional.pad(x, (left, size - width - left, top, size - height - top))


class HPSv2(CLIPReward):
    """HPSv2.1: image and text features of a fine-tuned ViT-H-14, multiplied; about 0.2 to 0.38 on its training pictures.

    Only scores of one prompt are comparable. Args: `path`, the file HPS_v2.1_compressed.pt, its folder or the repository;
    `tokenizer`, a folder or repository with CLIP's tokenizer, which the published file lacks; `antialias`, how the tensor
    is downscaled: torchvision antialiases since 0.17 and did not when HPSv2.1 was published; `device`; `dtype` of the
    weights (upstream: float16 autocast); `batch_size`; `model_cfg`, an open_clip architecture other than ViT-H-14.
    """

    upstream, licence = "https://github.com/tgxs002/HPSv2", "Apache-2.0"
    files = {"path": (WEIGHTS,), "tokenizer": TOKENIZER_FILES}

    def __init__(
        self,
        path: str = "xswu/HPSv2",
        *,
        tokenizer: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        antialias: bool = True,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
        model_cfg: Mapping[str, Any] | None = None,
    ) -> None:
        config = dict(VIT_H_14 if model_cfg is None else model_cfg)
        file = fetch(path, WEIGHTS)
        model = build_open_clip(config, read_state_dict(file, key="state_dict"), "HPSv2.1 (open_clip ViT-H-14)", file)
        size = model.config.vision_config.image_size

        def preprocess(images: Tensor) -> Tensor:
            return normalise(pad_to_square(images.to(device), size, antialias))

        words = load_clip_tokenizer(tokenizer)
        self.encoder = ClipEncoder(model, words, preprocess, device=device, dtype=dtype, clean=clean_prompt)
        self.batch_size = batch_size

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        return clip_of(clip_config(options["model_cfg"] or VIT_H_14))
