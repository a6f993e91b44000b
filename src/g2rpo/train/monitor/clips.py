"""Clips for display: reduced copies, and animated files."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageSequence
from torch import Tensor

from g2rpo.core.images import to_pil, to_tensor, to_uint8
from g2rpo.core.types import Policy

CLIP_FRAMES, CLIP_SIDE = 24, 256
"""The largest number of frames, and of pixels a side, of a reduced clip."""
FPS = 16
"""Frames a second of clips whose policy has no `seconds`."""


def reduced(images: Tensor) -> Tensor:
    """Pictures [B, 3, H, W] in 8 bit; of clips [B, T, 3, H, W] evenly spaced frames, reduced, [B,
    t, 3, h, w]."""
    if images.ndim == 4:
        return to_uint8(images)
    few = images[:, :: math.ceil(images.shape[1] / CLIP_FRAMES)]
    share = CLIP_SIDE / max(few.shape[-2:])
    if share < 1:
        size = [max(1, round(side * share)) for side in few.shape[-2:]]
        few = torch.nn.functional.interpolate(few.flatten(0, 1), size, mode="area").unflatten(
            0, few.shape[:2]
        )
    return to_uint8(few)


def stills(images: Tensor) -> Tensor:
    """Pictures [B, 3, H, W]; of clips [B, T, 3, H, W] their middle frames."""
    return images if images.ndim == 4 else images[:, images.shape[1] // 2]


def seconds_of(policy: Policy, frames: int) -> float:
    """How long a clip of `policy` is, of which `frames` are shown."""
    return getattr(policy, "seconds", None) or frames / FPS


def webp(
    frames: Sequence[Image.Image], milliseconds: int | Sequence[int], quality: int = 80
) -> bytes:
    """An animated WebP that repeats; browsers and Pillow open it."""
    out, durations = (
        io.BytesIO(),
        milliseconds if isinstance(milliseconds, int) else list(milliseconds),
    )
    frames[0].save(
        out,
        "WEBP",
        save_all=True,
        append_images=frames[1:],
        duration=durations,
        loop=0,
        quality=quality,
    )
    return out.getvalue()


def save_clip(path: Path, clip: Tensor, seconds: float) -> None:
    """Writes a clip [T, 3, H, W] as an animated WebP that lasts so many seconds."""
    path.write_bytes(webp(to_pil(clip), round(1000 * seconds / len(clip)), quality=90))


def read_webp(path: Path) -> tuple[list[Image.Image], list[int]]:
    """The frames of a WebP, and the milliseconds of each; ValueError for another file.

    WebP keeps equal frames in a row as one that lasts longer; a clip that stands still is one
    frame.
    """
    try:
        with Image.open(path, formats=["WEBP"]) as moving:
            frames = [
                (frame.convert("RGB"), int(frame.info.get("duration", 0)))
                for frame in ImageSequence.Iterator(moving)
            ]
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as WebP ({error})") from None
    return [frame for frame, _ in frames], [duration for _, duration in frames]


def read_clip(path: Path, frames: int = CLIP_FRAMES) -> tuple[Tensor, float]:
    """So many frames [frames, 3, H, W], 8 bit, evenly spaced in time, of what `save_clip` wrote,
    and its seconds."""
    pictures, durations = read_webp(path)
    ends = torch.tensor(durations).cumsum(0)
    times = (torch.arange(frames) + 0.5) / frames * ends[-1]
    chosen = [
        pictures[min(int(index), len(pictures) - 1)]
        for index in torch.searchsorted(ends, times, right=True)
    ]
    return to_tensor(chosen), float(ends[-1]) / 1000


def clip_of(picture: Path) -> Path:
    """The clip beside its middle frame."""
    return picture.with_suffix(".webp")
