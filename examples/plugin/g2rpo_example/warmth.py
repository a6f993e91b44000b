"""A reward with a model of its own: it declares its files and networks."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from g2rpo.core.rewards import RewardModel
from g2rpo.rewards.pixels import PictureReward
from g2rpo.rewards.weights import fetch, read_state_dict

WEIGHTS = "warmth.safetensors"


class Warmth(PictureReward):
    """A linear function of a picture's mean colour. `path` is a folder or a hub id with its weights."""

    files: ClassVar = {"path": (WEIGHTS,)}  # looked for before anything is loaded

    def __init__(self, path: str, *, device: str = "cpu", batch_size: int = 32):
        self.net = nn.Linear(3, 1)
        self.net.load_state_dict(read_state_dict(fetch(path, WEIGHTS)))
        self.net.to(device)
        self.device, self.batch_size = torch.device(device), batch_size

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel:
        """The networks, and a call that scores a picture: what a plan counts."""
        net = nn.Linear(3, 1)
        return RewardModel([net], lambda: net(torch.empty(1, 3)))

    @torch.no_grad()
    def score_pictures(self, images: Tensor, prompts: list[Any]) -> Tensor:
        """Scores [B] of uint8 images [B, 3, H, W]."""
        return self.net(images.to(self.device).float().mean((2, 3)) / 255)[:, 0]
