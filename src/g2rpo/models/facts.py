"""What is known of a pipeline as a policy: its guidance, the sizes that it can make, and the shapes of
its latents, conditioning and calls."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn

from g2rpo.core.data import Cond
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipelines import Shapes, blocks_of, loader_of, patch_area
from g2rpo.models.spec import PipelineSpec


class PipelineFacts:
    """Of a `pipeline` with these `options`, by its `spec`. It runs nothing."""

    spec: ClassVar[PipelineSpec]
    options: PolicyConfig
    pipeline: Any
    transformer: Any
    guidance_scale: float
    max_sequence_length: int
    dtype: torch.dtype
    _latent: tuple[int, ...]
    """The shape of a picture's latents."""
    _for_loss = False
    """Whether velocities are those of a loss."""

    @property
    def truncates(self) -> bool:
        """Whether the network sees floor(1000 sigma)."""
        wanted = self.options.truncate_timesteps
        return wanted is True or (wanted == "rollout" and not self._for_loss)

    @property
    def config(self) -> Any:
        """The transformer's."""
        return self.transformer.config

    @property
    def guided(self) -> bool:
        """Whether a velocity takes two evaluations."""
        return self.spec.is_guided(self.pipeline, self.guidance_scale)

    @property
    def guidable(self) -> bool:
        """Whether pictures depend on the guidance scale."""
        return self.spec.guidable(self.pipeline, self.config)

    @property
    def deployed(self) -> dict[str, Any]:
        """Arguments with which the pipeline itself samples as this policy does, besides size, steps
        and prompt."""
        spec = self.spec
        made = spec.arguments(
            self.pipeline, self.options, rows=1, guided=self.guided, scale=self.guidance_scale
        )
        own = {name: made[name] for name in (spec.scale, "num_frames", *spec.fixed) if name in made}
        return {
            **own,
            **(
                {"negative_prompt": made["negative_prompt"][0]} if "negative_prompt" in made else {}
            ),
        }

    @property
    def blocks(self) -> list[nn.Module]:
        """The transformer's."""
        return blocks_of(self.transformer)

    @property
    def autocast(self) -> bool:
        """Whether calls of the network run under autocast."""
        return self.dtype != torch.float32 and self.options.autocast

    @property
    def lora_loader(self) -> str | None:
        """What loads a saved adapter in plain diffusers (`pipelines.loader_of`)."""
        return loader_of(self.pipeline)

    def check_size(self, height: int, width: int) -> None:
        """Raises ValueError for a picture size that the model cannot generate."""
        self.spec.check_size(
            self.pipeline, self.config, height, width, self.options.num_frames or 1
        )

    @property
    def multiple(self) -> int:
        """Height and width must be multiples of this many pixels."""
        return self.spec.multiple(self.pipeline, self.config)

    @property
    def seconds(self) -> float:
        """The duration of a video."""
        return float((self.options.num_frames or 1) / self.spec.fps(self.pipeline))

    @property
    def input_pictures(self) -> tuple[int, int]:
        """The least and the largest number of input pictures of a prompt."""
        return self.spec.input_pictures

    def blank(self, rows: int, tokens: int, dtype: torch.dtype | None = None) -> Cond:
        """Zero-filled conditioning; embeddings in `dtype` (None: the policy's)."""
        return self.spec.blank(self._cond_shapes(tokens), rows, dtype or self.dtype)

    def _cond_shapes(self, tokens: int) -> dict[str, tuple[int, ...]]:
        return self.spec.shapes(self.config, tokens, self.multiple, self.guided)

    @property
    def image_tokens(self) -> int:
        """Tokens of one picture."""
        packed = len(self._latent) == 2
        return self._latent[0] if packed else math.prod(self._latent[1:]) // patch_area(self.config)

    def shapes(self, clip_tokens: int, text_tokens: int | None = None) -> Shapes:
        """The sizes of a call; `clip_tokens` is the length to which the CLIP tokenizers pad,
        `text_tokens` that of prompts, if they are not padded to the longest that there may be."""
        clip = clip_tokens if self.spec.with_clip else 0
        tokens = (text_tokens or self.max_sequence_length) + self.spec.picture_tokens + clip
        return Shapes(
            self._latent,
            self._cond_shapes(tokens),
            self.image_tokens,
            tokens,
            2 if self.guided else 1,
        )

    def like(self, shapes: Shapes, rows: int) -> Cond:
        """Zero-filled conditioning of these shapes."""
        return self.spec.blank(shapes.cond, rows, self.dtype)
