"""Object detectors of transformers: DETR and its relatives by boxes, Mask2Former and its relatives by masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from g2rpo.core.images import to_pil
from g2rpo.rewards.geneval_scoring import Detection
from g2rpo.rewards.weights import check_config, parse_dtype


class TransformersDetector:
    """Objects in pictures by a model for object detection or instance segmentation; `labels` are the classes it has.

    Args: `path`, a folder or repository with the model and its image processor; `least`, the confidence below which nothing is
    reported; `device`; `dtype` of the weights.
    Raises OSError or ValueError for a model that is missing, incomplete or of another kind.
    """

    def __init__(self, path: str, *, least: float = 0.3, device: str = "cpu", dtype: str | torch.dtype = "float32") -> None:
        from transformers import AutoConfig, AutoImageProcessor

        check_config(path)
        kind = _kind(path, AutoConfig.from_pretrained(path))
        model, report = kind.from_pretrained(path, output_loading_info=True)
        if report["missing_keys"]:
            raise ValueError(f"{path} is not complete: it lacks {sorted(report['missing_keys'])[:3]}")
        self.device, self.dtype, self.least = torch.device(device), parse_dtype(dtype), least
        self.model = model.to(device=self.device, dtype=self.dtype).requires_grad_(False).eval()
        self.processor: Any = AutoImageProcessor.from_pretrained(path)
        self.names = self.model.config.id2label
        self.labels = frozenset(self.names.values())

    @torch.no_grad()
    def __call__(self, images: Tensor) -> list[list[Detection]]:
        """The objects in each of uint8 pictures [B, 3, H, W]."""
        inputs = self.processor(to_pil(images), return_tensors="pt").to(self.device)
        output = self.model(**{**inputs, "pixel_values": inputs["pixel_values"].to(self.dtype)})
        sizes = [(images.shape[2], images.shape[3])] * len(images)
        if hasattr(output, "pred_boxes"):
            rows = self.processor.post_process_object_detection(output, threshold=self.least, target_sizes=sizes)
            return [self._boxes(row) for row in rows]
        rows = self.processor.post_process_instance_segmentation(
            output, threshold=self.least, target_sizes=sizes, return_binary_maps=True
        )
        return [self._masks(row) for row in rows]

    def _boxes(self, row: dict[str, Tensor]) -> list[Detection]:
        every = zip(row["labels"].tolist(), row["scores"].tolist(), row["boxes"].tolist(), strict=True)
        return [Detection(self.names[label], score, tuple(box)) for label, score, box in every]

    def _masks(self, row: dict[str, Any]) -> list[Detection]:
        """The boxes around masks, as GenEval's detector makes them: the right and lower edge are one beyond the last pixel."""
        found = []
        for info, mask in zip(row["segments_info"], row["segmentation"] if row["segments_info"] else (), strict=True):
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
    raise ValueError(f"{path} is a {config.model_type}, which transformers has neither for object detection nor for instances")
