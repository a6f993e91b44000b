"""HPSv3, the human preference score of Ma et al. 2025 (arXiv 2508.03789): Qwen2-VL with a head on
one special token of a question about a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn

from g2rpo.core.images import to_pil, to_tensor
from g2rpo.core.rewards import RewardModel
from g2rpo.rewards.pixels import PictureReward, normalise
from g2rpo.rewards.weights import (
    TOKENIZER_FILES,
    build_module,
    fetch,
    parse_dtype,
    place_of,
    read_config,
    read_instruction,
    read_state_dict,
)


def trained_instruction(file: Path, names: Sequence[str], tokens: Sequence[str]) -> str:
    """What upstream's file assigns to `names`, joined; ValueError unless it has {text_prompt} and
    each token once."""
    text = "".join(read_instruction(f"{file}:{name}") for name in names)
    if any(text.count(part) != 1 for part in ("{text_prompt}", *tokens)):
        raise ValueError(
            f"{file}: the instruction should have one {{text_prompt}} and one {', one '.join(tokens)}"
        )
    return text


def target_size(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """The size nearest in shape with `least` to `most` pixels whose sides are multiples of `factor`
    (qwen-vl-utils' rule)."""
    rounded = [max(factor, round(side / factor) * factor) for side in (height, width)]
    if rounded[0] * rounded[1] > most:
        too_large = math.sqrt(height * width / most)
        rounded = [math.floor(side / too_large / factor) * factor for side in (height, width)]
    elif rounded[0] * rounded[1] < least:
        too_small = math.sqrt(least / (height * width))
        rounded = [math.ceil(side * too_small / factor) * factor for side in (height, width)]
    return rounded[0], rounded[1]


class QwenReward(PictureReward):
    """A reward by heads on the hidden states of a Qwen2-VL at special tokens, each once in every
    instruction; a subclass is a row with a score. One on another Qwen-VL has other `kind`, `system`,
    `classes` and `positions`."""

    kind: ClassVar[str] = "qwen2_vl"
    """The model_type in the model's config."""
    system: ClassVar[str] = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    """How the chat template begins."""
    tokens: ClassVar[Sequence[str]]
    instructions: ClassVar[Sequence[str]]
    """To what upstream's file assigns the parts of the instruction."""
    sizes: ClassVar[Mapping[str, Any]]
    """The published model's, in transformers' terms."""
    work: ClassVar[tuple[int, int]]
    """Patches and tokens of a picture, of clips those in which each scored frame has a share."""

    @staticmethod
    def classes() -> tuple[Any, Any]:
        """transformers' configuration and model."""
        from transformers import Qwen2VLConfig, Qwen2VLModel

        return Qwen2VLConfig, Qwen2VLModel

    @staticmethod
    def make_head(width: int) -> nn.ModuleDict:
        """The heads on hidden states of this width, under their published names."""
        raise NotImplementedError

    def own_names(self, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The published weights under the names of transformers' model."""
        raise NotImplementedError

    def load(self, path: str, instruction: str, processor: str, device: str, dtype: str) -> None:
        """Loads instruction, tokenizer, model and heads; ValueError if a file is not what it should
        be. `processor` is a folder or repository with the model's config and tokenizer."""
        from transformers import AutoTokenizer

        file = fetch(instruction, *self.files["instruction"])
        self.instruction = trained_instruction(file, self.instructions, self.tokens)
        config = read_config(processor)
        if config.model_type != self.kind:
            raise ValueError(
                f"{processor} has the config of a {config.model_type}, not of a {self.kind}"
            )
        self.tokenizer = AutoTokenizer.from_pretrained(place_of(processor))
        self.tokenizer.add_tokens(list(self.tokens), special_tokens=True)
        self.token_ids = torch.tensor(self.tokenizer.convert_tokens_to_ids(list(self.tokens)))
        config.image_token_id = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        config.text_config.vocab_size, config.text_config.use_cache = len(self.tokenizer), False
        self.device, self.dtype = torch.device(device), parse_dtype(dtype)
        self.patch = config.vision_config.patch_size
        self.merge = config.vision_config.spatial_merge_size
        self._load_weights(fetch(path, *self.files["path"]), config)

    def _load_weights(self, file: Path, config: Any) -> None:
        """The model takes visual.* and language_model.*, and the heads, which stay float32, all
        others but those of the output layer."""
        published = read_state_dict(file)
        state = self.own_names(published)
        body = {
            name: value
            for name, value in state.items()
            if name.startswith(("visual.", "language_model."))
        }
        rest = {name: state[name] for name in state.keys() - body.keys() - {"lm_head.weight"}}
        make, width = self.classes()[1], config.text_config.hidden_size
        model = build_module(
            lambda: _with_frequencies(make(config)), body, self.name, file, published
        )
        self.model = model.to(device=self.device, dtype=self.dtype)
        head = build_module(
            lambda: self.make_head(width), rest, f"{self.name}'s head", file, published
        )
        self.head = head.to(self.device).float()

    def hidden(self, frames: Tensor, prompts: Sequence[str]) -> Tensor:
        """Hidden states [B, tokens, width] of normalised `frames` [B, T, 3, H, W], T even: a still
        picture is two equal frames."""
        patches, grid = self.patches(frames)
        ids, mask = (
            x.to(self.device) for x in self.chats(prompts, int(grid[0].prod()) // self.merge**2)
        )
        picture = (ids == self.model.config.image_token_id).int()
        hidden = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=self.positions(ids),
            mm_token_type_ids=picture,
            pixel_values=patches.to(self.device, self.dtype),
            image_grid_thw=grid.to(self.device),
        ).last_hidden_state
        places = (ids[..., None] == self.token_ids.to(self.device)).int().argmax(1)
        return hidden[torch.arange(len(ids), device=self.device)[:, None], places]

    def positions(self, ids: Tensor) -> Tensor | None:
        """Of each token, [3, B, tokens]; None: those of transformers, which are rows and columns in
        pictures. Judges on Qwen2-VL were trained with 0, 1, 2, ... there too."""
        return torch.arange(ids.shape[1], device=self.device).expand(3, *ids.shape)

    def chats(self, prompts: Sequence[str], picture: int) -> tuple[Tensor, Tensor]:
        """Token ids [B, longest], padded on the right, and their mask, of chats about one picture
        of `picture` tokens."""
        begin = f"{self.system}<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * picture}<|vision_end|>"
        texts = [
            self.instruction.replace("{text_prompt}", prompt.replace("<|", "< |"))
            for prompt in prompts
        ]
        rows = self.tokenizer(
            [f"{begin}{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts]
        )["input_ids"]
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        return ids, torch.arange(ids.shape[1]) < lengths[:, None]

    def patches(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The vision tower's input: patches [B * T/2 * rows * columns, 3 * 2 * patch * patch], in
        blocks that it merges, and the grids [B, 3] of (T/2, rows, columns)."""
        grid = [x.shape[1] // 2, x.shape[3] // self.patch, x.shape[4] // self.patch]
        m, blocks = self.merge, [side // self.merge for side in grid[1:]]
        x = (
            x.unflatten(4, (blocks[1], m, self.patch))
            .unflatten(3, (blocks[0], m, self.patch))
            .unflatten(1, (grid[0], 2))
        )
        # [B, T/2, row block, column block, row, column, 3, 2, patch, patch]
        x = x.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
        return x.reshape(len(x) * math.prod(grid), -1), torch.tensor([grid] * len(x))

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        """The published model without its output layer; operations are those of the weights
        alone."""
        config, model = cls.classes()
        made = model(config(**cls.sizes))
        vision, layers = (
            sum(p.numel() for p in part.parameters())
            for part in (made.visual, made.language_model.layers)
        )
        patches, tokens = cls.work
        head = cls.make_head(made.language_model.config.hidden_size)
        return RewardModel([made, head], flops=2.0 * (patches * vision + tokens * layers))


def _with_frequencies(module: nn.Module) -> nn.Module:
    """Sets the rotary frequencies of a model on the meta device; no state dict contains them.

    Upstreams convert the whole model to bfloat16, in training too, so the weights were trained with
    rounded frequencies.
    """
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if hasattr(child, "inv_freq"):
                with torch.device("cpu"):
                    parent.add_module(name, type(child)(child.config).to(torch.bfloat16).float())
    return module


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
