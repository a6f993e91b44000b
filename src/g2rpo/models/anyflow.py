"""The policy of diffusers' flow pipelines, which runs their own code (`replay`); `catalogue`
declares each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from g2rpo.core.data import Cond
from g2rpo.core.errors import UserError
from g2rpo.core.flow import sigma_grid
from g2rpo.core.holding import holding
from g2rpo.core.types import Policy
from g2rpo.models.adapters import AdapterFile
from g2rpo.models.embeddings import Stored
from g2rpo.models.facts import PipelineFacts
from g2rpo.models.options import PolicyConfig, TuningMode
from g2rpo.models.pipelines import (
    check_options,
    choose_attention,
    deployed_shift,
    place,
)
from g2rpo.models.replay import (
    Caught,
    OneStep,
    Pictures,
    ReplayedNetwork,
    Script,
    Unseen,
    UnseenProcessor,
    expanded,
    guiding,
    opaque,
    probe,
    replay,
    rows_alike,
)
from g2rpo.models.sharding import Sharded
from g2rpo.models.spec import PICTURE_SIZES, PipelineSpec, has_shape_alone, sizes_in
from g2rpo.models.text import TextEncoders
from g2rpo.models.tuning import Frozen, LoRA, tuned

if TYPE_CHECKING:
    from g2rpo.models.compiling import Compiled


class DiffusersPolicy(PipelineFacts, Policy):
    """A flow pipeline of diffusers as a `Policy`, by its own `__call__`.

    Latents are float32, in the layout of the pipeline's denoising loop. Velocities are the
    pipeline's input to its scheduler: after guidance, which is computed in float32. `tuning`
    replaces that of the options, "frozen" for sampling; `seed` draws the adapters' first values,
    `keep_base` keeps a copy of weights that training or `load` changes. ValueError for a size that
    the model cannot have.
    """

    stored: Stored | None = None
    """Conditioning in place of the text encoders'."""
    compiled: Compiled | None = None

    def __init__(
        self,
        pipeline: Any,
        options: PolicyConfig,
        *,
        tuning: TuningMode | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
        keep_base: bool = False,
        sharding: Sharded | None = None,
        text: TextEncoders | None = None,
    ) -> None:
        o, spec = options, self.spec
        check_options(spec, o)
        self.options, self.pipeline = o, pipeline
        self.sharded = sharding is not None
        self.transformer: Any = getattr(pipeline, "transformer", None)
        self.guidance_scale = spec.scale_of(o)
        self.max_sequence_length = o.max_sequence_length or spec.tokens
        self.dtype, self._device = getattr(torch, o.dtype), torch.device(device)
        self.one_time = bool(spec.one_time(pipeline))
        self.text = text or TextEncoders(pipeline, spec, o, device)
        self.check_size(o.height, o.width)
        self.tuning = tuned(
            self.transformer,
            o,
            tuning or o.tuning,
            pipeline_class=type(pipeline),
            targets=spec.lora_targets,
            names=spec.comfyui,
            device=self._device,
            seed=seed,
            keep_base=keep_base,
            sharding=sharding,
        )
        vae_dtype = getattr(torch, spec.vae_dtype(o.dtype))
        place(pipeline, self.transformer, o, self._device, vae_dtype)
        choose_attention(self.transformer, o.attention)
        if o.compile is True:
            self.compile()
        self._measure()

    def _measure(self) -> None:
        """Reads the shape and dtype of latents at this size, and what belongs to them."""
        latents, *self._beside = self._prepared(
            self.blank(1, 1).to(self._device), [torch.Generator()]
        )
        self._latent, self._latent_dtype = tuple(latents.shape[1:]), latents.dtype

    @contextmanager
    def sized(self, height: int, width: int) -> Iterator[None]:
        """While entered, pictures have another size. ValueError for one that the model cannot
        make."""
        self.check_size(height, width)
        options = self.options.model_copy(update={"height": height, "width": width})
        measured = {name: getattr(self, name) for name in ("_beside", "_latent", "_latent_dtype")}
        with holding(self, options=options, **measured):
            self._measure()
            yield

    @classmethod
    @functools.cache
    def of(cls, spec: PipelineSpec) -> type[Self]:
        """The policy class for pipelines of this spec."""
        return type(spec.pipeline_class, (cls,), {"spec": spec})

    def in_loss(self) -> AbstractContextManager[None]:
        """While entered, velocities are those of a loss."""
        return holding(self, _for_loss=True)

    def merged(self) -> AbstractContextManager[None]:
        return self.tuning.merged()

    def unguided(self) -> AbstractContextManager[None]:
        """While entered, velocities are without classifier-free guidance. A scale that is an input of
        the network stays."""
        before, largest = self.guidance_scale, self.spec.unguided
        return holding(self, guidance_scale=before if largest is None else min(before, largest))

    def compile(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compiles the transformer's blocks in place with torch.compile, for sampling and training.

        All blocks of a kind share their graphs: one for sampling, one for training and one for the
        base model under adapters, whatever the number of rows and tokens, and another of each for
        calls of a single row.
        """
        from g2rpo.models.compiling import Compiled  # imports torch's compiler, which takes seconds

        self.compiled = Compiled(self.blocks, backend)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def shift(self) -> float:
        """The time shift at this size: the scheduler's, or the one that gives the middle of the
        pipeline's grid of two steps."""
        if not self.spec.own_grid:
            return deployed_shift(self.pipeline.scheduler, self.image_tokens)
        middle = float(self.grid(2)[1])
        return middle / (1 - middle)

    @torch.no_grad()
    def grid(self, num_steps: int) -> Tensor:
        """The sigmas [num_steps + 1] on which the pipeline itself samples this size, from exactly 1
        to exactly 0."""
        if not self.spec.own_grid:
            return sigma_grid(num_steps, self.shift)
        # of a plan, without weights
        device = torch.device("cpu") if self._device.type == "meta" else self._device
        latents = torch.zeros(1, *self._latent, device=device)
        parts = {"scheduler": probe(self.pipeline.scheduler)}
        sigmas = (
            self._replay(
                self.blank(1, 1).to(device), latents, parts, steps=num_steps, device=device
            )
            .float()
            .cpu()
        )
        # a grid that begins at .9998 would make the first stochastic step's diffusion 70 times as
        # large
        sigmas[0] = 1
        return sigmas

    def encode(self, prompts: Sequence[str]) -> Cond:
        if self.stored is not None:
            return self.stored.encode(prompts)
        return self.text.encode(prompts, guided=self.guided)

    @torch.no_grad()
    def noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        groups = [[one] for one in generators] if self.spec.one_row else [generators]
        return torch.cat(
            [self._prepared(self.blank(len(group), 1, torch.float32), group)[0] for group in groups]
        )

    def _prepared(self, cond: Cond, generators: Sequence[torch.Generator]) -> tuple[Any, ...]:
        """The results of the pipeline's `prepare_latents`: latents, and ids or conditions."""

        def caught(own: Any) -> Any:
            # without an input picture
            made = own.func(None, *own.args[1:], **own.keywords) if self.spec.pictured else own()
            raise Caught(made if isinstance(made, tuple) else (made,))

        cond, steps = cond.to(self._device), OneStep(self.pipeline.scheduler.config, None)
        changes: dict[str, Any] = {"generator": list(generators)}
        return self._call(
            Script(self.spec.reader(self.spec.batch(cond)), caught),
            cond,
            {"scheduler": steps},
            **changes,
        )

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        groups = self._groups(sigma, cond)
        if len(groups) == 1:
            return self._velocity(x, sigma, cond)
        answers = [self._velocity(x[rows], sigma[rows], cond.rows(rows)) for rows in groups]
        order = torch.tensor([row for rows in groups for row in rows], device=x.device).argsort()
        return torch.cat(answers)[order]

    def _groups(self, sigma: Tensor, cond: Cond) -> list[list[int]]:
        """Groups of rows that may share a call. With sharded weights ranks must make equally many
        calls, so a group is one row."""
        if self.spec.one_row or (
            self.sharded and (self.spec.ragged or self.spec.pictured or self.one_time)
        ):
            return [[row] for row in range(len(sigma))]
        keys, acting = self.spec.keys(cond), self._acting(sigma)
        times = sigma.tolist() if self.one_time and not has_shape_alone(sigma) else None
        if keys is None and times is None and len({*acting}) == 1:
            return [list(range(len(sigma)))]
        return rows_alike(
            [(keys and keys[row], times and times[row], acting[row]) for row in range(len(sigma))]
        )

    def _acting(self, sigma: Tensor) -> list[bool]:
        """By row, whether the trained weights act. On tensors without values they do. Where they do
        at all sigmas, these are not read: the host would wait for a GPU."""
        if has_shape_alone(sigma) or self.trains_everywhere:
            return [True] * len(sigma)
        return (sigma > self.options.lora_above).tolist()

    @property
    def trains_everywhere(self) -> bool:
        """Whether the trained weights act at all sigmas."""
        return not self.options.lora_above

    def trains_at(self, sigma: float) -> bool:
        """Whether the trained weights act there, and not the base model."""
        return self._acting(torch.tensor([sigma]))[0]

    def _velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        config, (trained,) = self.pipeline.scheduler.config, self._acting(sigma[:1])
        if not trained and self._for_loss and torch.is_grad_enabled():
            raise UserError(
                f"a loss is of sigma {float(sigma[0]):.3f}, where the trained weights do not act "
                "(policy.lora_above)"
            )
        step = OneStep(config, sigma, truncate=self.truncates, alike=self.one_time)
        # pipelines round times to the dtype of latents; truncated ones stay whole
        if not self.truncates:
            x = x.to(self._latent_dtype)
        with nullcontext() if trained else self.tuning.late():
            return self._replay(cond, x, {"scheduler": step}, guided=self.guided)

    def decode(self, x: Tensor) -> Tensor:
        return torch.cat(
            [self._decode(part) for part in (x.split(1) if self.spec.one_row else (x,))]
        )

    def _decode(self, x: Tensor) -> Tensor:
        step = OneStep(self.pipeline.scheduler.config, None)
        pictures = opaque(
            self._replay(self.blank(len(x), 1).to(self._device), x, {"scheduler": step})[0]
            .clamp(0, 1)
            .float()
        )
        return pictures[:, 0] if self.spec.video and pictures.shape[1] == 1 else pictures

    def _replay(self, cond: Cond, latents: Tensor, parts: Mapping[str, Any], **changes: Any) -> Any:
        batch = self.spec.batch(cond)
        own = [expanded(value, len(latents)) for value in self._beside]
        if self._device.type == "meta":  # for `grid`
            own = [
                torch.zeros_like(v, device=latents.device) if isinstance(v, Tensor) else v
                for v in own
            ]
        beside = [
            batch.get(name, value)
            for name, value in zip(self.spec.pictured or [""] * len(own), own, strict=True)
        ]
        script = Script(
            self.spec.reader(batch), lambda made: (latents, *beside) if beside else latents
        )
        return self._call(script, cond, parts, **changes)

    def _call(
        self,
        script: Script,
        cond: Cond,
        parts: Mapping[str, Any],
        *,
        guided: bool = False,
        steps: int = 1,
        device: torch.device | None = None,
        **changes: Any,
    ) -> Any:
        """The pipeline's call by `script`, without text encoders, with the active network."""
        rows = len(cond)
        arguments = self.spec.arguments(
            self.pipeline,
            self.options,
            rows=rows,
            guided=guided,
            scale=self.guidance_scale,
            steps=steps,
        )
        detached = guided and self.options.detach_negative
        network = ReplayedNetwork(
            self.tuning.active, self.dtype, self.autocast, detach_negative=detached
        )
        vae = Pictures(self.pipeline.vae, self.options.published_pictures)
        parts = {
            **dict.fromkeys(self.text.names),
            "transformer": network,
            "vae": vae,
            **parts,
        }
        if self.spec.guider:
            parts["guider"] = guiding(self.pipeline.guider, self.guidance_scale, guided)
        if self.spec.seen:
            pictures = [
                Unseen((width, height)) for width, height in sizes_in(cond.ragged[PICTURE_SIZES][0])
            ]
            changes["image"] = pictures if self.spec.most_pictures > 1 else pictures[0]
            parts["image_processor"] = UnseenProcessor(self.pipeline.image_processor)
        return replay(
            self.pipeline,
            script,
            {**arguments, **changes},
            device=device or self._device,
            parts=parts,
        )

    def trainable_parameters(self) -> list[nn.Parameter]:
        return list(self.tuning.named().values())

    def base(self) -> AbstractContextManager[None]:
        return self.tuning.base()

    @property
    def sampling(self) -> Frozen:
        """The tuning of a policy for sampling."""
        assert isinstance(self.tuning, Frozen)
        return self.tuning

    def load(self, path: Path, strength: float = 1.0) -> None:
        """Loads tuned weights written by `save`, once; `strength` scales an adapter. One that acts
        at early steps alone does here."""
        if above := self.sampling.load(path, self.pipeline, strength, self.spec.comfyui):
            self.options = self.options.model_copy(update={"lora_above": above})

    @property
    def adapter_file(self) -> AdapterFile | None:
        return self.tuning.file if isinstance(self.tuning, LoRA) else None

    def save(self, directory: Path) -> Path:
        """Writes the tuned weights in diffusers' format; returns their path."""
        assert not isinstance(self.tuning, Frozen)
        return self.tuning.save(directory)
