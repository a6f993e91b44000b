"""Which weights act at which sigma: one of two experts, and what is trained or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from g2rpo.core.errors import UserError
from g2rpo.policies.options import PolicyConfig
from g2rpo.policies.pipelines import cast
from g2rpo.policies.quantized import quantize
from g2rpo.policies.spec import has_shape_alone


def boundary_of(pipeline: Any) -> float | None:
    """The sigma below which a pipeline calls its second transformer, the expert for low noise;
    None: it has one."""
    return (
        pipeline.config.get("boundary_ratio")
        if getattr(pipeline, "transformer_2", None) is not None
        else None
    )


def check_experts(pipeline: Any, options: PolicyConfig) -> None:
    """UserError for options that a pipeline with so many transformers does not have."""
    if boundary_of(pipeline) is None:
        if options.expert == "low" or options.guidance_scale_2 is not None:
            raise UserError(
                "policy.expert, policy.guidance_scale_2: this model has one transformer; take them out"
            )
    elif options.tuning == "full":
        raise UserError(
            "policy.tuning=full: of a model with two experts a LoRA of one is trained; set policy.tuning=lora"
        )


class Experts:
    """The trained transformer and, of a model with two experts, the other one, which is frozen.
    Below `options.lora_above` the trained weights do not act."""

    def __init__(self, pipeline: Any, options: PolicyConfig, device: torch.device) -> None:
        check_experts(pipeline, options)
        self.boundary = boundary_of(pipeline)
        self.frozen: dict[str, Any] = {}
        self._steps = pipeline.scheduler.config.num_train_timesteps
        self._high = options.expert == "high"
        if self.boundary is not None:
            other = "transformer_2" if self._high else "transformer"
            expert = self.frozen[other] = getattr(pipeline, other).requires_grad_(False).eval()
            cast(expert, getattr(torch, options.dtype))
            if options.quantize != "none":
                quantize(expert, options.quantize, device)
            expert.to(device)

    def train_everywhere(self, above: float) -> bool:
        """Whether the trained weights act at all sigmas."""
        return self.boundary is None and not above

    def acting(self, sigma: Tensor, above: float) -> list[tuple[bool, bool]]:
        """By row, whether the expert for high noise acts, and whether the trained weights do. On
        tensors without values they do. Where they do at all sigmas, these are not read: the host
        would wait for a GPU."""
        if has_shape_alone(sigma) or self.train_everywhere(above):
            return [(self._high, True)] * len(sigma)
        high = [self._high] * len(sigma)
        if self.boundary is not None:
            high = (sigma * self._steps >= self.boundary * self._steps).tolist()
        early = (sigma > above).tolist()
        return [(one, one == self._high and acts) for one, acts in zip(high, early, strict=True)]
