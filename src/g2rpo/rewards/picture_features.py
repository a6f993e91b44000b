"""Features of pictures to which a head is fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

Features = Mapping[str, Tensor]
"""Features [G, D] of the pictures of a group, by block."""


class PictureEncoder(Protocol):
    """What a reward with a picture encoder has."""

    def features(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Features [B, D] of pictures [B, 3, H, W] in [0, 1] and of their prompts."""
        ...


@torch.no_grad()
def features_of(
    images: Tensor, prompts: Sequence[str], encoder: PictureEncoder | None = None
) -> dict[str, Tensor]:
    """Features of pictures [B, 3, H, W] in [0, 1], or means over frames of clips [B, T, 3, H, W],
    by block: statistics of colour and layout, 8 x 8 pixels and, with an `encoder`, its features of
    the picture, and their products with the prompt's.
    """
    if images.ndim == 5:
        every = features_of(
            images.flatten(0, 1),
            [prompt for prompt in prompts for _ in range(images.shape[1])],
            encoder,
        )
        return {
            block: values.unflatten(0, images.shape[:2]).mean(1) for block, values in every.items()
        }
    images = images.float().cpu()
    found = {
        "colour": _colour(images),
        "layout": _layout(images),
        "pixels": torch.nn.functional.adaptive_avg_pool2d(images, 8).flatten(1),
    }
    if encoder is not None:
        pictures, texts = encoder.features(images, prompts)
        found["encoder"] = pictures.float().cpu()
        found["encoder x prompt"] = found["encoder"] * texts.float().cpu()
    return found


def _colour(images: Tensor) -> Tensor:
    """Means and deviations of the channels, saturation, red less blue, and the share of dark and of
    bright pixels."""
    luma = images.mean(1)
    saturation = images.amax(1) - images.amin(1)
    parts = [
        images.mean((2, 3)),
        images.std((2, 3)),
        saturation.mean((1, 2))[:, None],
        (images[:, 0] - images[:, 2]).mean((1, 2))[:, None],
    ]
    shares = [
        torch.sigmoid(20 * (0.35 - luma)).mean((1, 2))[:, None],
        torch.sigmoid(20 * (luma - 0.65)).mean((1, 2))[:, None],
    ]
    return torch.cat(parts + shares, 1)


def _layout(images: Tensor) -> Tensor:
    """Where and how much differs from the ground, the median colour: on 4 x 4 places, in all, its
    extent, its edges; and how far the picture is from its mirror images."""
    ground = images.flatten(2).median(2).values[..., None, None]
    ink = (images - ground).abs().amax(1)
    places = torch.nn.functional.adaptive_avg_pool2d(ink[:, None], 4).flatten(1)
    rows, columns = (torch.linspace(-1, 1, size) for size in ink.shape[1:])
    mass = ink.sum((1, 2)) + 1e-6
    v, u = (ink.sum(2) * rows).sum(1) / mass, (ink.sum(1) * columns).sum(1) / mass
    extent = (
        ink * ((rows[None, :, None] - v[:, None, None]) ** 2 + (columns - u[:, None])[:, None] ** 2)
    ).sum((1, 2)) / mass
    edges = (ink[:, 1:] - ink[:, :-1]).abs().mean((1, 2)) + (
        ink[:, :, 1:] - ink[:, :, :-1]
    ).abs().mean((1, 2))
    mirror = [(images - images.flip(side)).abs().mean((1, 2, 3)) for side in (2, 3)]
    solid = torch.sigmoid(20 * (ink - 0.25)).mean((1, 2))
    return torch.cat([places, torch.stack([ink.mean((1, 2)), solid, extent, edges, *mirror], 1)], 1)
