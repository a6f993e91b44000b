"""`PipelineSpec`: the declaration of a class of diffusers pipelines as a policy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from g2rpo.core.data import Cond
from g2rpo.core.errors import UserError, placed
from g2rpo.core.images import check_counts
from g2rpo.models.comfyui import ComfyUI
from g2rpo.models.options import PolicyConfig
from g2rpo.models.published import PublishedModel, models_of
from g2rpo.models.replay import NetworkCall

NEGATIVE = "negative_"
"""Prefix of names that belong to the negative prompt."""
PICTURE_SIZES = "picture_sizes"
"""Widths and heights of a prompt's input pictures, [pictures, 2]."""
ATTENTION_TARGETS = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
)
"""Attention projections as diffusers names them, of the picture and, where there are any, of the
text."""
RARE = ("published_pictures", "detach_negative")
"""Options that few models have."""
MEGAPIXEL = 1024
"""The side of an input picture assumed by plans."""

Widths = Mapping[str, tuple[int | str, ...]]
"""Shapes by name; a string is an entry of the transformer's config."""
Of = Callable[[Any], Any]
"""A value that depends on the pipeline."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineSpec:
    """A class of diffusers pipelines as a policy. Everything not declared here is done by its own
    `__call__` (`replay`).

    Prompts are encoded one at a time, so a row of a conditioning is a function of its prompt.
    """

    pipeline_class: str
    """The class in diffusers."""
    encoded: Sequence[str]
    """Names for the results of `encode_prompt`, in order; those of the negative prompt begin with
    "negative_". Pipelines that encode it by a second call list the results of one call."""
    widths: Widths
    """Shape of one token, for results whose number of tokens depends on the prompt."""
    pooled: Widths = field(default_factory=dict)
    """Shapes of results whose size does not depend on the prompt."""
    shared: Sequence[str] = ("text_ids",)
    """Tensors that have no row per prompt."""
    masks: Mapping[str, str] = field(default_factory=dict)
    """Embeddings with a token dimension, each with the name of the mask that the pipeline computes
    when it pads them."""
    lists: Sequence[str] = ()
    """Embeddings that are a list of tensors as long as their prompts."""
    ragged: Sequence[str] = ()
    """Results with a token dimension and no mask: only rows of equal length share a call."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Dtypes of encoded tensors that are not embeddings."""
    tokens: int
    """The default of max_sequence_length."""
    with_clip: bool = False
    """Whether CLIP's tokens follow those."""

    guidance: float
    """The default of guidance_scale."""
    scale: str = "guidance_scale"
    """The pipeline's argument for it."""
    unguided: float | None = 1.0
    """The largest scale without a second evaluation; None: the scale is an input of the network."""
    distilled: Of = lambda pipeline: False
    """Whether a pipeline of this class ignores the scale."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the call; a function gets the policy's options."""

    pictured: Widths = field(default_factory=dict)
    """For editing: further results of `prepare_latents` with the shape of one token; "" for one
    that does not depend on the input picture."""
    most_pictures: int = 1
    """For editing: how many input pictures a prompt may have."""
    seen: bool = False
    """For editing: whether the call needs the sizes of input pictures where they are encoded
    already."""
    picture_tokens: int = 0
    """For editing: tokens of the text encoder for an input picture of a megapixel."""

    frames: str | None = None
    """For videos: the pipeline's attribute with frames per frame of the latents."""
    fps: Of = lambda pipeline: 16
    patched: bool = False
    """Whether sides are multiples of the transformer's patch as well as of the VAE's scale."""
    grouped: int = 1
    """Sides are multiples of so many latents besides."""
    guider: bool = False
    """Whether guidance is the pipeline's part `guider`, which has the scale."""
    exact_vae: bool = False
    """Whether the VAE computes in float32 whatever `policy.dtype` is, as the model's own examples
    have it."""
    one_row: bool = False
    """Whether a call takes a single row."""
    one_time: Of = lambda pipeline: False
    """Whether all rows of a call must have the same sigma."""
    own_grid: bool = True
    """Whether the model's grid is the one of the pipeline's scheduler; else it is `flow.sigma_grid`
    with the scheduler's shift (SD3's shifts the lower end of its grid twice)."""
    optional: Sequence[str] = ()
    """Text encoders that a pipeline may lack."""

    lora_targets: Sequence[str] = ATTENTION_TARGETS
    """The default of policy.lora_targets."""
    unsupported: Sequence[str] = RARE
    """Policy options that this class lacks, besides those that its call has no argument for."""
    comfyui: ComfyUI | None = None
    """ComfyUI's names of the transformer's modules; None: no such model is known."""
    models: Mapping[str, PublishedModel] = field(default_factory=dict)
    """Published weights besides those in `published.json`, by hub id."""

    @property
    def known(self) -> Mapping[str, PublishedModel]:
        """Published weights, by hub id."""
        return {**models_of(self.pipeline_class), **self.models}

    def vae_dtype(self, dtype: str) -> str:
        """In what the VAE computes where `policy.dtype` is `dtype`."""
        return "float32" if self.exact_vae else dtype

    @property
    def video(self) -> bool:
        return self.frames is not None

    @property
    def is_masked(self) -> bool:
        """Whether attention gets a mask, which leaves out the padding of prompts."""
        padded = bool(self.masks or self.lists) and not self.one_row
        return padded or any(
            "mask" in name and name not in self.ragged for name in (*self.widths, *self.pooled)
        )

    @property
    def input_pictures(self) -> tuple[int, int]:
        """The least and the largest number of input pictures of a prompt."""
        return (1, self.most_pictures) if self.pictured else (0, 0)

    def scale_of(self, options: PolicyConfig) -> float:
        """The guidance scale of these options."""
        return self.guidance if options.guidance_scale is None else options.guidance_scale

    def is_guided(self, pipeline: Any, scale: float | None) -> bool:
        """Whether a velocity needs two evaluations at this scale (None: the default)."""
        scale = self.guidance if scale is None else scale
        return self.unguided is not None and scale > self.unguided and not self.distilled(pipeline)

    def guidable(self, pipeline: Any, network: Any) -> bool:
        """Whether pictures of a pipeline depend on the guidance scale; `network` is the config of
        its transformer."""
        if self.unguided is None:  # an input of the network, if its weights have one
            return bool(getattr(network, "guidance_embeds", True))
        return not self.distilled(pipeline)

    def guides(self, scale: float) -> bool:
        """Whether this scale is one of guidance; one that is an input of the network is, above
        0."""
        return scale > (self.unguided or 0.0)

    def multiple(self, pipeline: Any, config: Any) -> int:
        """Height and width must be multiples of this many pixels; of the transformer's `config`."""
        processor = getattr(pipeline, "image_processor", None) or pipeline.video_processor
        patch = config.patch_size if self.patched else 1
        patch = patch[-1] if isinstance(patch, Sequence) else patch
        return int(patch) * self.grouped * int(processor.config.vae_scale_factor)

    def check_size(self, pipeline: Any, config: Any, height: int, width: int, frames: int) -> None:
        """ValueError for a picture size that the model cannot generate."""
        multiple = self.multiple(pipeline, config)
        if height % multiple or width % multiple:
            raise ValueError(
                f"policy.height and policy.width must be multiples of {multiple} for this model, got {height}x{width}"
            )
        most = multiple * getattr(config, "pos_embed_max_size", 10**6)
        if max(height, width) > most:
            raise ValueError(
                f"this model has position embeddings up to {most} pixels, got {height}x{width}"
            )
        every = int(getattr(pipeline, self.frames)) if self.frames is not None else 1
        if (frames - 1) % every:
            raise ValueError(
                f"policy.num_frames must be one more than a multiple of {every} for this model, got {frames}"
            )

    def check_pictures(self, prompt: str) -> None:
        """UserError for a prompt with more or fewer input pictures than the model takes."""
        with placed("", UserError, after="; prompts of .jsonl files have them in `images`"):
            check_counts([prompt], self.input_pictures)

    def arguments(
        self,
        pipeline: Any,
        o: PolicyConfig,
        *,
        rows: int,
        guided: bool,
        scale: float | None = None,
        steps: int = 1,
    ) -> dict[str, Any]:
        """Arguments of a call for `rows` prompts, without the texts."""
        scale = self.scale_of(o) if scale is None else scale
        given = {
            "prompt": [""] * rows,
            "negative_prompt": [o.negative_prompt or ""] * rows if guided else None,
            self.scale: scale if guided or self.unguided is None else self.unguided,
            "height": o.height,
            "width": o.width,
            "num_frames": o.num_frames or 1,
            "max_sequence_length": o.max_sequence_length or self.tokens,
            "num_inference_steps": steps,
            "sigmas": [1.0] if steps == 1 else None,  # of one step none needs to be computed
            "generator": [torch.Generator()] * rows,
            "output_type": "pt",
            "return_dict": False,
        }
        kind: Any = type(pipeline)
        known = parameters_of(kind)
        fixed = {name: value(o) if callable(value) else value for name, value in self.fixed.items()}
        return {
            **{name: value for name, value in given.items() if name in known and value is not None},
            **fixed,
        }

    def cond(
        self,
        read: Sequence[tuple[Any, ...]],
        beside: Sequence[Any],
        sizes: Sequence[tuple[int, int]],
    ) -> Cond:
        """One row of what `encode_prompt` returned, call after call, and `prepare_latents` for its
        input pictures.

        Masks that follow from padding are left out.
        """
        named = [
            (whose + name, value)
            for whose, values in zip(("", NEGATIVE), read, strict=False)
            for name, value in zip(self.encoded, values, strict=True)
        ]
        named += [(name, value) for name, value in zip(self.pictured, beside, strict=False) if name]
        tensors: dict[str, Tensor] = {}
        ragged: dict[str, tuple[Tensor, ...]] = {}
        for name, value in named:
            plain = name.removeprefix(NEGATIVE)
            if value is None or len(value) == 0 or plain in self.masks.values():
                continue
            row = value if plain in self.shared else value[0]
            if self.is_ragged(plain):
                ragged[name] = (row,)
            else:
                tensors[name] = row[None]
        if sizes:
            ragged[PICTURE_SIZES] = (
                torch.tensor(sizes, device=next(iter(ragged.values()))[0].device),
            )
        return Cond(tensors, ragged)

    def is_ragged(self, name: str) -> bool:
        """Whether rows of this entry differ in length."""
        return name in {*self.lists, *self.masks, *self.ragged, *self.pictured}

    def shapes(
        self, config: Any, tokens: int, multiple: int, guided: bool
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of one row's conditioning by name, for prompts of `tokens`; of the
        transformer's `config`."""

        def of(table: Widths, *before: int) -> dict[str, tuple[int, ...]]:
            return {
                n: (*before, *(getattr(config, w) if isinstance(w, str) else w for w in ws))
                for n, ws in table.items()
            }

        plain = of(self.widths, tokens) | of(self.pooled)
        both = {
            whose + name: size
            for whose in ("", NEGATIVE)[: 1 + guided]
            for name, size in plain.items()
        }
        beside = {
            name: size
            for name, size in of(self.pictured, (MEGAPIXEL // multiple) ** 2).items()
            if name
        }
        return {**both, **beside, **({PICTURE_SIZES: (1, 2)} if self.pictured else {})}

    def blank(self, shapes: Mapping[str, tuple[int, ...]], rows: int, dtype: torch.dtype) -> Cond:
        """Zero-filled conditioning; embeddings in `dtype`."""
        tensors: dict[str, Tensor] = {}
        ragged: dict[str, tuple[Tensor, ...]] = {}
        for name, size in shapes.items():
            plain = name.removeprefix(NEGATIVE)
            value = torch.zeros(rows, *size, dtype=self.dtypes.get(plain, dtype))
            if name == PICTURE_SIZES:
                ragged[name] = (torch.tensor([[MEGAPIXEL] * 2]),) * rows
            elif self.is_ragged(plain):
                ragged[name] = tuple(value)
            else:
                tensors[name] = value
        return Cond(tensors, ragged)

    def batch(self, cond: Cond) -> dict[str, Any]:
        """Rows of a conditioning as the pipeline has them: padded, listed, shared."""
        batch: dict[str, Any] = {}
        every: dict[str, Any] = {**cond.tensors, **cond.ragged}
        for name, values in every.items():
            plain = name.removeprefix(NEGATIVE)
            if plain in self.shared:
                batch[name] = values[0]
            elif plain in self.lists:
                batch[name] = list(values)
            elif isinstance(values, Tensor):
                batch[name] = values
            elif plain in self.masks and len({len(value) for value in values}) > 1:
                batch[name], mask = cond.padded(name)
                batch[name.replace(plain, self.masks[plain])] = mask.long()
            else:
                batch[name] = torch.stack(values)
        return batch

    def reader(self, batch: Mapping[str, Any]) -> Callable[[NetworkCall], tuple[Any, ...]]:
        """A replacement of `encode_prompt` for one call of a pipeline that returns stored results;
        absent ones are None."""
        whose = iter(("", NEGATIVE))

        def read(own: NetworkCall) -> tuple[Any, ...]:
            before = next(whose)
            return tuple(batch.get(before + name) for name in self.encoded)

        return read

    def keys(self, cond: Cond) -> list[Any] | None:
        """A key for every row: only rows with equal keys share a call; None if all rows may."""
        differing = [
            name
            for name in cond.ragged
            if name.removeprefix(NEGATIVE) in (*self.ragged, *filter(None, self.pictured))
        ]
        if not differing:
            return None
        lengths = list(
            zip(*([len(value) for value in cond.ragged[name]] for name in differing), strict=True)
        )
        tables = cond.ragged.get(PICTURE_SIZES, (torch.empty(0),) * len(lengths))
        known = {id(table): str(sizes_in(table)) for table in tables}
        return [(own, known[id(table)]) for own, table in zip(lengths, tables, strict=True)]


def sizes_in(table: Tensor) -> list[list[int]]:
    """Widths and heights of input pictures; on the meta device, those of one picture of a
    megapixel."""
    return [[MEGAPIXEL, MEGAPIXEL]] if has_shape_alone(table) else table.tolist()


def has_shape_alone(tensor: Tensor) -> bool:
    """Whether a tensor has no values: a plan's."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


@functools.cache
def parameters_of(pipeline_class: Any) -> frozenset[str]:
    """The arguments of a pipeline class's call."""
    return frozenset(inspect.signature(pipeline_class.__call__).parameters)
