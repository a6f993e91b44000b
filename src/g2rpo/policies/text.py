"""Text encoders of a diffusers pipeline, used before the transformer is on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.runtime.devices import empty_cache
from g2rpo.types import Cond

CPU = torch.device("cpu")


class TextEncoders:
    """The text encoders of `pipeline`, frozen in `dtype`, that encode prompts on `device`.

    They move there for the first prompt and stay; after `park` they are on the CPU and move only while encoding.
    """

    guided = False
    """Whether prompts are encoded together with a negative one."""
    pictured: Sequence[str] = ()
    """What the VAE makes of input pictures."""

    def __init__(self, pipeline: Any, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.pipeline = pipeline
        self.device = torch.device(device)
        self.modules: list[nn.Module] = [
            part.requires_grad_(False).eval().to(dtype)
            for name, part in pipeline.components.items()
            if name.startswith("text_encoder") and part is not None  # diffusers' names; SD3 may come without its third
        ]
        self._parked = False
        self._loaded: list[tuple[nn.Module, str, Tensor]] = []
        """Weights in host memory, as they were loaded, while copies are on the device."""

    def encode(self, prompts: Sequence[str], guided: bool | None = None) -> Cond:
        """Conditioning for each prompt; `guided` overrides the encoders' own setting, if there is one."""
        raise NotImplementedError

    def park(self) -> None:
        """Moves the encoders off the device."""
        self._parked = True
        self._move(CPU)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self._move(self.device)
        try:
            yield
        finally:
            if self._parked:
                self._move(CPU)

    def _move(self, device: torch.device) -> None:
        """Moves the encoders to `device`. Back on the CPU they have the weights that were loaded, which processes may share."""
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
    """Owner, name and value of all weights and buffers; weights are new objects with the same memory."""
    owners = [owner for module in modules for owner in module.modules()]
    found: list[tuple[nn.Module, str, Tensor]] = [
        (o, name, value) for o in owners for name, value in o._buffers.items() if value is not None
    ]
    kept: dict[int, Tensor] = {}  # by identity: modules may share an embedding
    for owner in owners:
        for name, weight in owner._parameters.items():
            if weight is not None:
                found.append((owner, name, kept.setdefault(id(weight), nn.Parameter(weight.data, False))))
    return found


class FluxText(TextEncoders):
    """CLIP's pooled embedding and T5's sequence of `max_sequence_length` tokens."""

    def __init__(self, pipeline: Any, *, dtype: torch.dtype, device: torch.device | str, max_sequence_length: int) -> None:
        super().__init__(pipeline, dtype=dtype, device=device)
        self.max_sequence_length = max_sequence_length

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], guided: bool | None = None) -> Cond:
        with self._at_work():
            sequence, pooled, _ = self.pipeline.encode_prompt(
                prompt=list(prompts), prompt_2=None, device=self.device, max_sequence_length=self.max_sequence_length
            )
        return Cond({"sequence": sequence, "pooled": pooled})


class SD3Text(TextEncoders):
    """Two CLIPs' and T5's tokens, and the CLIPs' pooled embeddings; with `guided` those of `negative_prompt` too."""

    def __init__(
        self,
        pipeline: Any,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_sequence_length: int,
        negative_prompt: str,
        guided: bool,
    ) -> None:
        super().__init__(pipeline, dtype=dtype, device=device)
        self.max_sequence_length = max_sequence_length
        self.negative_prompt, self.guided = negative_prompt, guided

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], guided: bool | None = None) -> Cond:
        guided = self.guided if guided is None else guided
        with self._at_work():
            sequence, negative_sequence, pooled, negative_pooled = self.pipeline.encode_prompt(
                prompt=list(prompts),
                prompt_2=None,
                prompt_3=None,
                negative_prompt=[self.negative_prompt] * len(prompts),
                do_classifier_free_guidance=guided,
                device=self.device,
                max_sequence_length=self.max_sequence_length,
            )
        tensors = {"sequence": sequence, "pooled": pooled}
        if guided:
            tensors |= {"negative_sequence": negative_sequence, "negative_pooled": negative_pooled}
        return Cond(tensors)
