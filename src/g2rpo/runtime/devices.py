"""What code does with an accelerator whatever its kind: through torch's module for it, such as torch.cuda."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def accelerator(device: torch.device) -> Any:
    """torch's module for `device`, None for a CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def same_device(device: torch.device) -> Callable[[], None]:
    """An initializer for threads, by which "cuda" without an index is there the device that it is in this thread.

    CUDA's current device belongs to the thread, and a new thread begins with device 0 whatever its process works on.
    """
    module = accelerator(device)
    if module is None or module.device_count() < 2:
        return lambda: None
    return partial(module.set_device, module.current_device())


def empty_cache() -> None:
    """Gives back to the accelerator, if there is one, what torch keeps of its memory for later tensors."""
    device = torch.accelerator.current_accelerator()
    if device is not None:
        torch.get_device_module(device).empty_cache()
