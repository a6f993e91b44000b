"""Rewards of pictures on clips: the frames that are scored, and the reduction of their scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from g2rpo.errors import at_least_one
from g2rpo.types import Reward

AT_ONCE = 16
"""Frames of one call of a reward, at most."""


@dataclass(frozen=True)
class Frames:
    """How a reward of pictures scores clips.

    every: frames 0, `every`, 2 `every`, ... are scored. Video VAEs make four frames (Wan) or eight (LTX-Video) of one latent
        frame, so neighbours differ little.
    reduce: "mean" of the frames' scores, or "min", their least. Frames without a score are left out.
    """

    every: int = 4
    reduce: Literal["mean", "min"] = "mean"

    def __post_init__(self) -> None:
        at_least_one(every=self.every)
        if self.reduce not in ("mean", "min"):
            raise ValueError(f"reduce must be mean or min, got {self.reduce!r}")

    def of(self, length: int) -> int:
        """How many frames of a clip of `length` frames are scored."""
        return math.ceil(length / self.every)


@dataclass(frozen=True)
class OnFrames:
    """`reward`, which scores pictures, as a reward of clips. Pictures are scored as before."""

    reward: Reward
    frames: Frames = Frames()
    video = True
    differentiable = False

    def __getattr__(self, name: str) -> Any:
        """The reward's other attributes, such as `right`, which are the same for clips."""
        if name.startswith("__") or name == "reward":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.reward, name)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores [B] of clips [B, T, 3, H, W], or of pictures [B, 3, H, W]; NaN where no frame has a score."""
        if images.ndim == 4:
            return self.reward(images.clone(), prompts)
        chosen, size = images[:, :: self.frames.every], AT_ONCE
        pictures, asked = chosen.flatten(0, 1), [prompt for prompt in prompts for _ in range(chosen.shape[1])]
        scores = [self._score(pictures[i : i + size], asked[i : i + size]) for i in range(0, len(pictures), size)]
        return self._reduced(torch.cat(scores).unflatten(0, chosen.shape[:2]))

    def _score(self, pictures: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores of one call; a reward may change the pictures that it is given, so it gets a copy."""
        scores = torch.as_tensor(self.reward(pictures.clone(), prompts)).detach().float().cpu()
        if scores.shape != (len(pictures),):
            raise ValueError(f"should return {len(pictures)} scores, one per frame, but returned {list(scores.shape)}")
        return scores.where(scores.isfinite(), torch.nan)

    def _reduced(self, scores: Tensor) -> Tensor:
        if self.frames.reduce == "mean":
            return scores.nanmean(1)
        least = scores.where(~scores.isnan(), torch.inf).amin(1)
        return least.where(least.isfinite(), torch.nan)
