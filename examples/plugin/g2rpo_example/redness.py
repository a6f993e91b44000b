"""How red pictures are: a reward is a function of pictures and prompts."""

from collections.abc import Sequence

from torch import Tensor


def redness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """The red channel above the mean of the others, [B], of images [B, 3, H, W] in [0, 1]."""
    red, green, blue = images.flatten(2).mean(-1).unbind(1)
    return red - (green + blue) / 2
