"""Accelerators of any kind, through torch's module for them, such as torch.cuda."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


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
