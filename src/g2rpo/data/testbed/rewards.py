"""Three rewards of the testbed: a verifiable one, a learned CLIP score and a learned preference
score.

All follow the `Reward` protocol: images [B, 3, 64, 64] in [0, 1] and their prompts to scores [B],
float32 on the CPU, higher is better. A prompt that the grammar cannot parse has no score: NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from g2rpo.core.files import local
from g2rpo.core.types import Reward, RewardModel
from g2rpo.data.testbed import assets_dir
from g2rpo.data.testbed.detector import Found, detect
from g2rpo.data.testbed.grammar import parse
from g2rpo.data.testbed.scenes import SIDE, Group, Relation, Scene, kind

if TYPE_CHECKING:
    from transformers import CLIPModel, PreTrainedTokenizerFast


def parse_or_none(prompt: str) -> Scene | None:
    """The scene that a prompt asks for, or None for a prompt outside the grammar."""
    try:
        return parse(prompt)
    except ValueError:
        return None


class SceneAccuracy(Reward):
    """Whether the picture shows the asked objects, colours, counts, sizes and relation, and nothing
    else.

    1 if all answers of `check` are 1; otherwise `partial`, in [0, 1], times the mean of the
    answers.
    """

    right = 1.0
    right_in_words = "Draws what {} prompts ask for"

    def __init__(self, *, partial: float = 0.0) -> None:
        if not 0 <= partial <= 1:
            raise ValueError(f"partial is a share between 0 and 1, got {partial}")
        self.partial = partial

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        scores = [
            self._score(image, prompt)
            for image, prompt in zip(images.float().cpu(), prompts, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float32)

    def _score(self, image: Tensor, prompt: str) -> float:
        scene = parse_or_none(prompt)
        if scene is None:
            return float("nan")
        answers = check_scene(scene, detect(image.numpy())).values()
        return self.partial * sum(answers) / len(answers) + (1 - self.partial) * (min(answers) == 1)


class SceneCLIP(Reward):
    """Cosine of the picture and its prompt under the testbed's tiny CLIP, in [-1, 1].

    It is sensitive to counts, colours, shapes and sizes, but hardly to positions: like larger CLIPs
    it treats prompts nearly as bags of words.
    """

    side = SIDE
    folder = "clip"
    scale = 1.0
    differentiable = True

    def __init__(self, path: Path | str | None = None) -> None:
        self.model, self.tokenizer = load_testbed_clip(
            local(path) if path else assets_dir() / self.folder
        )
        # a group's pictures come in several batches, of one prompt
        self._text = lru_cache(maxsize=1024)(self._encode)

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        from transformers import CLIPConfig, CLIPModel

        folder = local(options["path"]) if options["path"] else assets_dir() / cls.folder
        clip = CLIPModel(CLIPConfig.from_pretrained(folder))
        return RewardModel([clip], lambda: image_features(clip, torch.empty(1, 3, SIDE, SIDE)))

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        texts = torch.stack([self._text(prompt) for prompt in prompts])
        return (image_features(self.model, images.float().cpu()) * texts).sum(-1) * self.scale

    def features(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """As `picture_features.PictureEncoder`."""
        return image_features(self.model, images.float().cpu()), torch.stack(
            [self._text(prompt) for prompt in prompts]
        )

    def _encode(self, prompt: str) -> Tensor:
        """A prompt's features [D], alone so that they depend on nothing else; NaN for one outside
        the grammar."""
        features = text_features(self.model, self.tokenizer, [prompt])[0]
        return (
            features if parse_or_none(prompt) is not None else torch.full_like(features, torch.nan)
        )


class ScenePreference(SceneCLIP):
    """A learned preference for pictures that are right, clean and well drawn. Scaled cosine, as in
    HPSv2."""

    folder = "preference"
    scale = 100.0


@cache
def load_testbed_clip(folder: Path) -> tuple[CLIPModel, PreTrainedTokenizerFast]:
    """A CLIPModel in float32 and its tokenizer; loaded once per process."""
    from transformers import CLIPModel, PreTrainedTokenizerFast

    model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


def image_features(model: CLIPModel, images: Tensor) -> Tensor:
    """Unit features [B, D] of images [B, 3, 64, 64] in [0, 1]."""
    pooled = model.vision_model(pixel_values=images * 2 - 1).pooler_output
    return F.normalize(model.visual_projection(pooled), dim=-1)


def text_features(
    model: CLIPModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]
) -> Tensor:
    """Unit features [B, D] of prompts."""
    tokens = tokenizer(list(prompts), padding=True, truncation=True, return_tensors="pt")
    pooled = model.text_model(
        input_ids=tokens.input_ids, attention_mask=tokens.attention_mask
    ).pooler_output
    return F.normalize(model.text_projection(pooled), dim=-1)


_HOLDS: dict[Relation, Callable[[Found, Found], bool]] = {
    "left of": lambda a, b: a.x < b.x,
    "right of": lambda a, b: a.x > b.x,
    "above": lambda a, b: a.y < b.y,
    "below": lambda a, b: a.y > b.y,
}


def check_scene(scene: Scene, objects: list[Found]) -> dict[str, float]:
    """Answers by question; all are 1 exactly when the picture shows the scene and nothing else.

    For each group: is there such an object (.5 for the right colour or shape alone), the ratio of
    actual and asked count and, if a size is named, the share of objects that have it. For the
    scene: the share of pairs that satisfy the relation, and the share of all objects that belong to
    it.
    """
    members = [[o for o in objects if (o.colour, o.shape) == kind(group)] for group in scene.groups]
    others = [o for o in objects if not any(o in found for found in members)]
    answers: dict[str, float] = {}
    for i, (group, found) in enumerate(zip(scene.groups, members, strict=True)):
        answers[f"object {i}"] = 1.0 if found else _resemblance(group, others)
        answers[f"count {i}"] = min(len(found), group.count) / max(len(found), group.count)
        if group.size is not None:
            answers[f"size {i}"] = sum(o.size == group.size for o in found) / max(len(found), 1)
    if scene.relation is not None:
        holds = [_HOLDS[scene.relation](a, b) for a in members[0] for b in members[1]]
        answers["relation"] = sum(holds) / max(len(holds), 1)
    answers["nothing else"] = 1 - len(others) / len(objects) if objects else 0.0
    return answers


def _resemblance(group: Group, others: list[Found]) -> float:
    """0.5 if another object has the group's colour or shape, else 0."""
    return 0.5 if any(o.colour == group.colour or o.shape == group.shape for o in others) else 0.0
