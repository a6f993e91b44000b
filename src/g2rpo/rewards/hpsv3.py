"""HPSv3, the human preference score of Ma et al. 2025 (arXiv 2508.03789): Qwen2-VL with a head on one special token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from g2rpo.core.images import to_pil, to_tensor
from g2rpo.core.types import RewardModel
from g2rpo.rewards.instructions import read_instruction
from g2rpo.rewards.pixels import PictureReward, normalise
from g2rpo.rewards.weights import TOKENIZER_FILES, build, check_config, fetch, guess_model, parse_dtype, read_state_dict

WEIGHTS = "HPSv3.safetensors"
INSTRUCTION = ("data_collator_qwen.py", "hpsv3/dataset/data_collator_qwen.py")
"""Upstream's file with the instruction: its path in the folder that `pip install --target` makes."""
REWARD_TOKEN = "<|Reward|>"
PIXELS = 256 * 28 * 28
"""Pixels of every picture after resizing."""


class HPSv3(PictureReward):
    """The mean of the preference that HPSv3 predicts (of a normal distribution; its width is not used).

    Averages of published models go from -.2 (SD 2) to 10.6 (Kolors). Every picture is resized to about 200,000 pixels.

    Args: `path`, the file HPSv3.safetensors, its folder or the repository; `instruction`, upstream's file data_collator_qwen.py
    (it is read, not run) or the folder that `pip install --no-deps --target FOLDER hpsv3==1.0.0` makes; `processor`, a folder
    or repository with the config and tokenizer of Qwen2-VL-7B-Instruct; `device`; `dtype` of Qwen2-VL's weights (the head stays
    float32; upstream: bfloat16); `batch_size`.
    """

    upstream, licence = "https://github.com/MizzenAI/HPSv3", "MIT"
    files = {"path": (WEIGHTS,), "instruction": INSTRUCTION, "processor": TOKENIZER_FILES}

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
        from transformers import AutoConfig, AutoTokenizer
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, Qwen2VLTextModel

        self.instruction = _instruction(fetch(instruction, *INSTRUCTION))
        check_config(processor)
        file, config = fetch(path, WEIGHTS), AutoConfig.from_pretrained(processor)
        state = read_state_dict(file)
        if not {"rm_head.0.weight", "model.embed_tokens.weight"} <= state.keys():
            raise ValueError(f"{file} is not HPSv3. It seems to be {guess_model(state)}.")
        self.tokenizer = AutoTokenizer.from_pretrained(processor)
        self.tokenizer.add_tokens([REWARD_TOKEN], special_tokens=True)
        self.reward_token, self.image_token = self.tokenizer.convert_tokens_to_ids([REWARD_TOKEN, "<|image_pad|>"])
        config.text_config.vocab_size = len(self.tokenizer)
        self.device, self.dtype, self.batch_size = torch.device(device), parse_dtype(dtype), batch_size
        self.patch, self.merge = config.vision_config.patch_size, config.vision_config.spatial_merge_size

        def part(make: Any, config: Any, prefix: str, what: str) -> Any:
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            module = build(lambda: _with_frequencies(make(config)), own, what, file, published=state)
            return module.to(device=self.device, dtype=self.dtype)

        self.vision = part(Qwen2VisionTransformerPretrainedModel, config.vision_config, "visual.", "HPSv3's vision tower")
        self.text = part(Qwen2VLTextModel, config.text_config, "model.", "HPSv3's language model")
        self.head = part(_head, config.text_config.hidden_size, "rm_head.", "HPSv3's head").float()

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        """Qwen2-VL 7B without its output layer; operations are those of the weights alone, on 1024 patches and about 900
        tokens."""
        from transformers import Qwen2VLConfig
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, Qwen2VLTextModel

        text = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
        text |= {"num_key_value_heads": 4, "vocab_size": 151658}
        config = Qwen2VLConfig(text_config=text, vision_config={"hidden_size": 3584})
        vision, language = Qwen2VisionTransformerPretrainedModel(config.vision_config), Qwen2VLTextModel(config.text_config)
        sizes = [sum(p.numel() for p in part.parameters()) for part in (vision, language.layers)]
        return RewardModel([vision, language], flops=2.0 * (1024 * sizes[0] + 900 * sizes[1]))

    @torch.no_grad()
    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        patches, grid = self._patches(images)
        features = self.vision(patches.to(self.device, self.dtype), grid_thw=grid.to(self.device)).pooler_output
        ids, mask = (value.to(self.device) for value in self._tokens(prompts, int(grid[0].prod()) // self.merge**2))
        words = self.text.embed_tokens(ids)
        words[ids == self.image_token] = features.to(words.dtype)
        # Positions are 0, 1, 2, ... in pictures too: HPSv3 was trained so. Qwen2-VL's own are rows and columns.
        hidden = self.text(inputs_embeds=words, attention_mask=mask, use_cache=False).last_hidden_state
        last = (ids == self.reward_token).int().cumsum(1).argmax(1)
        return self.head(hidden[torch.arange(len(ids), device=self.device), last].float())[:, 0]

    def _tokens(self, prompts: Sequence[str], image_tokens: int) -> tuple[Tensor, Tensor]:
        """Token ids [B, longest], padded on the right, and their mask, of Qwen2-VL's chat about one picture."""
        picture = f"<|vision_start|>{'<|image_pad|>' * image_tokens}<|vision_end|>"
        begin = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n" + picture
        texts = [self.instruction.replace("{text_prompt}", prompt.replace("<|", "< |")) for prompt in prompts]
        rows = self.tokenizer([f"{begin}{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts])["input_ids"]
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        return ids, torch.arange(ids.shape[1]) < lengths[:, None]

    def _patches(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the vision tower: patches [B * rows * columns, 3 * 2 * patch * patch], in blocks that it merges, and the
        grids [B, 3] of (1, rows, columns)."""
        height, width = target_size(images.shape[-2], images.shape[-1], self.patch * self.merge)
        resized = [picture.resize((width, height), Image.Resampling.BICUBIC) for picture in to_pil(images)]
        x = normalise(to_tensor(resized))
        rows, columns, m = height // self.patch, width // self.patch, self.merge
        x = x.unflatten(3, (columns // m, m, self.patch)).unflatten(2, (rows // m, m, self.patch))
        x = x.permute(0, 2, 5, 3, 6, 1, 4, 7)  # [B, row block, column block, row, column, 3, patch, patch]
        frames = x.unsqueeze(6).expand(*x.shape[:6], 2, *x.shape[6:])  # a still picture is two equal frames
        return frames.reshape(len(images) * rows * columns, -1), torch.tensor([[1, rows, columns]] * len(images))


def target_size(height: int, width: int, factor: int, pixels: int = PIXELS) -> tuple[int, int]:
    """The size nearest in shape with about `pixels` pixels whose sides are multiples of `factor` (qwen-vl-utils' rule)."""
    rounded = [max(factor, round(side / factor) * factor) for side in (height, width)]
    if rounded[0] * rounded[1] > pixels:
        too_large = math.sqrt(height * width / pixels)
        rounded = [math.floor(side / too_large / factor) * factor for side in (height, width)]
    elif rounded[0] * rounded[1] < pixels:
        too_small = math.sqrt(pixels / (height * width))
        rounded = [math.ceil(side * too_small / factor) * factor for side in (height, width)]
    return rounded[0], rounded[1]


def _instruction(file: Path) -> str:
    """The instruction with {text_prompt} and the reward token in it, from upstream's file."""
    text = read_instruction(f"{file}:INSTRUCTION") + read_instruction(f"{file}:prompt_with_special_token")
    if "{text_prompt}" not in text or text.count(REWARD_TOKEN) != 1:
        raise ValueError(f"{file}: the instruction should have one {{text_prompt}} and one {REWARD_TOKEN}")
    return text


def _with_frequencies(module: nn.Module) -> nn.Module:
    """Sets the rotary frequencies of a model on the meta device; no state dict contains them.

    Upstream converts the whole model to bfloat16, in training too, so the weights were trained with rounded frequencies.
    """
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if hasattr(child, "inv_freq"):
                with torch.device("cpu"):
                    parent.add_module(name, type(child)(child.config).to(torch.bfloat16).float())
    return module


def _head(width: int) -> nn.Sequential:
    """The head under its published names, rm_head.0, 3 and 5; dropout has no weights."""
    return nn.Sequential(
        nn.Linear(width, 1024), nn.ReLU(), nn.Identity(), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )  # fmt: skip
