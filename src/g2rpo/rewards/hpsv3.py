"""HPSv3, the human preference score of Ma et al. 2025 (arXiv 2508.03789): Qwen2-VL with a head on
one special token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn

from g2rpo.core.images import to_pil, to_tensor
from g2rpo.rewards.pixels import normalise
from g2rpo.rewards.qwen_vl import QwenReward, target_size
from g2rpo.rewards.weights import TOKENIZER_FILES

PIXELS = 256 * 28 * 28
"""Pixels of every picture after resizing."""


class HPSv3(QwenReward):
    """The mean of the preference that HPSv3 predicts (of a normal distribution; its width is not
    used).

    Averages of published models go from -.2 (SD 2) to 10.6 (Kolors). Every picture is resized to
    about 200,000 pixels.

    Args: `path`, the file HPSv3.safetensors, its folder or the repository; `instruction`,
    upstream's file data_collator_qwen.py (it is read, not run) or the folder that `pip install
    --no-deps --target FOLDER hpsv3==1.0.0` makes; `processor`, a folder or repository with the
    config and tokenizer of Qwen2-VL-7B-Instruct; `device`; `dtype` of Qwen2-VL's weights (the head
    stays float32; upstream: bfloat16); `batch_size`.
    """

    upstream, licence = "https://github.com/MizzenAI/HPSv3", "MIT"
    files = {
        "path": ("HPSv3.safetensors",),
        # the path in the folder that `pip install --target` makes, and in a clone
        "instruction": ("data_collator_qwen.py", "hpsv3/dataset/data_collator_qwen.py"),
        "processor": TOKENIZER_FILES,
    }
    tokens = ("<|Reward|>",)
    instructions = ("INSTRUCTION", "prompt_with_special_token")
    sizes: ClassVar[dict[str, Any]] = {
        "text_config": {
            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "vocab_size": 151658,
        },
        "vision_config": {"hidden_size": 3584},
    }  # fmt: skip
    work = (1024, 900)

    def __init__(
        self,
        path: str = "MizzenAI/HPSv3",
        *,
        instruction: str,
        processor: str = "Qwen/Qwen2-VL-7B-Instruct",
        device: str = "cpu",
        dtype: str = "bfloat16",
        batch_size: int = 8,
    ) -> None:
        self.batch_size = batch_size
        self.load(path, instruction, processor, device, dtype)

    def own_names(self, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            f"language_{name}" if name.startswith("model.") else name: value
            for name, value in published.items()
        }

    @staticmethod
    def make_head(width: int) -> nn.ModuleDict:
        """Under its published names; dropout, here an identity, has no weights."""
        layers = (
            nn.Linear(width, 1024),
            nn.ReLU(),
            nn.Identity(),
            nn.Linear(1024, 16),
            nn.ReLU(),
            nn.Linear(16, 2),
        )
        return nn.ModuleDict({"rm_head": nn.Sequential(*layers)})

    @torch.no_grad()
    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        frames = self.pixels(images)[:, None].expand(-1, 2, -1, -1, -1)
        return self.preference(self.hidden(frames, prompts)[:, 0])

    def pixels(self, images: Tensor) -> Tensor:
        """What the vision tower gets of uint8 pictures."""
        return normalise(resized(images))

    def preference(self, hidden: Tensor) -> Tensor:
        """The mean of the preference from hidden states [B, width]."""
        return self.head["rm_head"](hidden.float())[:, 0]


def resized(images: Tensor) -> Tensor:
    """uint8 pictures of about `PIXELS` pixels."""
    height, width = target_size(images.shape[-2], images.shape[-1], 28, PIXELS, PIXELS)
    return to_tensor(
        [picture.resize((width, height), Image.Resampling.BICUBIC) for picture in to_pil(images)]
    )
