"""Conditioning of diffusers pipelines: read once per prompt by their own code, kept as a `Cond`, given back in batches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from g2rpo.data import Cond
from g2rpo.errors import UserError
from g2rpo.input_pictures import images_of, read_inputs
from g2rpo.policies.options import PolicyOptions
from g2rpo.policies.replay import Call, Caught, OneStep, Pictures, Script, replay
from g2rpo.policies.text import TextEncoders

NEGATIVE = "negative_"
"""Before the names of what belongs to the negative prompt."""
CALLED = ("height", "width", "num_frames", "negative_prompt", "guidance_scale", "max_sequence_length")
"""Options that are arguments of a pipeline's call."""
SIZES = "picture_sizes"
"""Widths and heights of a prompt's input pictures, [pictures, 2]."""


class Conditioning:
    """The description of what a class of pipelines is conditioned on, and of the arguments of its call.

    Prompts are encoded one at a time, so a row is a function of its prompt.
    """

    encoded: ClassVar[Sequence[str]]
    """What `encode_prompt` returns, in its order, with the negative prompt's beginning with "negative_". Pipelines that encode
    it by a second call name one call's."""
    shared: ClassVar[Sequence[str]] = ("text_ids",)
    """Tensors that have no row per prompt."""
    masks: ClassVar[Mapping[str, str]] = {}
    """Embeddings as long as their prompt, each with the mask that the pipeline makes where they are padded."""
    lists: ClassVar[Sequence[str]] = ()
    """Embeddings that are a list of tensors as long as their prompts."""
    ragged: ClassVar[Sequence[str]] = ()
    """What is as long as its prompt, without a mask: only rows of one length share a call."""
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {}
    """Dtypes of encoded tensors that are not embeddings."""
    pictured: ClassVar[Sequence[str]] = ()
    """For editing: what `prepare_latents` returns beside the latents; "" for what does not depend on the input picture."""
    most_pictures: ClassVar[int] = 1
    """For editing: how many input pictures a prompt may have."""
    seen: ClassVar[bool] = False
    """For editing: whether the call needs the sizes of input pictures where they are encoded already."""
    scale: ClassVar[str] = "guidance_scale"
    """The pipeline's argument for guidance_scale."""
    guidance: ClassVar[float]
    tokens: ClassVar[int]
    unguided: ClassVar[float | None] = 1.0
    """The largest guidance_scale without a second evaluation; None: the scale is an input of the network."""
    video: ClassVar[bool] = False
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of the call."""

    @classmethod
    def is_guided(cls, pipeline: Any, scale: float | None) -> bool:
        """Whether a velocity takes two evaluations at that scale."""
        scale = cls.guidance if scale is None else scale
        return cls.unguided is not None and scale > cls.unguided

    @classmethod
    def not_taken(cls, pipeline_class: str, o: PolicyOptions) -> list[str]:
        """The options in `o` that the pipeline's call has no argument for."""
        import diffusers

        known = {*_parameters(getattr(diffusers, pipeline_class).__call__), *cls.fixed}
        names = {**{name: name for name in CALLED}, "guidance_scale": cls.scale}
        return [name for name, argument in names.items() if getattr(o, name) is not None and argument not in known]

    @classmethod
    def check_pictures(cls, prompt: str) -> None:
        """UserError for a prompt with more or fewer input pictures than the model takes."""
        most, given = cls.most_pictures if cls.pictured else 0, len(images_of(prompt))
        if given > most or (most and not given):
            takes = "one input picture" if most == 1 else f"one to {most} input pictures" if most else "no input picture"
            what = "prompts of .jsonl files have them in `images`"
            raise UserError(f"prompt {str(prompt)[:60]!r}: has {given} input pictures, but this model takes {takes}; {what}")

    @classmethod
    def arguments(
        cls, pipeline: Any, o: PolicyOptions, *, rows: int, guided: bool, scale: float | None = None, steps: int = 1
    ) -> dict[str, Any]:
        """Arguments of a call for `rows` prompts, whose texts are not among them."""
        scale = next(value for value in (scale, o.guidance_scale, cls.guidance) if value is not None)
        given = {
            "prompt": [""] * rows,
            "negative_prompt": [o.negative_prompt or ""] * rows if guided else None,
            cls.scale: scale if guided or cls.unguided is None else cls.unguided,
            "height": o.height,
            "width": o.width,
            "num_frames": o.num_frames or 1,
            "max_sequence_length": o.max_sequence_length or cls.tokens,
            "num_inference_steps": steps,
            "sigmas": [1.0] if steps == 1 else None,  # of one step none needs to be computed
            "generator": [torch.Generator() for _ in range(rows)],
            "output_type": "pt",
            "return_dict": False,
        }
        known = _parameters(type(pipeline).__call__)
        return {**{name: value for name, value in given.items() if name in known and value is not None}, **cls.fixed}

    @classmethod
    def cond(cls, read: Sequence[tuple[Any, ...]], beside: Sequence[Any], sizes: Sequence[tuple[int, int]]) -> Cond:
        """One row of what `encode_prompt` returned, call after call, and `prepare_latents` for its input pictures.

        Masks that padding will make are left out.
        """
        named = [
            (whose + name, value)
            for whose, values in zip(("", NEGATIVE), read, strict=False)
            for name, value in zip(cls.encoded, values, strict=True)
        ]
        named += [(name, value) for name, value in zip(cls.pictured, beside, strict=False) if name]
        tensors: dict[str, Tensor] = {}
        ragged: dict[str, tuple[Tensor, ...]] = {}
        for name, value in named:
            plain = name.removeprefix(NEGATIVE)
            if value is None or len(value) == 0 or plain in cls.masks.values():
                continue
            row = value if plain in cls.shared else value[0]
            if plain in {*cls.lists, *cls.masks, *cls.ragged, *cls.pictured}:
                ragged[name] = (row,)
            else:
                tensors[name] = row[None]
        if sizes:
            ragged[SIZES] = (torch.tensor(sizes, device=next(iter(ragged.values()))[0].device),)
        return Cond(tensors, ragged)

    @classmethod
    def batch(cls, cond: Cond) -> dict[str, Any]:
        """Rows of a conditioning as the pipeline has them: padded, listed, shared."""
        batch: dict[str, Any] = {}
        every: dict[str, Any] = {**cond.tensors, **cond.ragged}
        for name, values in every.items():
            plain = name.removeprefix(NEGATIVE)
            if plain in cls.shared:
                batch[name] = values[0]
            elif plain in cls.lists:
                batch[name] = list(values)
            elif isinstance(values, Tensor):
                batch[name] = values
            elif plain in cls.masks and len({len(value) for value in values}) > 1:
                batch[name], mask = cond.padded(name)
                batch[name.replace(plain, cls.masks[plain])] = mask.long()
            else:
                batch[name] = torch.stack(values)
        return batch

    @classmethod
    def reader(cls, batch: Mapping[str, Any]) -> Callable[[Call], tuple[Any, ...]]:
        """`encode_prompt` from memory, for one call of a pipeline: what is absent is None."""
        whose = iter(("", NEGATIVE))

        def read(own: Call) -> tuple[Any, ...]:
            before = next(whose)
            return tuple(batch.get(before + name) for name in cls.encoded)

        return read

    @classmethod
    def keys(cls, cond: Cond) -> list[Any] | None:
        """What rows of one call have in common, row by row; None where all rows may share it."""
        differing = [name for name in cond.ragged if name.removeprefix(NEGATIVE) in (*cls.ragged, *filter(None, cls.pictured))]
        if not differing:
            return None
        lengths = list(zip(*([len(value) for value in cond.ragged[name]] for name in differing), strict=True))
        tables = cond.ragged.get(SIZES, (torch.empty(0),) * len(lengths))
        known = {id(table): str(sizes_in(table)) for table in tables}
        return [(own, known[id(table)]) for own, table in zip(lengths, tables, strict=True)]


