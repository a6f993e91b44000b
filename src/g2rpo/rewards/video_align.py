"""VideoAlign's judge of clips, VideoReward (Liu et al. 2025, 2501.13918): Qwen2-VL with a head on three special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.core.errors import UserError
from g2rpo.core.files import is_hub_id
from g2rpo.core.plain import parse_json, read_text
from g2rpo.core.types import RewardModel
from g2rpo.rewards.dino import clips
from g2rpo.rewards.pixels import PictureReward, normalise
from g2rpo.rewards.qwen_vl import QwenVL, size_of_judge, target_size, trained_instruction
from g2rpo.rewards.weights import TOKENIZER_FILES, fetch, guess_model, read_state_dict

WEIGHTS, SETTINGS, INSTRUCTION = "checkpoint-11352/model.pth", "model_config.json", "prompt_template.py"
QUALITIES = ("VQ", "MQ", "TA")
TOKENS = [f"<|{name}_reward|>" for name in QUALITIES]
LEAST_PIXELS = 128 * 28 * 28


class VideoAlign(PictureReward):
    """How good VideoReward finds a clip, in standard deviations of its training clips' scores.

    Args: `score`, "VQ" (visual quality), "MQ" (motion quality), "TA" (text alignment) or "overall", their sum; `path`, a folder
    or repository with model_config.json and checkpoint-11352/model.pth; `instruction`, upstream's file prompt_template.py (it
    is read, not run) or a clone with it; `fps`, the frames per second of the clips, of which two a second are looked at, and at
    least four; `processor`, the config and tokenizer of Qwen2-VL-2B-Instruct; `device`; `dtype` of the weights, to which their
    LoRA is added (the head stays float32; upstream: all bfloat16); `batch_size`, clips at a time.
    """

    upstream, licence = "https://github.com/KwaiVGI/VideoAlign", "MIT"
    video = True
    files = {"path": (WEIGHTS,), "instruction": (INSTRUCTION,), "processor": TOKENIZER_FILES}

    def __init__(
        self,
        score: str = "overall",
        *,
        path: str = "KwaiVGI/VideoReward",
        instruction: str,
        fps: float = 16.0,
        processor: str = "Qwen/Qwen2-VL-2B-Instruct",
        device: str = "cpu",
        dtype: str = "bfloat16",
        batch_size: int = 2,
    ) -> None:
        self.check_options({"score": score, "fps": fps, "path": path})
        self.chosen = [QUALITIES.index(score)] if score in QUALITIES else [0, 1, 2]
        self.fps, self.batch_size = fps, batch_size
        self.seen, self.most_pixels, scale, (self.mean, self.std) = settings_of(path)
        file = fetch(instruction, INSTRUCTION)
        self.instruction = trained_instruction(file, ["DETAILED_PROMPT_WITH_SPECIAL_TOKEN"], TOKENS)
        self.qwen = QwenVL("qwen2_vl", processor, TOKENS, device=device, dtype=dtype)
        self.device, file = self.qwen.device, fetch(path, WEIGHTS)
        published = read_state_dict(file)
        if "base_model.model.rm_head.weight" not in published:
            raise ValueError(f"{file} is not VideoReward. It seems to be {guess_model(published)}.")
        state = _merged(published, scale, self.qwen.dtype)
        make_head = lambda: nn.ModuleDict({"rm_head": nn.Linear(self.qwen.width, 1, bias=False)})  # noqa: E731
        self.head = self.qwen.load(state, make_head, "VideoReward", file)["rm_head"]

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        if (score := options["score"]) not in (*QUALITIES, "overall"):
            raise UserError(f"score must be {', '.join(QUALITIES)} or overall, got {score!r:.80}")
        if type(fps := options["fps"]) not in (int, float) or not fps > 0:
            raise UserError(f"fps must be a number above 0, got {fps!r:.80}")
        if not is_hub_id(str(options["path"])):
            settings_of(options["path"])

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        """Qwen2-VL 2B without its output layer, on the patches and tokens that each fourth frame of 81 has a share in."""
        from transformers import Qwen2VLConfig, Qwen2VLModel

        text = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
        text |= {"num_key_value_heads": 2, "vocab_size": 151660}
        return size_of_judge(Qwen2VLModel(Qwen2VLConfig(text_config=text, vision_config={"hidden_size": 1536})), 250, 110)

    @torch.no_grad()
    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        frames = clips(images)[:, frames_seen(images.shape[1], self.fps, self.seen)]
        size = target_size(frames.shape[-2], frames.shape[-1], 28, LEAST_PIXELS, self.most_pixels)
        x = nn.functional.interpolate(frames.flatten(0, 1).float(), size, mode="bicubic", antialias=True)
        x = normalise(x.clamp(0, 255).round().to(torch.uint8)).unflatten(0, frames.shape[:2])
        scores = self.head(self.qwen(x, self.instruction, prompts).float())[..., 0].cpu()
        return ((scores - self.mean) / self.std)[:, self.chosen].sum(1)


def settings_of(path: str) -> tuple[float, int, float, Tensor]:
    """Of model_config.json: frames a second, and largest pixels of a frame, that are looked at; the LoRA's alpha / rank; means
    and standard deviations [2, 3] of the scores. UserError unless it is VideoReward's."""
    try:
        content = parse_json(read_text(fetch(path, SETTINGS)))
        data, lora, scores = (content[name] for name in ("data_config", "peft_lora_config", "inference_config"))
        form = (data["sample_type"], data["prompt_template_type"], data["num_frames"], lora["use_rslora"])
        if form != ("uniform", "detailed_special", None, False):
            raise ValueError(f"another form, {form}")
        norm = torch.tensor([[float(scores[f"{name}_{what}"]) for name in QUALITIES] for what in ("mean", "std")])
        return float(data["fps"]), int(data["max_frame_pixels"]), lora["lora_alpha"] / lora["lora_r"], norm
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise UserError(f"path: {path} lacks VideoReward's {SETTINGS}: {error}") from None


def frames_seen(length: int, fps: float, wanted: float) -> list[int]:
    """Frames of a clip of `fps` that are looked at: about `wanted` a second, an even number, at least four if there are."""
    number = round(min(max(length / fps * wanted, 4), min(768, length) // 2 * 2) / 2) * 2
    return torch.linspace(0, length - 1, number).round().long().tolist()


def _merged(published: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a model of peft under the names of transformers' model, with its LoRA added to them."""
    state = {}
    for name, value in published.items():
        layer, base, leaf = name.partition(".base_layer")
        if ".lora_" in name:
            continue
        if base and leaf == ".weight":
            down, up = (published[f"{layer}.lora_{part}.default.weight"].float() for part in "AB")
            value = (value.float() + scale * up @ down).to(dtype)
        own = (layer + leaf).removeprefix("base_model.model.")
        state[f"language_{own}" if own.startswith("model.") else own] = value
    return state
