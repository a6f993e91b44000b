"""One policy for the flow pipelines of diffusers, by their own code (`replay`); `catalogue` describes each in a few lines."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from g2rpo.policies.options import PolicyOptions
from g2rpo.policies.pipelines import PipelinePolicy, Shapes
from g2rpo.policies.replay import Call, Caught, Decoder, Network, OneStep, Script, probe, replay, rows_alike
from g2rpo.policies.text import TextEncoders
from g2rpo.types import Cond

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Attention projections as diffusers names them, of the picture and, where there are any, of the text."""
NEGATIVE = "negative_"


class DiffusersPolicy(PipelinePolicy):
    """A flow pipeline of diffusers as a `Policy`, by its own `__call__`. Subclasses describe one class of pipelines.

    Latents are float32, in the form in which the pipeline steps them. Velocities are the pipeline's input to its scheduler:
    after guidance, which is computed in float32. Prompts are encoded one at a time, so a row is a function of its prompt.
    """

    encoded: ClassVar[Sequence[str]]
    """What `encode_prompt` returns, in its order, with the negative prompt's beginning with "negative_". Pipelines that encode
    it by a second call name one call's."""
    scale: ClassVar[str] = "guidance_scale"
    """The pipeline's argument for guidance_scale."""
    unguided: ClassVar[float | None] = 1.0
    """The largest guidance_scale without a second evaluation; None: the scale is an input of the network."""
    shared: ClassVar[Sequence[str]] = ("text_ids",)
    """Tensors of `encoded` that have no row per prompt."""
    masks: ClassVar[Mapping[str, str]] = {}
    """Embeddings as long as their prompt, each with the mask that the pipeline makes where they are padded."""
    lists: ClassVar[Sequence[str]] = ()
    """Embeddings that are a list of tensors as long as their prompts."""
    ragged: ClassVar[Sequence[str]] = ()
    """Embeddings as long as their prompt without a mask: only rows of one length share a call."""
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {}
    """Dtypes of encoded tensors that are not embeddings."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of the call."""
    one_time: ClassVar[bool] = False
    """Whether all rows of a call have one sigma."""
    lora_targets: ClassVar[Sequence[str]] = ATTENTION

    def __init__(self, pipeline: Any, **options: Any) -> None:
        super().__init__(pipeline, **options)
        cond = self.blank(1, 1).to(self._device)
        latents, *self._beside = self._latents_of(cond, 1, [torch.Generator()])
        self._latent, self._latent_dtype = tuple(latents.shape[1:]), latents.dtype

    @classmethod
    def encoders(cls, pipeline: Any, **options: Any) -> PipelineText:
        return PipelineText(pipeline, cls, PolicyOptions(**options))

    @classmethod
    def arguments(cls, pipeline: Any, o: PolicyOptions, *, rows: int, steps: int = 1, guided: bool = False) -> dict[str, Any]:
        """Arguments of a call for `rows` prompts, which are encoded elsewhere."""
        scale = cls.guidance if o.guidance_scale is None else o.guidance_scale
        given = {
            "prompt": [""] * rows,
            "negative_prompt": [o.negative_prompt or ""] * rows if guided else None,
            cls.scale: scale if guided or cls.unguided is None else cls.unguided,
            "height": o.height,
            "width": o.width,
            "num_frames": o.num_frames,
            "max_sequence_length": o.max_sequence_length or cls.tokens,
            "num_inference_steps": steps,
            "output_type": "pt",
            "return_dict": False,
            **cls.fixed,
        }
        known = _parameters(type(pipeline).__call__)
        return {name: value for name, value in given.items() if name in cls.fixed or (name in known and value is not None)}

    @classmethod
    def is_guided(cls, pipeline: Any, scale: float | None) -> bool:
        """Whether a velocity takes two evaluations at that scale."""
        scale = cls.guidance if scale is None else scale
        return cls.unguided is not None and scale > cls.unguided

    @property
    def config(self) -> Any:
        """The transformer's."""
        return self.pipeline.transformer.config

    @property
    def guided(self) -> bool:
        """Whether a velocity takes two evaluations."""
        return self.is_guided(self.pipeline, self.guidance_scale)

    def check_size(self, height: int, width: int) -> None:
        multiple = self.multiple
        if height % multiple or width % multiple:
            raise ValueError(f"height and width must be multiples of {multiple} for this model, got {height}x{width}")

    @property
    def multiple(self) -> int:
        """Pixels of a token's side."""
        processor = getattr(self.pipeline, "image_processor", None) or self.pipeline.video_processor
        return int(processor.config.vae_scale_factor)

    def widths(self) -> dict[str, tuple[int, ...]]:
        """One token's embeddings, by name: sizes that follow a prompt's length."""
        raise NotImplementedError

    def pooled(self) -> dict[str, tuple[int, ...]]:
        """Embeddings without a length."""
        return {}

    def blank(self, rows: int, tokens: int, dtype: torch.dtype | None = None) -> Cond:
        """Conditioning of the right shapes, without content; embeddings in `dtype` (None: the policy's)."""
        sizes = {name: (tokens, *width) for name, width in self.widths().items()} | self.pooled()
        tensors, ragged = {}, {}
        for name, size in sizes.items():
            for whose in ("", NEGATIVE) if self.guided else ("",):
                value = torch.zeros(rows, *size, dtype=self.dtypes.get(name, dtype or self.dtype))
                if name in {*self.masks, *self.lists, *self.ragged}:
                    ragged[whose + name] = tuple(value)
                else:
                    tensors[whose + name] = value
        return Cond(tensors, ragged)

    @property
    def image_tokens(self) -> int:
        config = self.pipeline.transformer.config
        return math.prod(self._latent) // (config.in_channels * (1 if len(self._latent) == 2 else math.prod(_patch(config))))

    def text_tokens(self, clip_tokens: int) -> int:
        """Tokens of a prompt that are not images'; `clip_tokens` as in `shapes`."""
        return self.max_sequence_length

    def shapes(self, clip_tokens: int) -> Shapes:
        tokens = self.text_tokens(clip_tokens)
        blank = self.blank(1, tokens)
        cond = {name: tuple(value.shape[1:]) for name, value in blank.tensors.items()}
        cond |= {name: tuple(value[0].shape) for name, value in blank.ragged.items()}
        return Shapes(self._latent, cond, self.image_tokens, tokens, 2 if self.guided else 1)

    @staticmethod
    def shallow(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        raise NotImplementedError

    @property
    def shift(self) -> float:
        """The time shift at the middle of the pipeline's own grid of two steps; `grid` has all of it."""
        middle = float(self.grid(2)[1])
        return middle / (1 - middle)

    @torch.no_grad()
    def grid(self, num_steps: int) -> Tensor:
        """The sigmas [num_steps + 1] on which the pipeline itself samples this size, from exactly 1 to exactly 0."""
        cond = self.blank(1, 1).to(self._device)
        latents = torch.zeros(1, *self._latent, device=self._device)
        parts = {"scheduler": probe(self.pipeline.scheduler)}
        sigmas = self._replay(cond, latents, parts, steps=num_steps).float().cpu()
        sigmas[0] = 1  # where a solver begins at .9998, the diffusion of a stochastic step would be 70 times as large
        return sigmas

    def encode(self, prompts: Sequence[str]) -> Cond:
        return self.text.encode(prompts, guided=self.guided)

    @torch.no_grad()
    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        cond = self.blank(len(generators), 1, torch.float32).to(self._device)
        latents, *_ = self._latents_of(cond, len(generators), generators)
        return latents

    def _latents_of(self, cond: Cond, rows: int, generators: Sequence[torch.Generator]) -> tuple[Any, ...]:
        """What the pipeline's `prepare_latents` makes: latents, and ids or conditions beside them."""

        def caught(own: Call) -> Any:
            made = own()
            raise Caught(made if isinstance(made, tuple) else (made,))

        arguments = {**self._arguments(rows, guided=False), "generator": list(generators)}
        script = Script(self._reader(cond, {}), caught)
        parts = {**self._quiet(), "scheduler": OneStep(self.pipeline.scheduler.config, None)}
        return replay(self.pipeline, script, arguments, device=self._device, parts=parts)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        groups = rows_alike([self._key(cond, sigma, row) for row in range(len(x))])
        if len(groups) == 1:
            return self._velocity(x, sigma, cond)
        answers = [self._velocity(x[rows], sigma[rows], cond.rows(rows)) for rows in groups]
        order = torch.tensor([row for rows in groups for row in rows], device=x.device).argsort()
        return torch.cat(answers)[order]

    def _key(self, cond: Cond, sigma: Tensor, row: int) -> Any:
        """What rows of one call have in common."""
        lengths = [len(values[row]) for name, values in cond.ragged.items() if name.removeprefix(NEGATIVE) in self.ragged]
        return (float(sigma[row]) if self.one_time else 0.0, *lengths)

    def _velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        config = self.pipeline.scheduler.config
        step = OneStep(config, sigma, truncate=self.options.truncate_timesteps, alike=self.one_time)
        return self._replay(cond, x.to(self._latent_dtype), {"scheduler": step}, guided=self.guided)

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        cond = self.blank(len(x), 1).to(self._device)
        return self._replay(cond, x, {"scheduler": OneStep(self.pipeline.scheduler.config, None)})[0].clamp(0, 1)

    def _replay(self, cond: Cond, latents: Tensor, parts: Mapping[str, Any], *, guided: bool = False, steps: int = 1) -> Any:
        rows = len(latents)
        beside = [_expanded(value, rows) for value in self._beside]
        script = Script(self._reader(cond, {}), lambda own: (latents, *beside) if beside else latents)
        arguments = self._arguments(rows, guided=guided, steps=steps)
        return replay(self.pipeline, script, arguments, device=self._device, parts={**self._quiet(), **parts})

    def _arguments(self, rows: int, **changes: Any) -> dict[str, Any]:
        made = self.arguments(self.pipeline, self.options, rows=rows, **changes)
        return {**made, self.scale: self.guidance_scale} if changes.get("guided") or self.unguided is None else made

    def _quiet(self) -> dict[str, Any]:
        """The pipeline without text encoders, with the active network."""
        absent = {name: None for name in vars(self.pipeline) if name.startswith("text_encoder") and "." not in name}
        network = Network(self.tuning.active, self.dtype)
        return {**_modules_only(absent, self.pipeline), "transformer": network, "vae": Decoder(self.pipeline.vae)}

    def _reader(self, cond: Cond, state: dict[str, int]) -> Callable[[Call], tuple[Any, ...]]:
        """`encode_prompt` from memory: what `cond` holds, in the order of `encoded`."""
        batch = self._batch(cond)

        def read(own: Call) -> tuple[Any, ...]:
            state["calls"] = state.get("calls", 0) + 1
            whose = NEGATIVE if state["calls"] > 1 else ""
            return tuple(batch.get(whose + name) for name in self.encoded)

        return read

    def _batch(self, cond: Cond) -> dict[str, Any]:
        """Rows of a conditioning as the pipeline has them: padded, listed, shared."""
        batch: dict[str, Any] = {name: v[0] if self._is_shared(name) else v for name, v in cond.tensors.items()}
        for name, values in cond.ragged.items():
            plain = name.removeprefix(NEGATIVE)
            if plain in self.lists:
                batch[name] = list(values)
            elif plain in self.masks and len({len(value) for value in values}) > 1:
                batch[name], mask = cond.padded(name)
                batch[name.replace(plain, self.masks[plain])] = mask.long()
            else:
                batch[name] = torch.stack(values)
        return batch

    @classmethod
    def _is_shared(cls, name: str) -> bool:
        return name.removeprefix(NEGATIVE) in cls.shared


class PipelineText(TextEncoders):
    """The text encoders of a pipeline that `policy` describes, by the pipeline's own call."""

    def __init__(self, pipeline: Any, policy: type[DiffusersPolicy], options: PolicyOptions) -> None:
        super().__init__(pipeline, dtype=options.dtype, device=options.device)
        self.policy, self.options = policy, options
        self.guided = policy.is_guided(pipeline, options.guidance_scale)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], guided: bool | None = None) -> Cond:
        guided = self.guided if guided is None else guided
        with self._at_work():
            return Cond.join([self._row(prompt, guided) for prompt in prompts])

    def _row(self, prompt: str, guided: bool) -> Cond:
        read: list[tuple[Any, ...]] = []

        def encode(own: Call) -> Any:
            read.append(own())
            return read[-1]

        def latents(own: Call) -> Any:
            raise Caught(None)

        arguments = {**self.policy.arguments(self.pipeline, self.options, rows=1, guided=guided), "prompt": [str(prompt)]}
        if guided and self.policy.scale in arguments:
            arguments[self.policy.scale] = max(arguments[self.policy.scale], 1 + (self.policy.unguided or 0.0))
        parts = {"scheduler": OneStep(self.pipeline.scheduler.config, None)}
        replay(self.pipeline, Script(encode, latents), arguments, device=self.device, parts=parts)
        return self._cond(read)

    def _cond(self, read: Sequence[tuple[Any, ...]]) -> Cond:
        """One row of what `encode_prompt` gave, call after call. Masks are left out that padding will make."""
        policy, tensors, ragged = self.policy, dict[str, Tensor](), dict[str, tuple[Tensor, ...]]()
        for whose, values in zip(("", NEGATIVE), read, strict=False):
            for name, value in zip(policy.encoded, values, strict=True):
                plain, name = name.removeprefix(NEGATIVE), whose + name
                if value is None or (isinstance(value, list) and not value) or plain in policy.masks.values():
                    continue
                if plain in policy.lists or plain in policy.masks or plain in policy.ragged:
                    ragged[name] = (value[0],)
                else:
                    tensors[name] = value[None] if plain in policy.shared else value
        return Cond(tensors, ragged)


@functools.cache
def _parameters(call: Call) -> frozenset[str]:
    return frozenset(inspect.signature(call).parameters)


def _patch(config: Any) -> tuple[int, ...]:
    """A patch's sides in latent pixels."""
    sides = getattr(config, "patch_size", None) or config.all_patch_size[0]
    return tuple(sides) if isinstance(sides, Sequence) else (sides, sides)


def _expanded(value: Any, rows: int) -> Any:
    """What one row has beside its latents, for `rows` of them; what has no row is everyone's."""
    return value.expand(rows, *value.shape[1:]) if isinstance(value, Tensor) and len(value) == 1 else value


def _modules_only(parts: dict[str, None], pipeline: Any) -> dict[str, None]:
    return {name: None for name in parts if isinstance(getattr(pipeline, name), torch.nn.Module)}
