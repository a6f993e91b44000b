"""A diffusers pipeline's own `__call__`, run for one of its parts.

Packing, position ids, scaling of time, guidance, renormalisation and signs are in the pipeline's
`__call__`, which is used unchanged. With a scheduler of one step it computes velocity(x, sigma,
cond); with a scheduler without steps it decodes; stopped after `prepare_latents` it draws noise;
with its own scheduler it computes sigmas.
"""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from g2rpo.core.errors import UserError
from g2rpo.core.noise import in_float64

NetworkCall = Callable[..., Any]

ONE_TIME = (
    "the call takes one time for all rows: the PipelineSpec needs one_time=lambda pipeline: True"
)


class Caught(BaseException):
    """Ends a pipeline's call early; `value` is the result. No Exception: diffusers logs those."""

    def __init__(self, value: Any) -> None:
        super().__init__("a pipeline's call was ended on purpose")
        self.value = value


class Times:
    """A time for each of B rows, where a pipeline expects one for all.

    Pipelines scale a time and expand it to the network's rows: B, or a multiple of B if they stack
    guided rows.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def expand(self, size: int) -> Tensor:
        return self.rows.repeat(size // len(self.rows))

    def __truediv__(self, by: float) -> Times:
        return Times(self.rows / by)

    def __rsub__(self, by: float) -> Times:
        return Times(by - self.rows)


class OneStep:
    """A scheduler whose only step begins at `sigma` [B] and raises `Caught` with the velocity; with
    None it has no step.

    `truncate` rounds times down to whole thousandths. A pipeline that names its times besides its
    sigmas feeds the network times that are not shifted (CogView4): they are recovered from `sigma`
    by the shift's inverse.
    """

    order = 1
    init_noise_sigma = 1.0

    def __init__(
        self,
        config: Any,
        sigma: Tensor | None,
        *,
        truncate: bool = False,
        alike: bool = False,
    ) -> None:
        self.config, self._sigma = config, sigma
        self._truncate, self._alike = truncate, alike
        self.timesteps: list[Any] = []
        self.sigmas = [1.0, 0.0]

    def set_timesteps(
        self,
        num_inference_steps: Any = None,
        device: Any = None,
        sigmas: Any = None,
        mu: Any = None,
        timesteps: Any = None,
    ) -> None:
        if self._sigma is None:
            return
        most = self.config.num_train_timesteps
        times = self._sigma * most
        # whole numbers: rounding to 1/64 removes the float32 error of sigma
        if timesteps is not None:
            times = (64 * most * unshifted(in_float64(self._sigma), mu, self.config)).round().to(
                times
            ) / 64
        times = times.floor() if self._truncate else times
        self.timesteps = [times[0] if self._alike else Times(times)]

    def set_begin_index(self, index: int = 0) -> None:
        pass

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
        return sample

    def step(
        self, model_output: Tensor, timestep: Any, sample: Tensor, return_dict: bool = True
    ) -> Any:
        raise Caught(model_output)


def unshifted(sigma: Tensor, mu: float | None, config: Mapping[str, Any]) -> Tensor:
    """The u in [0, 1] that a flow scheduler with this config shifts to `sigma`."""
    shift = config["shift"]
    if config["use_dynamic_shifting"]:
        assert mu is not None
        shift = math.exp(mu) if config["time_shift_type"] == "exponential" else mu
    return sigma / (sigma + shift * (1 - sigma))


def probe(scheduler: Any) -> Any:
    """A copy of `scheduler` whose `set_timesteps` raises `Caught` with the sigmas."""
    copied = copy.copy(scheduler)
    setting = copied.set_timesteps

    @functools.wraps(setting)  # pipelines look at its signature
    def caught(*args: Any, **kwargs: Any) -> None:
        setting(*args, **kwargs)
        raise Caught(copied.sigmas)

    copied.set_timesteps = caught
    return copied


class ReplayedNetwork:
    """`transformer` as a pipeline calls it: it computes in `dtype` and returns float32, so that
    guidance is float32.

    `detach_negative`: no gradient for the first half of a call's rows, which are the negative
    prompts' if a pipeline stacks both.
    """

    def __init__(
        self, transformer: Any, dtype: torch.dtype, autocast: bool, detach_negative: bool = False
    ) -> None:
        self._transformer, self.dtype = transformer, dtype
        self._autocast, self._detach = autocast, detach_negative

    def __call__(self, hidden_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        x = hidden_states.to(self.dtype) if isinstance(hidden_states, Tensor) else hidden_states
        device = x.device.type if isinstance(x, Tensor) else x[0].device.type
        with torch.autocast(device, self.dtype, enabled=self._autocast):
            answer = self._transformer(x, *args, **kwargs)[0]
        if self._detach:
            without, toward = answer.chunk(2)
            answer = torch.cat([without.detach(), toward])
        return (
            answer.float() if isinstance(answer, Tensor) else [each.float() for each in answer],
        )

    def cache_context(self, name: str, **options: Any) -> AbstractContextManager[None]:
        """Nothing is cached from step to step: a velocity is a function of its arguments."""
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transformer, name)


_VIDEO = threading.Lock()
"""One call at a time: VAEs of videos store the state of a call in attributes."""


class Pictures:
    """`vae` as a pipeline calls it: latents and pictures outside are float32, whatever dtype it
    computes in.

    `published` is how the published code of G2RPO decodes: a bfloat16 VAE under autocast, which on
    a GPU computes its norms in float32, and pictures that stay bfloat16 until they are scaled to
    [0, 1].
    """

    dtype = torch.float32

    def __init__(self, vae: Any, published: bool = False) -> None:
        self._vae, self._published = vae, published

    def decode(self, latents: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor]:
        dtype = self._vae.dtype
        # torch has none for the meta device
        autocast = self._published and dtype != torch.float32 and not latents.is_meta
        with _VIDEO, torch.autocast(latents.device.type, dtype) if autocast else nullcontext():
            pictures = self._vae.decode(latents.to(dtype), *args, **kwargs)[0]
        # infinity becomes NaN, which pipelines do not clamp to white
        if not pictures.requires_grad:
            pictures.nan_to_num_(torch.nan, torch.nan, torch.nan)
        return (pictures if self._published else pictures.float(),)

    def encode(self, pictures: Tensor) -> Any:
        with _VIDEO:
            return self._vae.encode(pictures.to(self._vae.dtype))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vae, name)


def opaque(pictures: Tensor) -> Tensor:
    """Pictures [..., 3, H, W] on white, of those with transparency."""
    if pictures.shape[-3] == 3:
        return pictures
    colours, alpha = pictures.split([3, 1], -3)
    return alpha * colours + (1 - alpha)


@dataclass(frozen=True)
class Unseen:
    """A stand-in for an input picture that is already encoded: pipelines read its width and
    height."""

    size: tuple[int, int]

    def unsqueeze(self, dim: int) -> Unseen:
        return self


class UnseenProcessor:
    """A pipeline's image processor that returns `Unseen` pictures unchanged."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def resize(self, picture: Unseen, *size: Any) -> Unseen:
        return picture

    preprocess = resize

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


