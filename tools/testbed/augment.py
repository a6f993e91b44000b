"""Augmentations: mild ones for training, harsh ones as examples of bad pictures."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur of square images [B, 3, W, W], each with its own sigma [B], in pixels."""
    rows = sigma > 0.1  # the others would stay as they are
    place = torch.arange(images.shape[-1])
    weights = torch.exp(-((place[:, None] - place) ** 2) / (2 * sigma[rows, None, None] ** 2))
    # [R, 1, W, W]: near the frame only what is inside
    weights = (weights / weights.sum(-1, keepdim=True))[:, None]
    blurred = images.clone()
    blurred[rows] = weights @ images[rows] @ weights.mT
    return blurred


def wobble(images: Tensor, amount: Tensor) -> Tensor:
    """Bends images [B, 3, H, W] by a smooth random flow of about amount [B] pixels, as a weak
    generator's lines are."""
    batch, _, height, width = images.shape
    flow = F.interpolate(
        torch.randn(batch, 2, 9, 9), size=(height, width), mode="bicubic", align_corners=True
    )
    flow = flow * amount[:, None, None, None] * 2 / width
    rows, cols = torch.meshgrid(
        torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij"
    )
    grid = torch.stack((cols, rows), -1) + flow.permute(0, 2, 3, 1)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=True)


def fade(images: Tensor, amount: Tensor) -> Tensor:
    """Washes images out: mixes them with a light grey by amount [B] in [0, 1]."""
    amount = amount[:, None, None, None]
    return images * (1 - amount) + 0.85 * amount


def speckle(images: Tensor, amount: Tensor) -> Tensor:
    """Noise of standard deviation amount [B], half of it per pixel and half in blotches of four
    pixels."""
    fine = torch.randn_like(images)
    coarse = F.interpolate(
        torch.randn(len(images), 3, 16, 16), size=images.shape[-2:], mode="bilinear"
    )
    return images + (fine + coarse) / 1.5 * amount[:, None, None, None]


def _some(batch: int, share: float, most: float) -> Tensor:
    """Amounts [batch]: zero, but uniform up to `most` in a share of the rows."""
    return torch.rand(batch) * most * (torch.rand(batch) < share)


def mild(images: Tensor) -> Tensor:
    """Mild augmentations, each in about a third of the rows."""
    batch = len(images)
    images = blur(images, _some(batch, 0.3, 0.9))
    images = wobble(images, _some(batch, 0.4, 0.5))
    images = fade(images, _some(batch, 0.3, 0.1))
    return speckle(images, _some(batch, 0.5, 0.04)).clamp(0, 1)


def harsh(images: Tensor) -> Tensor:
    """Degraded pictures: each row gets one or more of blur, bent lines, washed-out colours,
    noise."""
    batch = len(images)
    chosen = torch.rand(batch, 4) < 0.3
    chosen[torch.arange(batch), torch.randint(4, (batch,))] = True
    strength = (0.35 + 0.65 * torch.rand(batch, 4)) * chosen
    images = wobble(images, strength[:, 1] * 2.5)
    images = blur(images, strength[:, 0] * 2.2)
    images = fade(images, strength[:, 2] * 0.6)
    return speckle(images, strength[:, 3] * 0.2).clamp(0, 1)
