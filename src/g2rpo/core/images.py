"""Pictures as tensors and as Pillow's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def to_uint8(images: Tensor) -> Tensor:
    """The 8-bit pictures [B, 3, H, W] of `images` in [0, 1], rounded as pipelines do when they
    save; NaN becomes black."""
    return (images.float() * 255).round_().clamp_(0, 255).nan_to_num_(0).to(torch.uint8)


def to_pil(images: Tensor) -> list[Image.Image]:
    """Pillow pictures of `images` [B, 3, H, W], 8 bit or in [0, 1]."""
    levels = images if images.dtype == torch.uint8 else to_uint8(images)
    return [Image.fromarray(array) for array in levels.permute(0, 2, 3, 1).cpu().numpy()]


def to_tensor(pictures: Sequence[Image.Image]) -> Tensor:
    """uint8 pictures [B, 3, H, W] of Pillow pictures of one size."""
    return torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(
        0, 3, 1, 2
    )
