"""HPSv3, the human preference score of Ma et al. 2025 (arXiv 2508.03789): Qwen2-VL with a head on
one special token; and HPSv3++ of Liu et al. 2026 (arXiv 2606.14657): Qwen3-VL, with a head that
also takes the progress of a training run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn

from g2rpo.core.images import to_pil, to_tensor
from g2rpo.core.plain import Count
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
    renamed = ("model.", "language_model.")
    """How published names begin, and how those of transformers' model do."""
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
        self._load(path, instruction, processor, device, dtype)

    def _state(self, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
        before, after = self.renamed
        return {
            after + name.removeprefix(before) if name.startswith(before) else name: x
            for name, x in published.items()
        }

    @staticmethod
    def _head(width: int) -> nn.ModuleDict:
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
        frames = self._pixels(images)[:, None].expand(-1, 2, -1, -1, -1)
        return self._score(self.hidden(frames, prompts)[:, 0])

    def _pixels(self, images: Tensor) -> Tensor:
        return normalise(_resized(images))

    def _score(self, hidden: Tensor) -> Tensor:
        return self.head["rm_head"](hidden.float())[:, 0]


class HPSv3PlusPlus(HPSv3):
    """The mean of the preference that HPSv3++ predicts, from the picture, how capable its model
    seems to be (which is read from each picture by itself; upstream reads it from a batch as a
    whole), and how far the training run is.

    Args: `iterations`, of the run that it is the reward of: as in the paper, the progress then
    rises from .3 to 1, so scores of different iterations are on different scales. Without, and for
    held-out pictures, it is 0. `path`, the file hpsv3++.pth, its folder or the repository;
    `instruction`, a clone of upstream's repository or its data_collator_qwen.py, which is not
    HPSv3's; `processor`, the config and tokenizer of Qwen3-VL-8B-Instruct; the others as for
    `hpsv3`.
    """

    upstream, licence = "https://github.com/PlantPotatoOnMoon/HPSv3-PlusPlus", ""
    files = {**HPSv3.files, "path": ("hpsv3++.pth",)}
    kind = "qwen3_vl"
    renamed = ("model.", "")
    sizes: ClassVar[dict[str, Any]] = {
        "text_config": {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151670,
        },
        "vision_config": {"out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]},
    }  # fmt: skip
    work = (784, 600)

    def __init__(
        self,
        path: str = "Junjun2333/HPSv3-PlusPlus",
        *,
        instruction: str,
        iterations: Count | None = None,
        processor: str = "Qwen/Qwen3-VL-8B-Instruct",
        device: str = "cpu",
        dtype: str = "bfloat16",
        batch_size: int = 8,
    ) -> None:
        self.iterations, self.batch_size = iterations, batch_size
        self.state = None if iterations is None else {"iteration": 0}
        self._load(path, instruction, processor, device, dtype)
        if "Text Alignment:**" in self.instruction:
            raise ValueError(
                f"instruction={instruction} is HPSv3's; that of HPSv3++ has no section on text alignment"
            )
        self.head["cap_encoder"].to(self.dtype)  # as upstream

    @staticmethod
    def _head(width: int, inner: int = 256) -> nn.ModuleDict:
        capability = {
            "proj": nn.Linear(width, inner),
            "pool_attn": nn.Linear(inner, 1),
            "out_proj": nn.Linear(inner, 1),
        }
        parts = {
            "cap_encoder": nn.ModuleDict(capability),
            "cond_encoder": nn.Sequential(nn.Linear(2, inner), nn.GELU(), nn.Linear(inner, inner)),
            "film_gen": nn.Sequential(
                nn.Linear(inner, width), nn.ReLU(), nn.Linear(width, 2 * width)
            ),
        }
        return nn.ModuleDict(parts | dict(HPSv3._head(width)))

    @property
    def held_out(self) -> HPSv3PlusPlus:
        plain = copy.copy(self)
        plain.state = None
        return plain

    def observe(self, iteration: int, scores: Tensor) -> None:
        if self.state is not None:
            self.state = {"iteration": iteration + 1}

    def _pixels(self, images: Tensor) -> Tensor:
        """Resized as for HPSv3, then, as Qwen3-VL's processor does it, to multiples of 32."""
        x = _resized(images)
        size = target_size(x.shape[-2], x.shape[-1], 32, 256 * 256, 4096 * 4096)
        if size != x.shape[-2:]:
            x = nn.functional.interpolate(x, size, mode="bicubic", antialias=True)
        return normalise(x, (0.5,) * 3, (0.5,) * 3)

    def _score(self, hidden: Tensor) -> Tensor:
        seen, progress = self.head["cap_encoder"], 0.0
        if self.state is not None:
            progress = 0.3 + 0.7 * min(1.0, self.state["iteration"] / self.iterations)
        capability = seen["out_proj"](seen["proj"](hidden)).sigmoid().float()
        condition = torch.cat([capability, torch.full_like(capability, progress)], dim=1)
        scale, shift = self.head["film_gen"](self.head["cond_encoder"](condition)).chunk(2, dim=1)
        return super()._score(hidden.float() * (1 + scale) + shift)


def _resized(images: Tensor) -> Tensor:
    """uint8 pictures of about `PIXELS` pixels."""
    height, width = target_size(images.shape[-2], images.shape[-1], 28, PIXELS, PIXELS)
    return to_tensor(
        [picture.resize((width, height), Image.Resampling.BICUBIC) for picture in to_pil(images)]
    )
