"""What an edit keeps, by features of DINOv2 (Oquab et al. 2023, arXiv 2304.07193)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from g2rpo.core.errors import shown
from g2rpo.core.images import read_inputs, to_tensor
from g2rpo.core.rewards import RewardModel
from g2rpo.rewards.pixels import EditReward, Preprocess
from g2rpo.rewards.weights import config_in, parse_dtype, pretrained

BASE = "facebook/dinov2-base"
FILES = ("config.json",)
DINO_KINDS = ("dinov2", "dinov2_with_registers", "dinov3_vit")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Dino:
    """Unit features, float32, of uint8 pictures [B, 3, H, W], which are squashed to squares of
    about `size` pixels."""

    def __init__(
        self, path: str | Path, *, size: int = 224, device: str = "cpu", dtype: str = "float32"
    ) -> None:
        from transformers import AutoModel

        model = pretrained(AutoModel, path)
        if model.config.model_type not in DINO_KINDS:
            raise ValueError(f"{path} is no DINOv2 (model_type {shown(model.config.model_type)})")
        self.model = model.to(device=device, dtype=parse_dtype(dtype))
        self.device, self.size = torch.device(device), size_of_dino(model.config, size)
        self.preprocess = Preprocess(
            resize=self.size, crop=self.size, mode="squash", mean=IMAGENET_MEAN, std=IMAGENET_STD
        )

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Of the whole pictures [B, D], and of their patches [B, N, D]."""
        pixels = self.preprocess(images).to(self.device, self.model.dtype)
        states = self.model(pixel_values=pixels).last_hidden_state.float()
        first = 1 + getattr(self.model.config, "num_register_tokens", 0)
        picture, patches = torch.nn.functional.normalize(states, dim=-1).split(
            [first, states.shape[1] - first], 1
        )
        return picture[:, 0], patches


def size_of_dino(config: Any, size: int) -> int:
    """The largest multiple of the patch size that is at most `size`; ValueError if there is
    none."""
    if size < config.patch_size:
        raise ValueError(f"size must be at least a patch, {config.patch_size}, got {size}")
    return int(size // config.patch_size * config.patch_size)


def dino_model(options: Mapping[str, Any]) -> RewardModel | None:
    """The model of a reward with the options `path` and `size`; None for a repository that is not
    known."""
    from transformers import AutoModel, Dinov2Config

    config = Dinov2Config(image_size=518) if options["path"] == BASE else config_in(options["path"])
    if config is None:
        return None
    model, size = AutoModel.from_config(config), size_of_dino(config, options["size"])
    return RewardModel([model], lambda: model(pixel_values=torch.empty(1, 3, size, size)))


class DinoSimilarity(EditReward):
    """How much of its first input picture a picture keeps: the mean cosine of their patches at the
    same places, over the `share` of patches with the highest, so that it may change elsewhere. 1
    for an unchanged picture; it ignores the instruction, so combine it with a reward for the edit.

    Args: `path`, a DINOv2, DINOv2 with registers or DINOv3 in transformers' format; `share`;
    `size`, to which both pictures are squashed; `device`; `dtype` of the weights; `batch_size`. A
    prompt without an input picture has no score.
    """

    files = {"path": FILES}

    def __init__(
        self,
        path: str = BASE,
        *,
        share: Annotated[float, Field(gt=0, le=1)] = 0.5,
        size: int = 224,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        self.share, self.batch_size = share, batch_size
        self.dino = Dino(path, size=size, device=device, dtype=dtype)
        self.device = self.dino.device

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        return dino_model(options)

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        before = {
            one: self.dino(to_tensor([read_inputs(one)[0]]))[1] for one in dict.fromkeys(prompts)
        }
        kept = torch.cat([before[prompt] for prompt in prompts])
        agreement = (self.dino(images)[1] * kept).sum(-1)
        return agreement.topk(math.ceil(self.share * agreement.shape[1])).values.mean(1)
