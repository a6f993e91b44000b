"""Text encoders of a diffusers pipeline, used before the transformer is on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.core.data import Cond
from g2rpo.core.devices import empty_cache
from g2rpo.core.images import read_inputs
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipelines import cast
from g2rpo.models.replay import Caught, NetworkCall, OneStep, Pictures, Script, replay
from g2rpo.models.spec import PipelineSpec

CPU = torch.device("cpu")


class TextEncoders:
    """The text encoders of `pipeline`, frozen, that encode prompts by the pipeline's own call; for
    editing its VAE too.

    They move to `device` for the first prompt and stay; after `park` they are on the CPU and move
    only while encoding.
    """

    def __init__(
        self, pipeline: Any, spec: PipelineSpec, options: PolicyConfig, device: torch.device | str
    ) -> None:
        self.pipeline, self.spec, self.options = pipeline, spec, options
        self.device = torch.device(device)
        self.guided = spec.is_guided(pipeline, options.guidance_scale)
        """Whether prompts are encoded together with a negative one."""
        self.pictured = spec.pictured
        """Results of encoding input pictures by the VAE."""
        encoders = {
            name: part
            for name, part in pipeline.components.items()
            # SD3 may come without its third
            if name.startswith("text_encoder") and part is not None
        }
        self.names = list(encoders)
        self.modules: list[nn.Module] = [
            part.requires_grad_(False).eval() for part in encoders.values()
        ]
        for module in self.modules:
            cast(module, getattr(torch, options.dtype))
        self._parked = False
        self._loaded: list[tuple[nn.Module, str, Tensor]] = []
        """Weights in host memory, as they were loaded, while copies are on the device."""

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], guided: bool | None = None) -> Cond:
        """Conditioning for each prompt; `guided` overrides the encoders' own setting."""
        guided = self.guided if guided is None else guided
        with self.at_work(), self._seeing():
            return Cond.join([self._row(prompt, guided) for prompt in prompts])

    @contextmanager
    def _seeing(self) -> Iterator[None]:
        """While entered, a VAE that is needed is on the encoders' device."""
        if not self.spec.pictured or self.pipeline.vae.device == self.device:
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
        spec, pictures = self.spec, self._pictures(prompt)

        def encode(own: NetworkCall) -> Any:
            read.append(own())
            return read[-1]

        def latents(own: NetworkCall) -> Any:
            raise Caught(own()[1:] if pictures else ())

        # any scale with guidance: the options' may be without, and the demo changes it
        scale = max(spec.guidance, (spec.unguided or 0) + 1) if guided else None
        arguments = spec.arguments(self.pipeline, self.options, rows=1, guided=guided, scale=scale)
        arguments["prompt"] = [str(prompt)]
        if pictures:
            arguments["image"] = pictures if spec.most_pictures > 1 else pictures[0]
        parts: dict[str, Any] = {"scheduler": OneStep(self.pipeline.scheduler.config, None)}
        if pictures:
            parts["vae"] = Pictures(self.pipeline.vae)
        beside = replay(
            self.pipeline, Script(encode, latents), arguments, device=self.device, parts=parts
        )
        return spec.cond(read, beside, [picture.size for picture in pictures])

    def _pictures(self, prompt: str) -> list[Any]:
        self.spec.check_pictures(prompt)
        return read_inputs(prompt)

    def park(self) -> None:
        """Moves the encoders off the device."""
        self._parked = True
        self._move(CPU)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While entered, encoders that are parked are on the device."""
        parked, self._parked = self._parked, False
        self._move(self.device)
        try:
            yield
        finally:
            self._parked = parked
            if parked:
                self._move(CPU)

    def _move(self, device: torch.device) -> None:
        """Moves the encoders to `device`. Back on the CPU they use the loaded weights again, which
        processes may share."""
        if device == CPU:
            for owner, name, weight in self._loaded:
                setattr(owner, name, weight)
            self._loaded = []
        elif not self._loaded:
            self._loaded = _tensors(self.modules)
        for module in self.modules:
            module.to(device)
        if device == CPU:
            empty_cache()


def _tensors(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
    """Owner, name and value of all weights and buffers; weights are new objects with the same
    memory."""
    owners = [owner for module in modules for owner in module.modules()]
    found: list[tuple[nn.Module, str, Tensor]] = [
        (o, name, value) for o in owners for name, value in o._buffers.items() if value is not None
    ]
    kept: dict[int, Tensor] = {}  # by identity: modules may share an embedding
    for owner in owners:
        for name, weight in owner._parameters.items():
            if weight is not None:
                found.append(
                    (owner, name, kept.setdefault(id(weight), nn.Parameter(weight.data, False)))
                )
    return found
