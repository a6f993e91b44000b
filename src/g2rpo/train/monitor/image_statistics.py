"""Statistics of pictures, to detect a model whose pictures drift from the base model's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from g2rpo.core.data import Row

TAIL = 0.05
"""The base's range of a statistic excludes this share of its pictures at either end."""
COMPARED_SIDE = 32
"""Pictures are reduced to at most this height and width before they are compared with each
other."""
OUTSIDE_MARGIN = 0.01
"""The margin of the range beyond which a picture counts as outside: two or three of 255 grey
levels."""


def image_statistics(images: Tensor) -> dict[str, Tensor]:
    """Statistics [N] of pictures [N, 3, H, W], 8 bit or in [0, 1] and then rounded to 8 bit; each
    is in [0, 1], float64. Those of clips [N, T, 3, H, W] are means over frames.

    With the luma Y = .299 R + .587 G + .114 B (ITU-R BT.601): `brightness` is its mean; `contrast`
    its std over pixels, 0 for a blank picture and at most 1/2; `saturation` the mean over pixels of
    the largest minus the smallest channel; `clipped` the share of channel values that are 0 or 1;
    `detail` the mean over inner pixels of |Y - mean of its four neighbours|, 1 for a chessboard of
    pixels and 0 for a ramp, or where no pixel is an inner one. Clips also have `motion`, the mean
    over pixels and frames of |Y - Y of the frame before|, 0 for one that stands still.
    """
    rows = [_of_clip(image) if image.ndim == 4 else _statistics(image) for image in images]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _of_clip(clip: Tensor) -> dict[str, Tensor]:
    frames = [_statistics(frame) for frame in clip]
    luma = torch.stack([_luma(_pixels(frame)) for frame in clip])
    motion = luma.diff(dim=0).abs().mean() if len(clip) > 1 else luma.new_zeros(())
    return {name: torch.stack([frame[name] for frame in frames]).mean() for name in frames[0]} | {
        "motion": motion
    }


def _pixels(image: Tensor) -> Tensor:
    return (
        image.cpu() if image.dtype == torch.uint8 else (image.cpu() * 255).round()
    ).double() / 255


def _luma(pixels: Tensor) -> Tensor:
    return (pixels * pixels.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(0)


def _statistics(image: Tensor) -> dict[str, Tensor]:
    pixels = _pixels(image)
    luma = _luma(pixels)
    around = (luma[:-2, 1:-1] + luma[2:, 1:-1] + luma[1:-1, :-2] + luma[1:-1, 2:]) / 4
    return {
        "brightness": luma.mean(),
        "contrast": luma.std(correction=0),
        "saturation": (pixels.amax(0) - pixels.amin(0)).mean(),
        "clipped": ((pixels == 0) | (pixels == 1)).double().mean(),
        "detail": (luma[1:-1, 1:-1] - around).abs().mean()
        if around.numel()
        else luma.new_zeros(()),
    }


def spread(images: Tensor, counted: Tensor | None = None) -> float:
    """How much pictures of one prompt differ, from pictures [P, J, 3, H, W], or clips [P, J, T, 3,
    H, W], 8 bit or in [0, 1]: the root mean square difference of pixels in [0, 1] of pictures
    reduced to at most 32 x 32 by averaging, mean over the pairs of a prompt's J pictures, mean over
    prompts; only of pictures in `counted` [P, J], NaN without a pair."""
    side = min(COMPARED_SIDE, images.shape[-2]), min(COMPARED_SIDE, images.shape[-1])
    scale = 255.0 if images.dtype == torch.uint8 else 1.0
    small = torch.nn.functional.adaptive_avg_pool2d(
        images.cpu().double().flatten(0, -4) / scale, side
    )
    rows = small.reshape(*images.shape[:2], -1)
    groups = (
        list(rows)
        if counted is None
        else [row[own] for row, own in zip(rows, counted, strict=True) if own.sum() > 1]
    )
    return (
        float(
            torch.stack([torch.pdist(row).mean() for row in groups]).mean()
            / math.sqrt(rows.shape[-1])
        )
        if groups
        else math.nan
    )


def statistics_row(base: dict[str, Tensor], own: dict[str, Tensor]) -> Row:
    """For the log: by statistic its mean, the base's range, and the shares of pictures below and
    above that range."""
    row: Row = {}
    for name, values in own.items():
        low, high = (
            float(edge)
            for edge in torch.quantile(base[name], base[name].new_tensor([TAIL, 1 - TAIL]))
        )
        row[f"image/{name}"] = float(values.mean())
        row |= {f"image/{name}/low": low, f"image/{name}/high": high}
        row[f"image/{name}/below"] = float((values < low - OUTSIDE_MARGIN).double().mean())
        row[f"image/{name}/above"] = float((values > high + OUTSIDE_MARGIN).double().mean())
    return row
