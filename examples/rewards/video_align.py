"""VideoAlign's judge of clips, VideoReward (Liu et al. 2025, arXiv 2501.13918): Qwen2-VL with a head on
three special tokens.

    g2rpo train wan-lora rewards.video_align.kind=examples/rewards/video_align.py:VideoAlign \\
        rewards.video_align.options.instruction=CLONE

CLONE is one of https://github.com/KwaiVGI/VideoAlign (MIT).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from g2rpo.core.plain import read_as
from g2rpo.rewards.hpsv3 import QwenReward, target_size
from g2rpo.rewards.pixels import normalise
from g2rpo.rewards.weights import TOKENIZER_FILES, fetch

QUALITIES = ("VQ", "MQ", "TA")


class VideoAlign(QwenReward):
    """How good VideoReward finds a clip, in standard deviations of its training clips' scores.

    Args: `score`, "VQ" (visual quality), "MQ" (motion quality), "TA" (text alignment) or "overall",
    their sum; `path`, a folder or repository with model_config.json and checkpoint-11352/model.pth;
    `instruction`, upstream's file prompt_template.py (it is read, not run) or a clone with it; `fps`,
    the frames per second of the clips, of which two a second are looked at, and at least four;
    `processor`, the config and tokenizer of Qwen2-VL-2B-Instruct; `device`; `dtype` of the weights, to
    which their LoRA is added (the head stays float32; upstream: all bfloat16); `batch_size`, clips at
    a time.
    """

    video = True
    files: ClassVar = {
        "path": ("checkpoint-11352/model.pth",),
        "instruction": ("prompt_template.py",),
        "processor": TOKENIZER_FILES,
    }
    tokens = tuple(f"<|{name}_reward|>" for name in QUALITIES)
    instructions = ("DETAILED_PROMPT_WITH_SPECIAL_TOKEN",)
    sizes: ClassVar[Mapping[str, Any]] = {
        "text_config": {
            "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
            "num_key_value_heads": 2, "vocab_size": 151660,
        },
        "vision_config": {"hidden_size": 1536},
    }  # fmt: skip
    work = (250, 110)  # each fourth frame of 81 is scored

    def __init__(
        self,
        score: Literal["VQ", "MQ", "TA", "overall"] = "overall",
        *,
        path: str = "KwaiVGI/VideoReward",
        instruction: str,
        fps: Annotated[float, Field(gt=0)] = 16.0,
        processor: str = "Qwen/Qwen2-VL-2B-Instruct",
        device: str = "cpu",
        dtype: str = "bfloat16",
        batch_size: int = 2,
    ) -> None:
        self.chosen = [QUALITIES.index(score)] if score in QUALITIES else [0, 1, 2]
        self.fps, self.batch_size = fps, batch_size
        self.settings = read_as(Settings, fetch(path, "model_config.json"))
        self.load(path, instruction, processor, device, dtype)

    @staticmethod
    def make_head(width: int) -> nn.ModuleDict:
        return nn.ModuleDict({"rm_head": nn.Linear(width, 1, bias=False)})

    def own_names(self, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """With the LoRA of a model of peft added to its weights."""
        lora, state = self.settings.peft_lora_config, {}
        for name, value in published.items():
            layer, base, leaf = name.partition(".base_layer")
            if ".lora_" in name:
                continue
            if base and leaf == ".weight":
                down, up = (
                    published[f"{layer}.lora_{part}.default.weight"].float() for part in "AB"
                )
                value = value.float() + lora.lora_alpha / lora.lora_r * up @ down
                value = value.to(self.dtype)
            own = (layer + leaf).removeprefix("base_model.model.")
            state[f"language_{own}" if own.startswith("model.") else own] = value
        return state

    @torch.no_grad()
    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        if images.shape[1] < 2:
            raise ValueError("is for clips of two frames or more; set policy.num_frames")
        seen, scales = self.settings.data_config, self.settings.inference_config
        frames = images[:, frames_seen(images.shape[1], self.fps, seen.fps)]
        size = target_size(
            frames.shape[-2], frames.shape[-1], 28, 128 * 28 * 28, seen.max_frame_pixels
        )
        x = nn.functional.interpolate(
            frames.flatten(0, 1).float(), size, mode="bicubic", antialias=True
        )
        x = normalise(x.clamp(0, 255).round().to(torch.uint8)).unflatten(0, frames.shape[:2])
        scores = self.head["rm_head"](self.hidden(x, prompts).float())[..., 0].cpu()
        mean, std = (
            torch.tensor([scales[f"{name}_{part}"] for name in QUALITIES])
            for part in ("mean", "std")
        )
        return ((scores - mean) / std)[:, self.chosen].sum(1)


class SeenFrames(BaseModel):
    """How clips are looked at; the published form alone is known."""

    sample_type: Literal["uniform"]
    prompt_template_type: Literal["detailed_special"]
    num_frames: None
    fps: float
    max_frame_pixels: int


class PublishedLoRA(BaseModel):
    lora_alpha: float
    lora_r: int
    use_rslora: Literal[False]


class Settings(BaseModel):
    """What is read of model_config.json."""

    data_config: SeenFrames
    peft_lora_config: PublishedLoRA
    inference_config: dict[str, float]
    """The mean and standard deviation of each quality's scores."""


def frames_seen(length: int, fps: float, wanted: float) -> list[int]:
    """Frames of a clip of `fps` that are looked at: about `wanted` a second, an even number, at least
    four if there are."""
    number = round(min(max(length / fps * wanted, 4), min(768, length) // 2 * 2) / 2) * 2
    return torch.linspace(0, length - 1, number).round().long().tolist()
