"""Text encoders of a diffusers pipeline, used before the transformer is on the device, and how much
of a prompt they read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from g2rpo.core.data import Cond
from g2rpo.core.devices import empty_cache
from g2rpo.core.errors import counted, cut
from g2rpo.core.images import read_inputs
from g2rpo.models.offload import frozen_in
from g2rpo.models.options import PolicyConfig
from g2rpo.models.pipelines import cast
from g2rpo.models.replay import Caught, NetworkCall, OneStep, Pictures, Script, guiding, replay
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
        self._loaded: list[tuple[dict[str, Any], str, Tensor]] = []
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
        parts = parts_of(self.pipeline, spec, guided)
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
            for table, name, weight in self._loaded:
                table[name] = weight
            self._loaded = []
        elif not self._loaded:
            self._loaded = list(_tensors(self.modules))
        for module in self.modules:
            module.to(device)
        if device == CPU:
            empty_cache()


def parts_of(pipeline: Any, spec: PipelineSpec, guided: bool) -> dict[str, Any]:
    """Parts in place of the pipeline's own while it encodes prompts."""
    parts: dict[str, Any] = {"scheduler": OneStep(pipeline.scheduler.config, None)}
    if spec.guider:  # it decides whether there is a negative prompt
        parts["guider"] = guiding(pipeline.guider, spec.guidance, guided)
    return parts


def _tensors(modules: Sequence[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Table, name and value of all weights and buffers; weights are new objects with the same
    memory."""
    kept: dict[int, Tensor] = {}  # by identity: modules may share an embedding
    for module in modules:
        for table, name, value in frozen_in(module):
            if isinstance(value, nn.Parameter):
                value = kept.setdefault(id(value), nn.Parameter(value.data, False))
            yield table, name, value


FILLER_WORD, FILLER_WORDS = "a ", 6000
"""A prompt longer than any that is read: policy.max_sequence_length is at most 4096."""
SHOWN_LETTERS = 60
"""Letters that are shown of a prompt, and of what is left out of it."""


class Answer:
    """A text encoder's answer, [1, tokens, width], in the place of hidden states of any layer."""

    def __init__(self, hidden: Tensor, projected: bool = False) -> None:
        self.last_hidden_state = hidden
        self.hidden_states = (hidden,) * 200
        self.pooler_output = self.text_embeds = hidden[:, 0]
        self._first = self.text_embeds if projected else hidden

    def __getitem__(self, index: int) -> Tensor:
        return self._first


class _Reader:
    """A text encoder as a pipeline calls it, which computes nothing: it counts how many of its
    `tokens` it is given in a row, and answers with 1 for each, as CLIP with 0, for pipelines append
    its answer to another one's."""

    def __init__(self, encoder: Any, tokens: set[int]) -> None:
        self._encoder, self._tokens = encoder, tokens
        self.clip = "CLIP" in type(encoder).__name__
        self.given: int | None = None

    def __call__(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Answer:
        own = [token in self._tokens for token in input_ids[0].tolist()]
        run, self.given = 0, 0
        for known in own:
            run = run + 1 if known else 0
            self.given = max(self.given, run)
        marks = torch.tensor(own).float()[None, :, None]
        projected = "Projection" in type(self._encoder).__name__
        return Answer(0 * marks if self.clip else marks, projected)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)


def tokens_read(text: TextEncoders, like: str = "") -> dict[str, int]:
    """How many tokens of a prompt each text encoder reads, beside those of templates and special
    ones: found by the pipeline's own call with a long prompt. A model that edits gets the pictures
    of the prompt `like`."""
    pipeline, spec = text.pipeline, text.spec
    readers = {
        name: _Reader(getattr(pipeline, name), {*_tokens(text, name, [FILLER_WORD * 3])[0]})
        for name in text.names
    }

    def encode(own: NetworkCall) -> Any:
        raise Caught(own())

    arguments = spec.arguments(pipeline, text.options, rows=1, guided=False)
    arguments["prompt"] = [FILLER_WORD * FILLER_WORDS]
    if spec.pictured:
        pictures = read_inputs(like)
        arguments["image"] = pictures if spec.most_pictures > 1 else pictures[0]
    parts = {**readers, **parts_of(pipeline, spec, guided=False)}
    answer = replay(pipeline, Script(encode, encode), arguments, device="cpu", parts=parts)
    # some pipelines cut behind the encoder
    kept = int((answer[0][0].flatten(1) != 0).any(1).sum())
    return {
        name: reader.given if reader.clip or not kept else min(reader.given, kept)
        for name, reader in readers.items()
        if reader.given is not None
    }


def _tokens(text: TextEncoders, encoder: str, prompts: Sequence[str]) -> list[list[int]]:
    """The tokens of prompts for a text encoder, without special ones."""
    found: list[list[int]] = _tokenizer(text, encoder)(
        [str(prompt) for prompt in prompts], add_special_tokens=False
    )["input_ids"]
    return found


def _tokenizer(text: TextEncoders, encoder: str) -> Any:
    parts = text.pipeline.components
    made = parts.get(encoder.replace("text_encoder", "tokenizer")) or parts["processor"]
    return getattr(made, "tokenizer", made)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without warnings of libraries about the long prompt."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def warn_of_long(text: TextEncoders, prompts: Sequence[str], notify: Callable[[str], None]) -> None:
    """Tells of prompts of which a text encoder reads only the beginning: for each encoder how many
    there are, and one of them. The negative prompt, if there is one, is counted among them."""
    negative = text.options.negative_prompt if text.guided else None
    every = [prompt for prompt in dict.fromkeys(prompts) if prompt]
    every += [negative] if negative else []
    if not every:
        return
    try:
        with _quietly():
            read = tokens_read(text, every[0])
            made = {name: _tokens(text, name, every) for name in read}
    except Exception as error:  # of tokenizers and pipelines, which are the library's or the user's
        notify(f"whether prompts are longer than the text encoders read cannot be told ({error})")
        return
    for name, most in read.items():
        long = [
            (prompt, tokens[most:])
            for prompt, tokens in zip(every, made[name], strict=True)
            if len(tokens) > most
        ]
        if not long:
            continue
        prompt, left = long[0]
        words = _tokenizer(text, name).decode(left, skip_special_tokens=True).strip()
        further = [other for other in read if read[other] > most]
        beside = f", {further[0]} {read[further[0]]}" if further else ""
        are = "is" if len(long) == 1 else "are"
        notify(
            f"{len(long)} of {counted(len(every), 'prompt')} {are} longer than {name} reads ({counted(most, 'token')}"
            f"{beside}): of {cut(str(prompt), SHOWN_LETTERS)!r} it leaves out {cut(words, SHOWN_LETTERS)!r}"
        )
