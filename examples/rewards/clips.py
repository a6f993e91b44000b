"""How steady a clip is, and how much moves in it, as VBench measures them (arXiv 2311.17982). Use both:
a clip that stands still is the steadiest, and flicker moves most.

    g2rpo train wan-lora rewards.steady.kind=examples/rewards/clips.py:ClipConsistency \\
        rewards.moves.kind=examples/rewards/clips.py:Motion rewards.moves.weight=0.1
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from g2rpo.core.images import to_uint8
from g2rpo.core.rewards import Reward, RewardModel
from g2rpo.rewards.dino import BASE, FILES, Dino, dino_model


class ClipConsistency(Reward):
    """VBench's subject consistency: the mean over frames, but the first, of the mean cosine of DINO
    features with the first frame and with the one before; 1 for a clip that stands still.

    Args: `path`, a DINOv2 or DINOv3; `size`, to which frames are squashed; `device`; `dtype`.
    """

    video = True
    files: ClassVar = {"path": FILES}

    def __init__(
        self, path: str = BASE, *, size: int = 224, device: str = "cpu", dtype: str = "float32"
    ) -> None:
        self.dino = Dino(path, size=size, device=device, dtype=dtype)
        self.device = self.dino.device

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        return dino_model(options)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return torch.stack([self._score(frames) for frames in clips(images)])

    def _score(self, frames: Tensor) -> Tensor:
        features = torch.cat([self.dino(part)[0] for part in to_uint8(frames).split(16)])
        first, before = (features[1:] * features[:1]).sum(1), (features[1:] * features[:-1]).sum(1)
        return (first + before).mean().cpu() / 2


class Motion(Reward):
    """The mean difference of neighbouring frames, over pixels and channels from 0 to 255. VBench's
    temporal flickering is 1 - this / 255."""

    video = True

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return 255 * clips(images).float().cpu().diff(dim=1).abs().mean((1, 2, 3, 4))


def clips(images: Tensor) -> Tensor:
    """`images`, if they are clips [B, T, 3, H, W] of two frames or more; ValueError otherwise."""
    if images.ndim != 5 or images.shape[1] < 2:
        raise ValueError("is for clips of two frames or more; set policy.num_frames")
    return images
