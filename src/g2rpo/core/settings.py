"""torch's settings of the whole process, which code from outside may leave changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

log = logging.getLogger(__name__)


@cache
def _settings() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How each is read and set, by its name."""
    import torch

    cudnn = torch.backends.cudnn
    return {
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        # without one torch asks no code of Python's for the device of a new tensor
        "default device": (
            torch.get_default_device,
            lambda device: torch.set_default_device(None if device.type == "cpu" else device),
        ),
        "grad mode": (torch.is_grad_enabled, torch._C._set_grad_enabled),
        "number of threads": (torch.get_num_threads, torch.set_num_threads),
        "deterministic mode": (
            torch.get_deterministic_debug_mode,
            torch.set_deterministic_debug_mode,
        ),
        "precision of products": (
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        **{
            f"cudnn.{name}": (partial(getattr, cudnn, name), partial(setattr, cudnn, name))
            for name in ("enabled", "benchmark", "deterministic")
        },
    }


@contextmanager
def keeping_settings(who: str) -> Iterator[None]:
    """Sets back what the code inside leaves changed, and says so once: the run would compute
    otherwise. Random numbers are not among them: g2rpo's are from generators of their own."""
    before = {name: get() for name, (get, _) in _settings().items()}
    try:
        yield
    finally:
        for name, (get, put) in _settings().items():
            if (left := get()) != before[name]:
                put(before[name])
                _say(f"{who} left torch's {name} at {left}; it is {before[name]} again")


@cache
def _say(message: str) -> None:
    log.warning("%s", message)