class PipelineText(TextEncoders):
    """The text encoders of a pipeline that `described` describes, by the pipeline's own call; for editing its VAE too."""

    def __init__(self, pipeline: Any, described: type[Conditioning], options: PolicyOptions) -> None:
        super().__init__(pipeline, dtype=options.dtype, device=options.device)
        self.described, self.options = described, options
        self.guided = described.is_guided(pipeline, options.guidance_scale)
        self.pictured = described.pictured

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], guided: bool | None = None) -> Cond:
        guided = self.guided if guided is None else guided
        with self._at_work(), self._seeing():
            return Cond.join([self._row(prompt, guided) for prompt in prompts])

    @contextmanager
    def _seeing(self) -> Iterator[None]:
        """While entered, a VAE that is needed is on the encoders' device."""
        if not self.described.pictured or self.pipeline.vae.device == self.device:
            yield
            return
        before = self.pipeline.vae.device
        self.pipeline.vae.to(self.device)
        try:
            yield
        finally:
            self.pipeline.vae.to(before)

    def _row(self, prompt: str, guided: bool) -> Cond:
        read: list[tuple[Any, ...]] = []
        described, pictures = self.described, self._pictures(prompt)

        def encode(own: Call) -> Any:
            read.append(own())
            return read[-1]

        def latents(own: Call) -> Any:
            raise Caught(own()[1:] if pictures else ())

        scale = described.guidance if guided else None  # that of the options may be without, and the demo changes it
        arguments = described.arguments(self.pipeline, self.options, rows=1, guided=guided, scale=scale)
        arguments["prompt"] = [str(prompt)]
        if pictures:
            arguments["image"] = pictures if described.most_pictures > 1 else pictures[0]
        parts: dict[str, Any] = {"scheduler": OneStep(self.pipeline.scheduler.config, None)}
        if pictures:
            parts["vae"] = Pictures(self.pipeline.vae)
        beside = replay(self.pipeline, Script(encode, latents), arguments, device=self.device, parts=parts)
        return described.cond(read, beside, [picture.size for picture in pictures])

    def _pictures(self, prompt: str) -> list[Any]:
        self.described.check_pictures(prompt)
        return read_inputs(prompt)


def sizes_in(table: Tensor) -> list[list[int]]:
    """Widths and heights of input pictures; where a plan has tensors without content, those of one picture of a megapixel."""
    without = table.is_meta or isinstance(table, FakeTensor)
    return [[1024, 1024]] if without else table.tolist()


@functools.cache
def _parameters(call: Call) -> frozenset[str]:
    return frozenset(inspect.signature(call).parameters)
