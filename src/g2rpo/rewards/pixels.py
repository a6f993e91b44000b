"""Preprocessing of pictures for learned rewards: check, quantise to 8 bits, resize, normalise.

Published scores are scores of 8-bit pictures, so pictures are rounded as if saved: a score is the
same for a picture from a file, through a remote server, or from memory. Resizing is Pillow's, as in
the published pipelines; the tensor resizes of other libraries differ from it by enough to change
ranks inside a group.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from g2rpo.core.errors import counted, shown
from g2rpo.core.images import INPUT_PICTURE, images_of, to_pil, to_tensor, to_uint8
from g2rpo.core.rewards import Reward

log = logging.getLogger(__name__)
T = TypeVar("T")

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def check_batch(images: Tensor, prompts: Sequence[str], video: bool = False) -> None:
    """Raise ValueError unless `images` is float [B, 3, H, W], of `video` [B, T, 3, H, W], in [0, 1]
    with a prompt for each.

    Pixels that are not finite are allowed here: their pictures get no score.
    """
    if images.ndim != 4 + video or images.shape[-3] != 3 or not images.is_floating_point():
        wanted = f"float [B, {'T, ' * video}3, H, W]"
        raise ValueError(f"images must be {wanted}, got {images.dtype} {list(images.shape)}")
    if isinstance(prompts, str) or len(prompts) != len(images):
        raise ValueError(
            f"one prompt per image: got {counted(len(images), 'image')} and {shown(prompts)}"
        )
    if not len(images):
        return
    low, high = (x.item() for x in images.aminmax())
    if not math.isfinite(low) or not math.isfinite(high):  # the slow way, only where it is needed
        low, high = (x.item() for x in torch.where(torch.isfinite(images), images, 0.5).aminmax())
    if low < -0.01 or high > 1.01:
        raise ValueError(f"images must be in [0, 1], got values from {low:.3g} to {high:.3g}")


class PictureReward(Reward):
    """A reward of 8-bit pictures, or with `video` clips: a subclass scores `batch_size` rows at a
    time in `score_pictures`.

    The score is NaN for a picture with a NaN or infinite pixel, which is not passed on, and for a
    result that is not finite; `missing` describes the latter in words. One warning counts both.
    Constructors raise OSError or ValueError, which say what is missing or does not fit.
    """

    batch_size = 64
    missing = "the model's score is not finite"
    example = ""
    """Why one of these has no score; the warning ends with it."""

    def score_pictures(self, images: Tensor, prompts: list[Any]) -> Tensor:
        """Scores [B] of uint8 images [B, 3, H, W]. If pictures require a gradient, `images` are the
        same 8-bit values as float32, with the gradient of the unrounded ones, and scores keep
        gradient and device."""
        raise NotImplementedError(f"{type(self).__name__} has no score_pictures")

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        check_batch(images, prompts, self.video)
        if images.requires_grad:
            parts = zip(
                images.split(self.batch_size), _chunks(prompts, self.batch_size), strict=True
            )
            return torch.cat(
                [
                    self.score_pictures(with_gradient(to_uint8(part), part * 255), own)
                    for part, own in parts
                ]
            )
        scores, self.example = torch.full((len(images),), torch.nan), ""
        rows = images.isfinite().flatten(1).all(1).nonzero().flatten().tolist()
        for chunk in _chunks(rows, self.batch_size):
            values = (
                self.score_pictures(to_uint8(images[chunk]), [prompts[i] for i in chunk])
                .float()
                .cpu()
            )
            scores[chunk] = values.where(torch.isfinite(values), torch.nan)
        reasons = {
            "pixels that are not finite": len(images) - len(rows),
            self.missing: int(scores[rows].isnan().sum()),
        }
        if any(reasons.values()):
            counts = ", ".join(
                f"{number} ({reason})" for reason, number in reasons.items() if number
            )
            log.warning(
                "no score for %d of %d images: %s%s",
                sum(reasons.values()),
                len(images),
                counts,
                self.example and f"; of one: {self.example}",
            )
        return scores


class TargetReward(PictureReward):
    """A reward for prompts with a `target`, which `score_pictures` gets instead of the prompt.
    Prompts without one have no score; the first time, a warning counts them."""

    _warned = False

    def target_of(self, prompt: str) -> Any:
        """The `target` of a prompt; ValueError says why there is none."""
        if (target := self.target(prompt)) is None:
            raise ValueError(f"it lacks {self.wants}")
        return target

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        check_batch(images, prompts)
        targets, reasons = {}, []
        for i, prompt in enumerate(prompts):
            try:
                targets[i] = self.target_of(prompt)
            except ValueError as error:
                reasons.append(f"{shown(prompt)}: {error}")
        scores = torch.full((len(images),), torch.nan)
        scores[list(targets)] = super().__call__(images[list(targets)], list(targets.values()))
        if reasons and not self._warned:
            self._warned = True
            log.warning(
                "no score for %d of %d prompts, the first: %s",
                len(reasons),
                len(images),
                reasons[0],
            )
        return scores


class EditReward(TargetReward):
    """A reward for prompts with an input picture; `score_pictures` gets these prompts
    themselves."""

    wants = INPUT_PICTURE

    @staticmethod
    def target(prompt: str) -> str | None:
        return prompt if images_of(prompt) else None


def _chunks(rows: Sequence[T], size: int) -> list[list[T]]:
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def with_gradient(value: Tensor, smooth: Tensor) -> Tensor:
    """`value`, float32, with the gradient of `smooth`: a straight-through gradient for rounding and
    Pillow's resize."""
    return smooth + (value.to(smooth) - smooth).detach()


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """8-bit pictures of any size -> what a vision tower reads: [B, 3, crop, crop], float32,
    normalised, on CPU.

    `mode` "shortest" brings the shorter side to `resize` and cuts the middle `crop` pixels;
    "squash" resizes both sides to `resize`, whatever the proportions. `odd_margin` is where the
    crop begins if an odd number of pixels is cut: "round" as torchvision does it (half to even),
    "floor" as transformers does it.
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
            raise ValueError(
                f"the crop ({self.crop}) is larger than the resized picture ({self.resize})"
            )

    def __call__(self, images: Tensor) -> Tensor:
        levels = images.detach().round().to(torch.uint8) if images.is_floating_point() else images
        # a GPU waits for it; Pillow resizes without Python's lock
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            exact = to_tensor([*threads.map(self._resize_and_crop, to_pil(levels))])
        if not images.requires_grad:
            return normalise(exact, self.mean, self.std)
        return normalise(with_gradient(exact, self._smooth(images)) / 255, self.mean, self.std)

    def _smooth(self, images: Tensor) -> Tensor:
        """The same resize and crop as a function with a gradient; its values differ from Pillow's
        by rounding."""
        height, width = self._resized(*images.shape[-2:])
        x = interpolate(
            images, (height, width), mode=self.interpolation, antialias=True, align_corners=False
        )
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
        # One side at a time, the width first, as Pillow itself does it until version 12. Version 13
        # begins with the height of tall pictures that are squashed: pixels of noise then move by up
        # to 16 levels.
        kernel = _FILTERS[self.interpolation]
        picture = picture.resize((width, picture.height), kernel).resize((width, height), kernel)
        left, top = self._margin(width - self.crop), self._margin(height - self.crop)
        return picture.crop((left, top, left + self.crop, top + self.crop))

    def _margin(self, excess: int) -> int:
        return round(excess / 2.0) if self.odd_margin == "round" else excess // 2


def normalise(
    images: Tensor, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD
) -> Tensor:
    """uint8, or float in [0, 1], [B, 3, H, W] -> (x - mean) / std per channel, float32."""
    x = images.float() / 255 if images.dtype == torch.uint8 else images
    low, scale = (torch.tensor(each, device=x.device).view(1, 3, 1, 1) for each in (mean, std))
    return (x - low) / scale
