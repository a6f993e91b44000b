"""One policy for the flow pipelines of diffusers, by their own code (`replay`); `catalogue` describes each in a few lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from g2rpo.data import Cond
from g2rpo.errors import UserError
from g2rpo.policies.attention import MASKLESS
from g2rpo.policies.conditioning import NEGATIVE, SIZES, Conditioning, PipelineText, sizes_in
from g2rpo.policies.options import PolicyOptions
from g2rpo.policies.pipelines import PipelinePolicy, Shapes
from g2rpo.policies.replay import (
    Caught,
    Network,
    OneStep,
    Pictures,
    Script,
    Unseen,
    UnseenProcessor,
    probe,
    replay,
    rows_alike,
)

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Attention projections as diffusers names them, of the picture and, where there are any, of the text."""


class DiffusersPolicy(Conditioning, PipelinePolicy):
    """A flow pipeline of diffusers as a `Policy`, by its own `__call__`. Subclasses describe one class of pipelines.

    Latents are float32, in the form in which the pipeline steps them. Velocities are the pipeline's input to its scheduler:
    after guidance, which is computed in float32.
    """

    one_time: ClassVar[bool] = False
    """Whether all rows of a call must have the same sigma."""
    one_row: ClassVar[bool] = False
    """Whether a call takes a single row."""
    lora_targets: ClassVar[Sequence[str]] = ATTENTION
    unsupported: ClassVar[Sequence[str]] = ("published_pictures", "detach_negative")

    def __init__(self, pipeline: Any, **options: Any) -> None:
        super().__init__(pipeline, **options)
        self._encoders = [
            n for n, part in vars(pipeline).items() if n.startswith("text_encoder") and isinstance(part, nn.Module)
        ]
        latents, *self._beside = self._prepared(self.blank(1, 1).to(self._device), [torch.Generator()])
        self._latent, self._latent_dtype = tuple(latents.shape[1:]), latents.dtype

    @classmethod
    def check_options(cls, options: PolicyOptions) -> None:
        super().check_options(options)
        if unknown := cls.not_taken(cls.pipeline_class, options):
            raise UserError(f"policy.{unknown[0]}: the call of a {cls.pipeline_class} has no such argument; take it out")
        if options.attention in MASKLESS and cls.is_masked():
            raise UserError(
                f"policy.attention={options.attention}: takes no mask, which a {cls.pipeline_class} needs for its prompts; "
                "take auto, cudnn, efficient or math"
            )

    @classmethod
    def is_masked(cls) -> bool:
        """Whether attention gets a mask, which leaves out the padding of prompts."""
        padded = bool(cls.masks or cls.lists) and not cls.one_row
        return padded or any(name.removeprefix(NEGATIVE) not in cls.masks.values() for name in cls.encoded if "mask" in name)

    @classmethod
    def encoders(cls, pipeline: Any, **options: Any) -> PipelineText:
        return PipelineText(pipeline, cls, PolicyOptions(**options))

    @property
    def config(self) -> Any:
        """The transformer's."""
        return self.pipeline.transformer.config

    @property
    def guided(self) -> bool:
        """Whether a velocity takes two evaluations."""
        return self.is_guided(self.pipeline, self.guidance_scale)

    @property
    def deployed(self) -> dict[str, Any]:
        made = self.arguments(self.pipeline, self.options, rows=1, guided=self.guided, scale=self.guidance_scale)
        own = {name: made[name] for name in (self.scale, "num_frames", "max_area", *self.fixed) if name in made}
        return {**own, **({"negative_prompt": made["negative_prompt"][0]} if "negative_prompt" in made else {})}

    def check_size(self, height: int, width: int) -> None:
        multiple, frames = self.multiple, self.options.num_frames or 1
        if height % multiple or width % multiple:
            raise ValueError(f"height and width must be multiples of {multiple} for this model, got {height}x{width}")
        if self.video and (frames - 1) % self.frames:
            raise ValueError(f"num_frames must be one more than a multiple of {self.frames} for this model, got {frames}")

    @property
    def multiple(self) -> int:
        """Height and width must be multiples of this many pixels."""
        processor = getattr(self.pipeline, "image_processor", None) or self.pipeline.video_processor
        return int(processor.config.vae_scale_factor)

    @property
    def frames(self) -> int:
        """Frames of the video per frame of the latents."""
        return 1

    @property
    def fps(self) -> float:
        """Frames a second of its videos."""
        return 16

    @property
    def seconds(self) -> float:
        """The duration of a video."""
        return (self.options.num_frames or 1) / self.fps

    @property
    def input_pictures(self) -> tuple[int, int]:
        """The least and the largest number of input pictures of a prompt."""
        return (1, self.most_pictures) if self.pictured else (0, 0)

    def widths(self) -> dict[str, tuple[int, ...]]:
        """The shape of one token's embeddings, by name; their number depends on the prompt."""
        raise NotImplementedError

    def pooled(self) -> dict[str, tuple[int, ...]]:
        """The shapes of embeddings whose size does not depend on the prompt."""
        return {}

    def beside(self) -> dict[str, tuple[int, ...]]:
        """For editing: the shapes of what is stored of an input picture of one megapixel."""
        return {}

    def blank(self, rows: int, tokens: int, dtype: torch.dtype | None = None) -> Cond:
        """Conditioning of the right shapes, without content; embeddings in `dtype` (None: the policy's)."""
        sizes = {name: (tokens, *width) for name, width in self.widths().items()} | self.pooled()
        both = {whose + name: size for whose in ("", NEGATIVE)[: 1 + self.guided] for name, size in sizes.items()}
        seen = {SIZES: (1, 2)} if self.pictured else {}
        return self._blank({**both, **self.beside(), **seen}, rows, dtype or self.dtype)

    def _blank(self, sizes: Mapping[str, tuple[int, ...]], rows: int, dtype: torch.dtype) -> Cond:
        tensors: dict[str, Tensor] = {}
        ragged: dict[str, tuple[Tensor, ...]] = {}
        for name, size in sizes.items():
            plain = name.removeprefix(NEGATIVE)
            value = torch.zeros(rows, *size, dtype=self.dtypes.get(plain, dtype))
            if name == SIZES:
                ragged[name] = (torch.tensor([[1024, 1024]]),) * rows
            elif plain in {*self.masks, *self.lists, *self.ragged, *self.pictured}:
                ragged[name] = tuple(value)
            else:
                tensors[name] = value
        return Cond(tensors, ragged)

    @property
    def image_tokens(self) -> int:
        return math.prod(self._latent) // (self.config.in_channels * (1 if len(self._latent) == 2 else _patch(self.config)))

    def text_tokens(self, clip_tokens: int) -> int:
        """Tokens of a prompt; `clip_tokens` as in `shapes`."""
        return self.max_sequence_length

    def shapes(self, clip_tokens: int) -> Shapes:
        tokens = self.text_tokens(clip_tokens)
        blank = self.blank(1, tokens)
        cond = {name: tuple(value.shape[1:]) for name, value in blank.tensors.items()}
        cond |= {name: tuple(value[0].shape) for name, value in blank.ragged.items()}
        return Shapes(self._latent, cond, self.image_tokens, tokens, 2 if self.guided else 1)

    def like(self, shapes: Shapes, rows: int) -> Cond:
        return self._blank(shapes.cond, rows, self.dtype)

    @property
    def shift(self) -> float:
        """The time shift at the middle of the pipeline's own grid of two steps; `grid` has all of it."""
        middle = float(self.grid(2)[1])
        return middle / (1 - middle)

    @torch.no_grad()
    def grid(self, num_steps: int) -> Tensor:
        """The sigmas [num_steps + 1] on which the pipeline itself samples this size, from exactly 1 to exactly 0."""
        latents = torch.zeros(1, *self._latent, device=self._device)
        parts = {"scheduler": probe(self.pipeline.scheduler)}
        sigmas = self._replay(self.blank(1, 1).to(self._device), latents, parts, steps=num_steps).float().cpu()
        sigmas[0] = 1  # a grid that begins at .9998 would make the first stochastic step's diffusion 70 times as large
        return sigmas

    def encode(self, prompts: Sequence[str]) -> Cond:
        return self.text.encode(prompts, guided=self.guided)

    @torch.no_grad()
    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        groups = [[one] for one in generators] if self.one_row else [generators]
        return torch.cat([self._prepared(self.blank(len(group), 1, torch.float32), group)[0] for group in groups])

    def _prepared(self, cond: Cond, generators: Sequence[torch.Generator]) -> tuple[Any, ...]:
        """The results of the pipeline's `prepare_latents`: latents, and ids or conditions."""

        def caught(own: Any) -> Any:
            made = own.func(None, *own.args[1:], **own.keywords) if self.pictured else own()  # without an input picture
            raise Caught(made if isinstance(made, tuple) else (made,))

        cond, steps = cond.to(self._device), OneStep(self.pipeline.scheduler.config, None)
        changes: dict[str, Any] = {"generator": list(generators)}
        return self._call(Script(self.reader(self.batch(cond)), caught), cond, {"scheduler": steps}, **changes)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        groups = self._groups(sigma, cond)
        if len(groups) == 1:
            return self._velocity(x, sigma, cond)
        answers = [self._velocity(x[rows], sigma[rows], cond.rows(rows)) for rows in groups]
        order = torch.tensor([row for rows in groups for row in rows], device=x.device).argsort()
        return torch.cat(answers)[order]

    def _groups(self, sigma: Tensor, cond: Cond) -> list[list[int]]:
        """Rows that may share a call. With sharded weights all ranks must make equally many calls, so rows are single."""
        if self.one_row or (self.sharded and (self.ragged or self.pictured or self.one_time)):
            return [[row] for row in range(len(sigma))]
        keys, times = self.keys(cond), sigma.tolist() if self.one_time else None
        if keys is None and times is None:
            return [list(range(len(sigma)))]
        return rows_alike([(keys[row] if keys else None, times[row] if times else None) for row in range(len(sigma))])

    def _velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        config = self.pipeline.scheduler.config
        step = OneStep(config, sigma, truncate=self.truncates, alike=self.one_time)
        return self._replay(cond, x.to(self._latent_dtype), {"scheduler": step}, guided=self.guided)

    def decode(self, x: Tensor) -> Tensor:
        return torch.cat([self._decode(part) for part in (x.split(1) if self.one_row else (x,))])

    def _decode(self, x: Tensor) -> Tensor:
        step = OneStep(self.pipeline.scheduler.config, None)
        pictures = self._replay(self.blank(len(x), 1).to(self._device), x, {"scheduler": step})[0].clamp(0, 1)
        return pictures[:, 0] if self.video and pictures.shape[1] == 1 else pictures

    def _replay(self, cond: Cond, latents: Tensor, parts: Mapping[str, Any], **changes: Any) -> Any:
        batch = self.batch(cond)
        own = [_expanded(value, len(latents)) for value in self._beside]
        beside = [batch.get(name, value) for name, value in zip(self.pictured or [""] * len(own), own, strict=True)]
        script = Script(self.reader(batch), lambda made: (latents, *beside) if beside else latents)
        return self._call(script, cond, parts, **changes)

    def _call(
        self, script: Script, cond: Cond, parts: Mapping[str, Any], *, guided: bool = False, steps: int = 1, **changes: Any
    ) -> Any:
        """The pipeline's call by `script`, without text encoders, with the active network."""
        rows = len(cond)
        arguments = self.arguments(
            self.pipeline, self.options, rows=rows, guided=guided, scale=self.guidance_scale, steps=steps
        )
        network, vae = Network(self.tuning.active, self.dtype, self.autocast), Pictures(self.pipeline.vae)
        parts = {**dict.fromkeys(self._encoders), "transformer": network, "vae": vae, **parts}
        if self.seen:
            pictures = [Unseen((width, height)) for width, height in sizes_in(cond.ragged[SIZES][0])]
            changes["image"] = pictures if self.most_pictures > 1 else pictures[0]
            parts["image_processor"] = UnseenProcessor(self.pipeline.image_processor)
        return replay(self.pipeline, script, {**arguments, **changes}, device=self._device, parts=parts)


def _patch(config: Any) -> int:
    """Latent pixels of a token."""
    sides = getattr(config, "patch_size", None) or config.all_patch_size[0]
    return math.prod(sides) if isinstance(sides, Sequence) else sides**2


def _expanded(value: Any, rows: int) -> Any:
    """A tensor of one row, expanded to `rows`; anything else is shared by all rows."""
    return value.expand(rows, *value.shape[1:]) if isinstance(value, Tensor) and len(value) == 1 else value
