"""The image and text encoder behind every reward built on a CLIP, read from transformers' or
open_clip's files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import BaseModel, Field, PositiveInt
from torch import Tensor

from g2rpo.core.errors import placed
from g2rpo.core.files import local
from g2rpo.core.plain import parse_as, read_text
from g2rpo.core.rewards import RewardModel
from g2rpo.rewards.open_clip import (
    PUBLISHED_CLIPS,
    clean_prompt,
    clip_config,
    clip_state,
    preprocess_from,
)
from g2rpo.rewards.pixels import Preprocess
from g2rpo.rewards.weights import (
    CLIP_FILES,
    build_module,
    check_config,
    fetch,
    parse_dtype,
    place_of,
    pretrained,
    read_state_dict,
)

TEXT_CACHE_SIZE = 1024
_OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


class ClipEncoder:
    """Unit-length CLIP features of pictures and prompts; the text features of the last prompts are
    cached.

    `preprocess` turns uint8 pictures [B, 3, H, W] into the vision tower's input; `clean` prepares a
    prompt for the tokenizer. The model is frozen and moved to `device` and `dtype`; features are
    float32 on `device`. Cosines are float32 too, except for `dtype` float16, where products and
    cosines are float16 as in published rewards. `scale` is what the model was trained to multiply
    cosines by.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        preprocess: Callable[[Tensor], Tensor],
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "float32",
        clean: Callable[[str], str] | None = None,
    ) -> None:
        self.scale = float(model.logit_scale.exp())  # bfloat16 would round 100 to 98.9
        self.device, self.dtype = torch.device(device), parse_dtype(dtype)
        self.model = model.to(device=device, dtype=self.dtype).requires_grad_(False).eval()
        self.tokenizer, self.preprocess, self.clean = tokenizer, preprocess, clean
        self._kept = lru_cache(TEXT_CACHE_SIZE)(self._text_feature)
        vocabulary = self.model.config.text_config.vocab_size
        if tokenizer is not None and len(tokenizer) > vocabulary:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens and the model {vocabulary}: not a pair"
            )

    def image_features(self, images: Tensor) -> Tensor:
        """Features [B, D] of `images` [B, 3, H, W], uint8 or float32 from 0 to 255 that may require
        a gradient."""
        pixels = self.preprocess(images).to(self.device, self.dtype)
        return _unit(self.model.get_image_features(pixel_values=pixels))

    @torch.no_grad()
    def text_features(self, prompts: Sequence[str]) -> Tensor:
        """Features [len(prompts), D]; those of the last `TEXT_CACHE_SIZE` distinct prompts are
        cached.

        Each is encoded alone: in a batch its rounding would depend on which others are new, which
        differs in a run that is resumed.
        """
        return torch.stack([self._kept(prompt) for prompt in prompts])

    def _text_feature(self, prompt: str) -> Tensor:
        ids = self.token_ids([prompt]).to(self.device)
        return _unit(self.model.get_text_features(input_ids=ids))[0]

    def crop_as_torchvision(self) -> None:
        """An odd number of pixels is cut as torchvision does it, whatever the checkpoint's files
        say."""
        self.preprocess = replace(cast(Preprocess, self.preprocess), odd_margin="round")

    def similarity(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Cosines [B] of uint8 `images` [B, 3, H, W], each with its own prompt; in float16
        multiples of 2^-12 from .25 to .5.

        bfloat16's would be 2^-10 apart, too coarse to rank the members of a group.
        """
        kind = torch.float16 if self.dtype == torch.float16 else torch.float32
        image, text = self.image_features(images).to(kind), self.text_features(prompts).to(kind)
        return (image.float() * text.float()).sum(dim=-1).to(kind).float()

    def token_ids(self, prompts: Sequence[str]) -> Tensor:
        """Token ids [B, context], cut to the context with the end token kept.

        Always padded to the full context, so a prompt's features do not depend on the prompts next
        to it. The values of the padding are irrelevant: attention is causal and the features are
        read at the first end token.
        """
        texts = [self.clean(p) for p in prompts] if self.clean else list(prompts)
        length = self.model.config.text_config.max_position_embeddings
        options = {
            "padding": "max_length",
            "truncation": True,
            "max_length": length,
            "return_tensors": "pt",
        }
        return cast(Tensor, self.tokenizer(texts, **options)["input_ids"])


def _unit(output: Any) -> Tensor:
    """Unit-length float32 features; since transformers 5 `get_*_features` wraps them in an output
    object."""
    features = output if isinstance(output, Tensor) else output.pooler_output
    return torch.nn.functional.normalize(features.float(), dim=-1)


def load_clip(
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    preprocess: Callable[[int], Preprocess] | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    text: bool = True,
) -> ClipEncoder:
    """The CLIP in a folder or Hugging Face repository, with its own preprocessing, or `preprocess`
    of its pictures' size.

    `tokenizer` is another place of that; without `text` none is loaded. Open_clip's files are read
    where there are any, because repositories that hold both formats (apple/DFN5B-...) describe the
    published preprocessing only there. Raises FileNotFoundError or ValueError if a file is missing
    or does not fit.
    """
    from transformers import CLIPModel

    own, clean = None, None
    if fetch(path, *CLIP_FILES).name == CLIP_FILES[0]:
        (model, own), clean = _open_clip(path), clean_prompt
    else:
        model = pretrained(CLIPModel, path)
    words = load_clip_tokenizer(path if tokenizer is None else tokenizer) if text else None
    if preprocess is not None:
        own = preprocess(model.config.vision_config.image_size)
    made = own or _transformers_preprocess(path)
    return ClipEncoder(model, words, made, device=device, dtype=dtype, clean=clean)


def _open_clip(path: str | Path) -> tuple[Any, Preprocess]:
    """Model and preprocessing of open_clip's files."""
    config = _read_open_clip(fetch(path, "open_clip_config.json"))
    file, model_cfg = fetch(path, *_OPEN_CLIP_WEIGHTS), config.model_cfg.model_dump()
    model = of_open_clip(
        clip_config(model_cfg), read_state_dict(file), "open_clip_config.json beside it", file
    )
    return model, preprocess_from(model_cfg, config.preprocess_cfg)


class _Architecture(BaseModel, extra="allow"):
    embed_dim: PositiveInt
    vision_cfg: dict[str, Any]
    text_cfg: dict[str, Any]


class _OpenClipConfig(BaseModel):
    """What counts in an open_clip_config.json."""

    model_cfg: _Architecture
    preprocess_cfg: dict[str, Any] = {}


def _read_open_clip(file: Path) -> _OpenClipConfig:
    with placed(f"{file}: ", kind=ValueError):
        return parse_as(_OpenClipConfig, read_text(file))


def clip_model(path: str | Path) -> RewardModel | None:
    """The CLIP in a folder, or a published one by its repository; None for a repository that is not
    known."""
    from transformers import CLIPConfig

    folder = local(path)
    if (file := folder / "open_clip_config.json").is_file():
        return cost_of_clip(clip_config(_read_open_clip(file).model_cfg.model_dump()))
    if (folder / "config.json").is_file():
        check_config(folder)
        return cost_of_clip(CLIPConfig.from_pretrained(folder))
    known = PUBLISHED_CLIPS.get(str(path))
    return None if known is None else cost_of_clip(clip_config(known))


def cost_of_clip(config: Any) -> RewardModel:
    """The cost of a CLIP reward: the vision tower per picture; text features are computed once per
    prompt."""
    from transformers import CLIPModel

    model, side = CLIPModel(config), config.vision_config.image_size
    return RewardModel(
        [model], lambda: model.get_image_features(pixel_values=torch.empty(1, 3, side, side))
    )


def of_open_clip(config: Any, state: dict[str, Tensor], what: str, path: object) -> Any:
    """CLIPModel with an open_clip state dict; ValueError if it does not fit."""
    from transformers import CLIPModel

    return build_module(lambda: CLIPModel(config), clip_state(state), what, path, published=state)


def load_clip_tokenizer(source: str | Path) -> Any:
    """CLIP's BPE tokenizer from a folder (tokenizer.json, or vocab.json and merges.txt) or a
    Hugging Face repository."""
    import transformers

    folder = local(source)
    if folder.is_dir() and not any(
        (folder / name).is_file() for name in ("tokenizer.json", "vocab.json")
    ):
        raise FileNotFoundError(
            f"{folder} has no tokenizer (tokenizer.json, or vocab.json and merges.txt); name a folder or repository that "
            "has one with tokenizer=, for example laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
        )
    return transformers.CLIPTokenizerFast.from_pretrained(str(folder))


class _Square(BaseModel):
    side: Annotated[PositiveInt, Field(alias="height")]


class _Shortest(BaseModel):
    side: Annotated[PositiveInt, Field(alias="shortest_edge")]


_Channels = tuple[float, float, float]


class _Preprocessor(BaseModel):
    """What counts in a preprocessor_config.json of transformers' CLIP."""

    size: PositiveInt | _Shortest | _Square = 224
    crop_size: PositiveInt | _Square = 224
    do_resize: Literal[True] = True
    do_center_crop: bool = True
    resample: Literal[2, 3] = 3
    image_mean: _Channels
    image_std: _Channels


def _transformers_preprocess(path: str | Path) -> Preprocess:
    """The preprocessing that a repository's preprocessor_config.json describes."""
    from transformers import ImageProcessingMixin

    values, _ = ImageProcessingMixin.get_image_processor_dict(place_of(path))
    with placed(f"{path}: preprocessor_config.json: ", kind=ValueError):
        config = parse_as(_Preprocessor, json.dumps(values))
    size, crop = config.size, config.crop_size
    resize = size if isinstance(size, int) else size.side
    return Preprocess(
        resize=resize,
        crop=(crop if isinstance(crop, int) else crop.side) if config.do_center_crop else resize,
        mode="squash" if isinstance(size, _Square) else "shortest",
        odd_margin="floor",
        interpolation="bicubic" if config.resample == 3 else "bilinear",
        mean=config.image_mean,
        std=config.image_std,
    )
