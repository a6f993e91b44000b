"""Preprocessing of pictures for learned rewards: check, quantise to 8 bits, resize, normalise.

Published scores are scores of 8-bit pictures, so rewards see the picture as it would be saved: a score does not depend on
whether the picture went through a file, a remote server or neither. Resizing is Pillow's, as in the published pipelines;
the tensor resizes of other libraries differ from it by enough to change ranks inside a group.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

log = logging.getLogger(__name__)

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def check_batch(images: Tensor, prompts: Sequence[str]) -> None:
    """Raise ValueError unless `images` is a float [B, 3, H, W] in [0, 1] with one prompt per image.

    Pixels that are not finite are allowed here: their pictures get no score.
    """
    if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
        raise ValueError(f"images must be float [B, 3, H, W], got {images.dtype} {list(images.shape)}")
    if isinstance(prompts, str) or len(prompts) != len(images):
        raise ValueError(f"one prompt per image: got {len(images)} images and {prompts!r:.80}")
    if not len(images):
        return
    low, high = (x.item() for x in images.aminmax())
    if not math.isfinite(low) or not math.isfinite(high):  # the slow way, only where it is needed
        low, high = (x.item() for x in torch.where(torch.isfinite(images), images, 0.5).aminmax())
    if low < -0.01 or high > 1.01:
        raise ValueError(f"images must be in [0, 1], got values from {low:.3g} to {high:.3g}")


def to_uint8(images: Tensor) -> Tensor:
    """The 8-bit pictures [B, 3, H, W] of `images` in [0, 1], rounded as pipelines do when they save."""
    return (images.float() * 255).round_().clamp_(0, 255).to(torch.uint8)


def to_pil(images: Tensor) -> list[Image.Image]:
    """Pillow pictures of uint8 `images` [B, 3, H, W]."""
    return [Image.fromarray(array) for array in images.permute(0, 2, 3, 1).cpu().numpy()]


def to_tensor(pictures: Sequence[Image.Image]) -> Tensor:
    """uint8 pictures [B, 3, H, W] of Pillow pictures of one size."""
    return torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2)


def score_in_batches(
    images: Tensor,
    prompts: Sequence[str],
    score: Callable[[Tensor, list[str]], Tensor],
    batch_size: int,
    missing: str = "the model's score is not finite",
) -> Tensor:
    """Scores [B], float32 on CPU: `score(uint8 images, prompts)` for at most `batch_size` rows at a time.

    Where `images` require a gradient, `score` gets the same 8-bit values as float32 with the gradient of what was rounded, and
    scores keep theirs, on their device.

    A picture with a NaN or infinite pixel is not shown to the model: its score is NaN. So is the score of a row for which the
    model itself answers something that is not finite, `missing` in words. One warning counts both.
    """
    check_batch(images, prompts)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if images.requires_grad:
        parts = zip(images.split(batch_size), _chunks(prompts, batch_size), strict=True)
        return torch.cat([score(with_gradient(to_uint8(part), part * 255), own) for part, own in parts])
    scores = torch.full((len(images),), torch.nan)
    extremes = torch.stack(images.flatten(1).aminmax(dim=1))  # NaN if any pixel is
    rows = torch.isfinite(extremes).all(dim=0).nonzero().flatten().tolist()
    for start in range(0, len(rows), batch_size):
        chunk = rows[start : start + batch_size]
        values = score(to_uint8(images[chunk]), [prompts[i] for i in chunk]).float().cpu()
        scores[chunk] = values.where(torch.isfinite(values), torch.nan)
    _warn({"pixels that are not finite": len(images) - len(rows), missing: int(scores[rows].isnan().sum())}, len(images))
    return scores


def _chunks(prompts: Sequence[str], size: int) -> list[list[str]]:
    return [list(prompts[start : start + size]) for start in range(0, len(prompts), size)]


def with_gradient(value: Tensor, smooth: Tensor) -> Tensor:
    """`value`, float32, with the gradient of `smooth`: for what is rounded, or computed by Pillow."""
    return smooth + (value.to(smooth) - smooth).detach()


def _warn(unscored: dict[str, int], count: int) -> None:
    """One warning of how many pictures of `count` have no score, by reason."""
    reasons = [f"{number} ({reason})" for reason, number in unscored.items() if number]
    if reasons:
        log.warning("no score for %d of %d images: %s", sum(unscored.values()), count, ", ".join(reasons))


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """8-bit pictures of any size -> what a vision tower reads: [B, 3, crop, crop], float32, normalised, on CPU.

    `mode` "shortest" brings the shorter side to `resize` and cuts the middle `crop` pixels; "squash" resizes both sides
    to `resize`, whatever the proportions. `odd_margin` is where the crop begins if an odd number of pixels is cut:
    "round" as torchvision does it (half to even), "floor" as transformers does it.
    """

    resize: int
    crop: int
    mode: Literal["shortest", "squash"] = "shortest"
    odd_margin: Literal["round", "floor"] = "round"
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    def __post_init__(self) -> None:
        if self.mode not in ("shortest", "squash") or self.interpolation not in _FILTERS:
            raise ValueError(
                f"resize mode {self.mode!r} with {self.interpolation!r} is not supported; "
                "modes are 'shortest' and 'squash', filters 'bicubic' and 'bilinear'"
            )
        if self.crop > self.resize:
            raise ValueError(f"the crop ({self.crop}) is larger than the resized picture ({self.resize})")

    def __call__(self, images: Tensor) -> Tensor:
        levels = images.detach().round().to(torch.uint8) if images.is_floating_point() else images
        exact = to_tensor([self._resize_and_crop(picture) for picture in to_pil(levels)])
        if not images.requires_grad:
            return normalise(exact, self.mean, self.std)
        return normalise(with_gradient(exact, self._smooth(images)) / 255, self.mean, self.std)

    def _smooth(self, images: Tensor) -> Tensor:
        """The same resize and crop as a function with a gradient; its values differ from Pillow's by rounding."""
        height, width = self._resized(*images.shape[-2:])
        x = interpolate(images, (height, width), mode=self.interpolation, antialias=True, align_corners=False)
        left, top = self._margin(width - self.crop), self._margin(height - self.crop)
        return x[..., top : top + self.crop, left : left + self.crop].clamp(0, 255)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if self.mode == "squash":
            return self.resize, self.resize
        short = min(width, height)  # the longer side is cut to an integer, not rounded, upstream
        return (
            self.resize if height == short else int(self.resize * height / short),
            self.resize if width == short else int(self.resize * width / short),
        )

    def _resize_and_crop(self, picture: Image.Image) -> Image.Image:
        height, width = self._resized(picture.height, picture.width)
        # Rows first, then columns: newer Pillow versions pick the cheaper order, which moves pixels by up to 4 levels.
        kernel = _FILTERS[self.interpolation]
        picture = picture.resize((width, picture.height), kernel).resize((width, height), kernel)
        left, top = self._margin(width - self.crop), self._margin(height - self.crop)
        return picture.crop((left, top, left + self.crop, top + self.crop))

    def _margin(self, excess: int) -> int:
        return round(excess / 2.0) if self.odd_margin == "round" else excess // 2


def normalise(images: Tensor, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD) -> Tensor:
    """uint8, or float in [0, 1], [B, 3, H, W] -> (x - mean) / std per channel, float32."""
    x = images.float() / 255 if images.dtype == torch.uint8 else images
    shape = (1, 3, 1, 1)
    return (x - torch.tensor(mean, device=x.device).view(shape)) / torch.tensor(std, device=x.device).view(shape)
