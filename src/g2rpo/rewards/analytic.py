"""Rewards without weights: formulas, for smoke tests and demonstrations, and any Python function,
named by its file."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from g2rpo.core.errors import UserError, shown
from g2rpo.core.images import read_inputs, to_pil, to_tensor
from g2rpo.core.plugins import is_code, load
from g2rpo.core.rewards import CallableReward, Scorer
from g2rpo.rewards.pixels import EditReward, PictureReward


class JPEGSize(PictureReward):
    """Size of the picture as a JPEG file, in kB (1000 bytes): incompressibility, as in DDPO (Black
    et al. 2023).

    With `negative`, minus the size: compressibility. `quality` is the encoder's, 1 to 95. The size
    depends a little on the version of libjpeg inside Pillow.
    """

    def __init__(
        self, *, negative: bool = False, quality: Annotated[int, Field(ge=1, le=95)] = 95
    ) -> None:
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
    """Mean HSV saturation, (max - min) / max over a pixel's channels, 0 for black, in [0, 1];
    `negative` flips its sign."""

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        x = images.float()
        high, low = x.amax(dim=1), x.amin(dim=1)
        return self.sign * ((high - low) / high.clamp(min=1)).flatten(1).mean(dim=1)


class Similarity(EditReward):
    """How much of a prompt's first input picture is kept: 1 - mean |difference| over pixels and
    channels in [0, 1].

    The input picture is brought to the size of the picture. A prompt without one has no score, NaN.
    """

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        size = (images.shape[3], images.shape[2])
        inputs = {
            one: read_inputs(one)[0].resize(size, Image.Resampling.BICUBIC)
            for one in dict.fromkeys(prompts)
        }
        kept = to_tensor([inputs[prompt] for prompt in prompts]).float()
        changes = [
            float((image - own).abs().mean())
            for image, own in zip(images.float().cpu(), kept, strict=True)
        ]
        return torch.tensor([1 - change / 255 for change in changes])


def load_function(target: str) -> Callable[..., Any]:
    """The function or class called "path/to/file.py:name"; the file is run once per path.
    ValueError if there is none."""
    # the form of a name that `plugins` must allow
    if not (is_code(target) and target.rpartition(":")[0].endswith(".py")):
        raise ValueError(f"a function is named 'path/to/file.py:function', got {shown(target)}")
    try:
        found = load(target)
    except UserError as error:
        raise ValueError(str(error)) from error
    if not callable(found):
        raise ValueError(f"{target}: is a {type(found).__name__}, not a function or class")
    return found


class FunctionReward(CallableReward):
    """Scores by `function(images, prompts, **options)`; a class is made with `options` and then
    called.

    `target` is the function or class, or its place as "path/to/file.py:name".

    The function gets images [B, 3, H, W], float in [0, 1] as they were decoded, and the prompts,
    under no_grad. It returns B numbers: a tensor, an array or a list, in which None, NaN and
    infinity mean "no score". Those of its attributes that a `types.Reward` has are the reward's.
    Its exceptions are not caught. Raises ValueError if the function cannot be loaded.
    """

    code_option = "target"

    def __init__(self, target: str | Scorer, *, options: Mapping[str, Any] | None = None) -> None:
        found: Any = load_function(target) if isinstance(target, str) else target
        if isinstance(found, type):
            super().__init__(found(**(options or {})))
        else:
            super().__init__(found, options)
