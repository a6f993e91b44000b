"""GenEval as a reward (Ghosh et al. 2023, arXiv 2310.11513): objects, counts, colours and
positions, by a detector of transformers (DETR and its relatives by boxes, Mask2Former and its
relatives by masks) and CLIP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, cast

import torch
from PIL import Image
from torch import Tensor

from g2rpo.core.data import Prompt
from g2rpo.core.errors import shown
from g2rpo.core.images import to_pil, to_tensor
from g2rpo.core.plugins import find_class, is_code
from g2rpo.core.rewards import RewardModel
from g2rpo.rewards.clip_encoder import ClipEncoder, clip_model, load_clip
from g2rpo.rewards.geneval_scoring import (
    COLOUR_WORDS,
    Detection,
    FoundObjects,
    Task,
    by_class,
    is_correct,
    partial_score,
)
from g2rpo.rewards.pixels import TargetReward
from g2rpo.rewards.weights import CLIP_FILES, parse_dtype, place_of, pretrained, read_config

Detector = Callable[[Tensor], Sequence[Sequence[Detection]]]
"""uint8 pictures [B, 3, H, W] -> the objects in each. With an attribute `labels`, the classes,
others are refused."""
DETECTOR = "facebook/mask2former-swin-small-coco-instance"
OWN_NAMES = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "aeroplane": "airplane",
    "motorbike": "motorcycle",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}
"""Classes that detectors name in another way than GenEval."""
SCORES = {"partial": partial_score, "correct": is_correct}
TEMPLATES = (
    "a photo of a {colour} {label}",
    "a photo of a {colour}-colored {label}",
    "a photo of a {colour} object",
)


class GenEval(TargetReward):
    """Whether a picture shows what the prompt's metadata asks for, in GenEval's format; a prompt
    without has no score.

    `include` and `exclude` are lists of {"class", "count", "color", "position"}; "tag" "counting"
    needs more confidence. A line of GenEval's evaluation_metadata.jsonl is such a prompt. Args:
    `score`, "partial" (Flow-GRPO's reward: the share of what is right, at most 1) or "correct"
    (GenEval's own: 1 or 0); `detector`, a folder or repository of transformers for object detection
    or instance segmentation of COCO's classes, a `Detector` as FILE.py:NAME, or one itself; `clip`,
    which names colours; `device`, `dtype` of the weights, and `batch_size` of detector and CLIP.
    GenEval's numbers are those of mmdetection's Mask2Former (Swin-S); another detector, or its
    port, finds other objects.
    """

    upstream, licence = "https://github.com/djghosh13/geneval", "MIT"
    files = {"detector": ("config.json",), "clip": CLIP_FILES}
    code_option = "detector"
    right = 1.0
    right_in_words = "Draws what {} prompts ask for"
    threshold, counting_threshold = 0.3, 0.9
    """For a detector's confidence, as published: that of an object which counts, and where objects
    are to be counted."""
    wants = "metadata in GenEval's format: `include`, a list of objects with class and count"

    def __init__(
        self,
        score: Literal["partial", "correct"] = "partial",
        *,
        detector: str | Detector = DETECTOR,
        clip: str = "openai/clip-vit-large-patch14",
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 8,
    ) -> None:
        self.mode, self.batch_size = score, batch_size
        self.detector = _detector(detector, self.threshold, device, dtype)
        self.labels = {
            OWN_NAMES.get(label, label) for label in getattr(self.detector, "labels", ())
        }
        self.colours = Colours(load_clip(clip, device=device, dtype=dtype))
        self.device = torch.device(device)

    @staticmethod
    def target(prompt: str) -> Task | None:
        """The requirements on a picture of `prompt`, None if its metadata have none; ValueError if
        they are malformed."""
        return Task.of(prompt.metadata) if isinstance(prompt, Prompt) else None

    def target_of(self, prompt: str) -> Task:
        task: Task = super().target_of(prompt)
        if unknown := sorted(task.labels - self.labels) if self.labels else []:
            raise ValueError(f"the detector has no class {shown(unknown[0])}")
        return task

    @classmethod
    def model_of(cls, options: Mapping[str, Any]) -> RewardModel | None:
        """CLIP on one cut-out, and the default detector, whose paper counts 313 G multiply-adds
        (arXiv 2112.01527, Swin-S)."""
        if options["detector"] != DETECTOR or (clip := clip_model(options["clip"])) is None:
            return None
        return replace(clip, parameters=68_741_083, flops=626e9)

    def score_pictures(self, images: Tensor, targets: list[Task]) -> Tensor:
        rows = zip(to_pil(images), self.detector(images), targets, strict=True)
        return torch.tensor([self._judge(*row) for row in rows])

    def _judge(self, picture: Image.Image, detections: Sequence[Detection], task: Task) -> float:
        threshold = self.counting_threshold if task.counting else self.threshold
        found: FoundObjects = by_class(
            [replace(each, label=OWN_NAMES.get(each.label, each.label)) for each in detections],
            threshold,
        )
        return float(SCORES[self.mode](task, found, partial(self.colours, picture)))


class Colours:
    """Names the colours of objects by CLIP, zero-shot, on what a detector has cut out."""

    def __init__(self, encoder: ClipEncoder) -> None:
        self.encoder = encoder
        encoder.crop_as_torchvision()  # as GenEval
        # COCO's classes have more texts than the encoder keeps
        self._words = lru_cache(maxsize=128)(self._encode)

    @torch.no_grad()
    def __call__(self, picture: Image.Image, label: str, objects: Sequence[Detection]) -> list[str]:
        """The likeliest of `COLOURS` for each object of a class."""
        features = torch.cat(
            [self.encoder.image_features(to_tensor([cut_out(picture, each)])) for each in objects]
        )
        return [
            COLOUR_WORDS[index] for index in (features @ self._words(label).T).argmax(1).tolist()
        ]

    def _encode(self, label: str) -> Tensor:
        """A feature for each colour: the mean over `TEMPLATES`, of unit length."""
        texts = [
            template.format(colour=colour, label=label)
            for colour in COLOUR_WORDS
            for template in TEMPLATES
        ]
        means = (
            self.encoder.text_features(texts)
            .unflatten(0, (len(COLOUR_WORDS), len(TEMPLATES)))
            .mean(1)
        )
        return torch.nn.functional.normalize(means, dim=-1)


def cut_out(picture: Image.Image, found: Detection) -> Image.Image:
    """The object's box in a picture, grey (#999) around the object where its pixels are known; at
    least one pixel."""
    if found.mask is not None:
        blank = Image.new("RGB", picture.size, color="#999")
        picture = Image.composite(picture, blank, Image.fromarray(found.mask.numpy()))
    left, top, right, bottom = (round(value) for value in found.box)
    return picture.crop((left, top, max(right, left + 1), max(bottom, top + 1)))


def _detector(given: str | Detector, least: float, device: str, dtype: str) -> Detector:
    if not isinstance(given, str):
        return given
    if not is_code(given):
        return TransformersDetector(given, least=least, device=device, dtype=dtype)
    loaded: Any = find_class("detectors", given, {})
    return cast(Detector, loaded() if isinstance(loaded, type) else loaded)


class TransformersDetector:
    """Objects in pictures by a model for object detection or instance segmentation; `labels` are
    the classes it has.

    Args: `path`, a folder or repository with the model and its image processor; `least`, the
    confidence below which nothing is reported; `device`; `dtype` of the weights. Raises OSError or
    ValueError for a model that is missing, incomplete or of another kind.
    """

    def __init__(
        self,
        path: str,
        *,
        least: float = 0.3,
        device: str = "cpu",
        dtype: str | torch.dtype = "float32",
    ) -> None:
        from transformers import AutoImageProcessor

        model = pretrained(_kind(path, read_config(path)), path)
        self.device, self.dtype, self.least = torch.device(device), parse_dtype(dtype), least
        self.model = model.to(device=self.device, dtype=self.dtype)
        self.processor: Any = AutoImageProcessor.from_pretrained(place_of(path))
        self.names = self.model.config.id2label
        self.labels = frozenset(self.names.values())

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[list[Detection]]:
        """The objects in each of uint8 pictures [B, 3, H, W]."""
        inputs = self.processor(to_pil(images), return_tensors="pt").to(self.device)
        output = self.model(**{**inputs, "pixel_values": inputs["pixel_values"].to(self.dtype)})
        sizes = [(images.shape[2], images.shape[3])] * len(images)
        if hasattr(output, "pred_boxes"):
            rows = self.processor.post_process_object_detection(
                output, threshold=self.least, target_sizes=sizes
            )
            return [self._boxes(row) for row in rows]
        rows = self.processor.post_process_instance_segmentation(
            output, threshold=self.least, target_sizes=sizes, return_binary_maps=True
        )
        return [self._masks(row) for row in rows]

    def _boxes(self, row: dict[str, Tensor]) -> list[Detection]:
        every = zip(
            row["labels"].tolist(), row["scores"].tolist(), row["boxes"].tolist(), strict=True
        )
        return [Detection(self.names[label], score, tuple(box)) for label, score, box in every]

    def _masks(self, row: dict[str, Any]) -> list[Detection]:
        """The boxes around masks, as GenEval's detector makes them: the right and lower edge are
        one beyond the last pixel."""
        found = []
        for info, mask in zip(
            row["segments_info"], row["segmentation"] if row["segments_info"] else (), strict=True
        ):
            mask = mask.bool().cpu()
            down, across = (mask.any(axis).nonzero().flatten().tolist() for axis in (1, 0))
            box = (float(across[0]), float(down[0]), float(across[-1] + 1), float(down[-1] + 1))
            found.append(Detection(self.names[info["label_id"]], info["score"], box, mask))
        return found


def _kind(path: str, config: Any) -> Any:
    """The auto class that loads a detector with this configuration."""
    from transformers import (
        MODEL_FOR_OBJECT_DETECTION_MAPPING,
        MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING,
        AutoModelForObjectDetection,
        AutoModelForUniversalSegmentation,
    )

    if type(config) in MODEL_FOR_OBJECT_DETECTION_MAPPING:
        return AutoModelForObjectDetection
    if type(config) in MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING:
        return AutoModelForUniversalSegmentation
    raise ValueError(
        f"{path} is a {config.model_type}, which transformers has neither for object detection nor for instances"
    )