@dataclass(frozen=True)
class Script:
    """Replacements of `encode_prompt` and `prepare_latents`; each is called with the pipeline's own
    method, arguments bound."""

    encode: Callable[[NetworkCall], Any]
    latents: Callable[[NetworkCall], Any]


def guiding(guider: Any, scale: float, guided: bool) -> Any:
    """A copy of a pipeline's guider with another scale; guiders keep the state of a call."""
    copied = copy.copy(guider)
    copied.guidance_scale, copied._enabled = scale, guided
    return copied


class _NoBar:
    def update(self) -> None:
        pass


@functools.cache
def _replaying(kind: Any) -> Any:
    """A subclass of a pipeline's class that uses a `script`; UserError for one whose call has no
    parts to replace."""
    lacks = [name for name in ("encode_prompt", "prepare_latents") if not hasattr(kind, name)]
    if lacks:
        raise UserError(
            f"{kind.__name__}: has no method {' and no '.join(lacks)}, so no PipelineSpec can describe it"
        )

    class Replaying(kind):
        @property
        def _execution_device(self) -> Any:
            return self.__dict__["replay_device"]

        device = _execution_device

        def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
            return self.__dict__["script"].encode(
                functools.partial(super().encode_prompt, *args, **kwargs)
            )

        def prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
            return self.__dict__["script"].latents(
                functools.partial(super().prepare_latents, *args, **kwargs)
            )

        @contextmanager
        def progress_bar(self, *args: Any, **kwargs: Any) -> Iterator[_NoBar]:
            yield _NoBar()

        def maybe_free_model_hooks(self) -> None:
            pass

    return Replaying


def replay(
    pipeline: Any,
    script: Script,
    arguments: Mapping[str, Any],
    *,
    device: Any,
    parts: Mapping[str, Any],
) -> Any:
    """The result of `pipeline(**arguments)`, or the value of a `Caught`; `parts` replace the
    pipeline's own.

    Gradients stay enabled. The call runs on a shallow copy, because pipelines store the state of a
    call in attributes; so calls of several threads are independent.
    """
    kind: Any = type(pipeline)
    copied: Any = object.__new__(_replaying(kind))
    copied.__dict__.update({**vars(pipeline), **parts, "script": script, "replay_device": device})
    call = getattr(kind, "replayed", kind.__call__)  # of blocks
    try:
        return getattr(call, "__wrapped__", call)(copied, **arguments)
    except Caught as caught:
        return caught.value
    except NameError as error:  # diffusers imports an optional library only where it is installed
        raise UserError(
            f"{kind.__name__}: needs {error.name}, which is not installed: pip install {error.name}"
        ) from error
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if Times.__name__ not in str(error):
            raise
        raise UserError(f"{kind.__name__}: {ONE_TIME}") from error


def expanded(value: Any, rows: int) -> Any:
    """A tensor of one row, expanded to `rows`; anything else is shared by all rows."""
    return (
        value.expand(rows, *value.shape[1:])
        if isinstance(value, Tensor) and len(value) == 1
        else value
    )


def rows_alike(keys: Sequence[Any]) -> list[list[int]]:
    """Row indices grouped by equal keys, in order of first appearance."""
    groups: dict[Any, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return list(groups.values())
