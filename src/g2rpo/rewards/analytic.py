"""Rewards that are formulas: no weights, no prompt, exact. For smoke tests and demonstrations."""

from __future__ import annotations

import io

import torch
from PIL import Image
from torch import Tensor

from g2rpo.core.images import to_pil, to_tensor
from g2rpo.core.input_pictures import INPUT, images_of, read_inputs
from g2rpo.rewards.pixels import PictureReward


class JPEGSize(PictureReward):
    """Size of the picture as a JPEG file, in kB (1000 bytes): incompressibility, as in DDPO (Black et al. 2023).

    With `negative`, minus the size: compressibility. `quality` is the encoder's, 1 to 95. The size depends a little on the
    version of libjpeg inside Pillow.
    """

    def __init__(self, *, negative: bool = False, quality: int = 95) -> None:
        if not 1 <= quality <= 95:
            raise ValueError(f"quality must be from 1 to 95, got {quality}")
        self.sign, self.quality = -1.0 if negative else 1.0, quality

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        sizes = []
        for picture in to_pil(images):
            buffer = io.BytesIO()
            picture.save(buffer, format="JPEG", quality=self.quality)
            sizes.append(self.sign * buffer.tell() / 1000)
        return torch.tensor(sizes)


class _Mean(PictureReward):
    differentiable = True

    def __init__(self, *, negative: bool = False) -> None:
        self.sign = -1.0 if negative else 1.0


class Brightness(_Mean):
    """Mean of all channels of all pixels, in [0, 1]; with `negative`, minus that."""

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.sign * images.float().flatten(1).mean(dim=1) / 255


class Saturation(_Mean):
    """Mean HSV saturation, (max - min) / max over a pixel's channels, 0 for black, in [0, 1]; `negative` flips its sign."""

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        x = images.float()
        high, low = x.amax(dim=1), x.amin(dim=1)
        return self.sign * ((high - low) / high.clamp(min=1)).flatten(1).mean(dim=1)


class Similarity(PictureReward):
    """How much of a prompt's first input picture is kept: 1 - mean |difference| over pixels and channels in [0, 1].

    The input picture is brought to the size of the picture. A prompt without one has no score, NaN.
    """

    wants = INPUT
    target = staticmethod(images_of)

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        inputs = {prompt: _fitted(prompt, images.shape[3], images.shape[2]) for prompt in dict.fromkeys(prompts)}
        pairs = [(image.float().cpu(), inputs[prompt]) for image, prompt in zip(images, prompts, strict=True)]
        return torch.tensor([torch.nan if own is None else 1 - float((image - own).abs().mean()) / 255 for image, own in pairs])


def _fitted(prompt: str, width: int, height: int) -> Tensor | None:
    """The prompt's first input picture [3, height, width], 0 to 255."""
    pictures = read_inputs(prompt)
    if not pictures:
        return None
    return to_tensor([pictures[0].resize((width, height), Image.Resampling.BICUBIC)])[0].float()
