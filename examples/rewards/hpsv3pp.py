"""HPSv3++ (Liu et al. 2026, arXiv 2606.14657): as HPSv3, on Qwen3-VL, with a head that also takes how
capable the picture's model seems to be and how far its training is.

    g2rpo train z-image-lora rewards.hpsv3pp.kind=examples/rewards/hpsv3pp.py:HPSv3PlusPlus \\
        rewards.hpsv3pp.options.instruction=CLONE

CLONE is one of https://github.com/PlantPotatoOnMoon/HPSv3-PlusPlus, which states no licence.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLModel

from g2rpo.rewards.hpsv3 import HPSv3, resized, target_size
from g2rpo.rewards.pixels import normalise

INNER = 256
"""The width of the layers before the head."""


class HPSv3PlusPlus(HPSv3):
    """The mean of the preference that HPSv3++ predicts.

    Args: `progress` of training, 0 to 1. In the paper it rises from .3 to 1 in a run, whose scores are
    then on different scales; here it is fixed. `instruction`, upstream's clone or its
    data_collator_qwen.py, which is not HPSv3's; the others as for `hpsv3`. How capable the model is
    is read from each picture by itself; upstream reads it from all pictures of a call.
    """

    files: ClassVar = {**HPSv3.files, "path": ("hpsv3++.pth",)}
    kind, system = "qwen3_vl", ""
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
        progress: Annotated[float, Field(ge=0, le=1)] = 0.0,
        processor: str = "Qwen/Qwen3-VL-8B-Instruct",
        device: str = "cpu",
        dtype: str = "bfloat16",
        batch_size: int = 8,
    ) -> None:
        self.progress, self.batch_size = progress, batch_size
        self.load(path, instruction, processor, device, dtype)
        if "Text Alignment:**" in self.instruction:
            raise ValueError(f"instruction={instruction} is HPSv3's, not that of HPSv3++")
        self.head["cap_encoder"].to(self.dtype)  # as upstream

    @staticmethod
    def classes() -> tuple[Any, Any]:
        return Qwen3VLConfig, Qwen3VLModel

    @staticmethod
    def make_head(width: int) -> nn.ModuleDict:
        capability = {
            "proj": nn.Linear(width, INNER),
            "pool_attn": nn.Linear(INNER, 1),
            "out_proj": nn.Linear(INNER, 1),
        }
        parts = {
            "cap_encoder": nn.ModuleDict(capability),
            "cond_encoder": nn.Sequential(nn.Linear(2, INNER), nn.GELU(), nn.Linear(INNER, INNER)),
            "film_gen": nn.Sequential(
                nn.Linear(INNER, width), nn.ReLU(), nn.Linear(width, 2 * width)
            ),
        }
        return nn.ModuleDict(parts | dict(HPSv3.make_head(width)))

    def own_names(self, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix("model."): value for name, value in published.items()}

    def positions(self, ids: Tensor) -> None:
        """Those of transformers: rows and columns."""
        return

    def pixels(self, images: Tensor) -> Tensor:
        """Resized as for HPSv3, then, as Qwen3-VL's processor does it, to multiples of 32."""
        x = resized(images)
        size = target_size(x.shape[-2], x.shape[-1], 32, 256 * 256, 4096 * 4096)
        if size != x.shape[-2:]:
            x = nn.functional.interpolate(x, size, mode="bicubic", antialias=True)
        return normalise(x, (0.5,) * 3, (0.5,) * 3)

    def preference(self, hidden: Tensor) -> Tensor:
        seen = self.head["cap_encoder"]
        capability = seen["out_proj"](seen["proj"](hidden)).sigmoid().float()
        condition = torch.cat([capability, torch.full_like(capability, self.progress)], dim=1)
        scale, shift = self.head["film_gen"](self.head["cond_encoder"](condition)).chunk(2, dim=1)
        return super().preference(hidden.float() * (1 + scale) + shift)
