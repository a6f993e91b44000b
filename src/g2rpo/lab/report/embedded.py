"""Pictures and clips within a page, as data URIs."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

from PIL import Image
from torch import Tensor

from g2rpo.monitor.clips import frames_of, webp
from g2rpo.monitor.pictures import to_pil


def data_uri(picture: Image.Image, size: int) -> str:
    """The picture within a page, reduced to at most `size` pixels a side."""
    out = io.BytesIO()
    _reduced(picture, size).save(out, "WEBP", quality=88, method=4)
    return _webp_uri(out.getvalue())


def clip_uri(frames: Sequence[Image.Image], milliseconds: int | Sequence[int], size: int) -> str:
    """A clip within a page, that repeats, reduced likewise."""
    return _webp_uri(webp([_reduced(frame, size) for frame in frames], milliseconds, quality=70))


def picture_uri(image: Tensor, size: int, seconds: float) -> str:
    """A picture [3, H, W], or a clip [T, 3, H, W] of so many seconds, likewise."""
    if image.ndim == 4:
        return clip_uri(frames_of(image), round(1000 * seconds / len(image)), size)
    return data_uri(to_pil(image), size)


def _reduced(picture: Image.Image, size: int) -> Image.Image:
    reduced = picture.convert("RGB")
    reduced.thumbnail((size, size), Image.Resampling.LANCZOS)
    return reduced


def _webp_uri(content: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(content).decode()
