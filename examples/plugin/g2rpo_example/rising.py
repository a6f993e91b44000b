"""A reward with state: the redness that counts as a success rises with the model, and a resumed run
continues with it."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Rising:
    """1 for a picture much redder than the bar, 0 for one much less red; differences near the bar
    count most.

    `width` is the range of redness in which scores rise from .27 to .73. After an iteration the bar
    moves by `rate` times what the mean score lies above a half.
    """

    def __init__(self, width: float = 0.1, rate: float = 0.05) -> None:
        self.width, self.rate = width, rate
        self.state = {"bar": 0.0}

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        red, green, blue = images.flatten(2).mean(-1).unbind(1)
        return torch.sigmoid((red - (green + blue) / 2 - self.state["bar"]) * 2 / self.width)

    def observe(self, iteration: int, scores: Tensor) -> None:
        """Scores [N, M, G] of all ranks: the state changes here alone, so that it is the same on
        all of them."""
        if not scores.isnan().all():
            self.state["bar"] += self.rate * (float(scores.nanmean()) - 0.5)
