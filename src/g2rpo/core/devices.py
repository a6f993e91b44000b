"""Accelerators of any kind, through torch's module for them, such as torch.cuda."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from g2rpo.core.errors import UserError


def accelerator(device: torch.device) -> Any:
    """torch's module for `device`, None for a CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def same_device(device: torch.device) -> Callable[[], None]:
    """A thread initializer that sets the current device of this thread, so that "cuda" without an
    index means the same device.

    CUDA's current device is a property of the thread; new threads start with device 0.
    """
    module = accelerator(device)
    if module is None or module.device_count() < 2:
        return lambda: None
    return partial(module.set_device, module.current_device())


def measures_memory(device: torch.device) -> bool:
    """Whether torch tells the memory of `device`: what is free, and the peak. It does not for
    Apple's GPUs."""
    return hasattr(accelerator(device), "max_memory_allocated")


def name_of_device(device: torch.device) -> str:
    """What torch calls an accelerator; torch has no names for Apple's GPUs."""
    named = getattr(accelerator(device), "get_device_name", None)
    return f"{device.type} device" if named is None else str(named(device))


def empty_cache() -> None:
    """Empties torch's cache of accelerator memory, if there is an accelerator."""
    device = torch.accelerator.current_accelerator()
    if device is not None:
        torch.get_device_module(device).empty_cache()


def pick_device(name: str, key: str = "policy.device") -> str:
    """The device `name`, the value of a config's `key`; "auto" is a GPU if there is one, "cuda" the
    GPU of the local rank.

    UserError for a device that torch or this machine lacks.
    """
    if name == "auto":
        # mps is asked for: nobody has measured it yet
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(
            f"{key}={name}: is no device; write cpu, cuda, cuda:1, mps or, for policy.device, auto"
        ) from None
    sees, without = f"{key}={name}: torch sees", f"{key}=cpu needs none"
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"{sees} no GPU of Apple's here; {without}")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        auto = "policy.device=auto takes what there is"
        raise UserError(
            f"{sees} {count} CUDA devices here; {auto if key == 'policy.device' else without}"
        )
    return name
