"""Rewards on a CLIP: `CLIPScore`, the rows of its table (`PickScore`, `HPSv2`), and a head on
features of pictures alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from g2rpo.core.rewards import RewardModel
from g2rpo.rewards.clip_encoder import (
    ClipEncoder,
    clip_model,
    cost_of_clip,
    load_clip,
    load_clip_tokenizer,
    of_open_clip,
)
from g2rpo.rewards.open_clip import VIT_H_14, clean_prompt, clip_config
from g2rpo.rewards.pixels import PictureReward, Preprocess, normalise
from g2rpo.rewards.weights import CLIP_FILES, TOKENIZER_FILES, build_module, fetch, read_state_dict

LAION = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


class CLIPScore(PictureReward):
    """Cosine between a picture and its prompt, by any CLIP on disk or on the Hugging Face Hub
    (Hessel et al. 2021).

    Published "CLIP scores" differ in checkpoint, preprocessing and scale; here preprocessing is the
    checkpoint's own. Scores are in [-1, 1]; about 0.2 to 0.45 for the DFN5B models. Args: `path`, a
    folder or repository id in transformers or open_clip format; `tokenizer`, where the model's
    folder has none; `device`; `dtype` of the weights ("float32", "float16", "bfloat16");
    `batch_size`, pictures per forward.
    """

    differentiable = True
    files = {"path": CLIP_FILES, "tokenizer": TOKENIZER_FILES}
    architecture: ClassVar[dict[str, Any] | None] = None
    """In open_clip's terms, if all weights have the same one."""
    scale = 1.0

    def __init__(
        self,
        path: str,
        *,
        tokenizer: str | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        self._use(load_clip(path, tokenizer=tokenizer, device=device, dtype=dtype), batch_size)

    def _use(self, encoder: ClipEncoder, batch_size: int) -> None:
        self.encoder, self.device, self.batch_size = encoder, encoder.device, batch_size

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        if cls.architecture is None:
            return clip_model(options["path"])
        return cost_of_clip(clip_config(cls.architecture))

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        return self.scale * self.encoder.similarity(images, prompts)

    def features(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """As `rewards.head.PictureEncoder`."""
        return self.encoder.image_features(255 * images), self.encoder.text_features(prompts)


class PickScore(CLIPScore):
    """PickScore v1 (Kirstain et al. 2023), fine-tuned on the choices of Pick-a-Pic users:
    exp(logit_scale) * cosine, as on the model card; about 18 to 26 for the published weights.

    Other trainers divide by 26, subtract 18 and divide by 8, or leave the scale away: their numbers
    are not these. Args: as for `clip_score`; `tokenizer` is that of the CLIP before fine-tuning,
    since the published model has none.
    """

    upstream = "https://github.com/yuvalkirstain/PickScore"
    architecture = VIT_H_14

    def __init__(
        self,
        path: str = "yuvalkirstain/PickScore_v1",
        *,
        tokenizer: str = LAION,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        self._use(
            load_clip(
                path,
                tokenizer=tokenizer,
                # transformers'; the published PickScore has no file that describes it
                preprocess=lambda size: Preprocess(resize=size, crop=size, odd_margin="floor"),
                device=device,
                dtype=dtype,
            ),
            batch_size,
        )
        self.scale = self.encoder.scale


class HPSv2(CLIPScore):
    """HPSv2.1 (Wu et al. 2023), a fine-tuned ViT-H-14: image and text features multiplied; about
    0.2 to 0.38 on its training pictures.

    Only scores of one prompt are comparable. Args: `path`, the file HPS_v2.1_compressed.pt, its
    folder or the repository; `tokenizer`, a folder or repository with CLIP's tokenizer, which the
    published file lacks; `device`; `dtype` of the weights (upstream: float16 autocast);
    `batch_size`.
    """

    upstream, licence = "https://github.com/tgxs002/HPSv2", "Apache-2.0"
    files = {"path": ("HPS_v2.1_compressed.pt",), "tokenizer": TOKENIZER_FILES}
    architecture = VIT_H_14

    def __init__(
        self,
        path: str = "xswu/HPSv2",
        *,
        tokenizer: str = LAION,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        file, config = fetch(path, *self.files["path"]), clip_config(self.architecture)
        model = of_open_clip(
            config, read_state_dict(file, key="state_dict"), "HPSv2.1 (open_clip ViT-H-14)", file
        )
        size = config.vision_config.image_size

        def preprocess(images: Tensor) -> Tensor:
            return normalise(pad_to_square(images.to(device), size))

        words = load_clip_tokenizer(tokenizer)
        self._use(
            ClipEncoder(model, words, preprocess, device=device, dtype=dtype, clean=clean_prompt),
            batch_size,
        )


def pad_to_square(images: Tensor, size: int) -> Tensor:
    """uint8 `images` [B, 3, H, W] -> float in [0, 1] (bicubic may overshoot a little), [B, 3, size,
    size].

    The longer side becomes `size`, and black bars fill the rest; nothing is cut off. The resize
    works on the tensor, as upstream's does, with antialiasing, as torchvision has it since 0.17. A
    picture whose longer side is already `size` is padded too (upstream fails if it is not square).
    """
    height, width = images.shape[-2:]
    scale = size / max(height, width)
    height, width = round(height * scale), round(width * scale)
    x = images.float() / 255
    if scale != 1.0:
        x = torch.nn.functional.interpolate(
            x, size=(height, width), mode="bicubic", align_corners=False, antialias=True
        )
    left, top = (size - width) // 2, (size - height) // 2
    return torch.nn.functional.pad(x, (left, size - width - left, top, size - height - top))


class LinearHead(nn.Module):
    """Five linear layers without activations, `width` -> 1024 -> 128 -> 64 -> 16 -> 1, under the
    published names.

    The published numbering counts dropouts too: layers.0, 2, 4, 6 and 7.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = {0: (width, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}
        self.layers = nn.ModuleDict({str(i): nn.Linear(*size) for i, size in sizes.items()})

    def forward(self, features: Tensor) -> Tensor:
        """Scores [B] of features [B, width]."""
        for layer in self.layers.values():
            features = layer(features)
        return features.squeeze(-1)


class Aesthetic(PictureReward):
    """The aesthetic quality of a picture by LAION's predictor v2 (Schuhmann 2022), a linear head on
    CLIP's features; about 1 to 10. It ignores the prompt, so it is easily hacked.

    Args: `path`, the head's file (sac+logos+ava1-l14-linearMSE.pth) or its folder; `clip`, the
    folder or repository of OpenAI's CLIP ViT-L/14; `device`; `dtype` of CLIP's weights (the head
    stays float32); `batch_size`.
    """

    differentiable = True
    upstream = "https://github.com/christophschuhmann/improved-aesthetic-predictor"
    files = {"path": ("sac+logos+ava1-l14-linearMSE.pth",), "clip": CLIP_FILES}

    def __init__(
        self,
        path: str,
        *,
        clip: str = "openai/clip-vit-large-patch14",
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        file = fetch(path, *self.files["path"])
        self.batch_size = batch_size
        self.encoder = load_clip(clip, device=device, dtype=dtype, text=False)
        # the head was trained on features of OpenAI's own preprocessing
        self.encoder.crop_as_torchvision()
        self.device, width = self.encoder.device, self.encoder.model.config.projection_dim
        self.head = build_module(
            lambda: LinearHead(width), read_state_dict(file), f"an aesthetic head for {clip}", file
        ).to(device)

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        return clip_model(options["clip"])

    def score_pictures(self, images: Tensor, prompts: list[str]) -> Tensor:
        return cast(Tensor, self.head(self.encoder.image_features(images)))
