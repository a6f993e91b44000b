"""Accelerators of any kind, through torch's module for them, such as torch.cuda; and the memory and
cores that this process may use, in a container less than the machine has."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from g2rpo.core.errors import UserError, counted


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
            f"{sees} {counted(count, 'CUDA device')} here; {auto if key == 'policy.device' else without}"
        )
    return name


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes of memory: the machine's, or the smallest limit of the control groups that this process
    is in."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files = _files_of_groups(root, "memory", "memory.max", "memory.limit_in_bytes")
    return min([machine, *(int(limit) for (limit,) in files if limit.isdecimal())])


def usable_cores(root: Path = Path("/")) -> int:
    """The cores on which this process may run, at most as many as its control groups give it time
    of."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    times = _files_of_groups(root, "cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    shares = [int(part[0]) / int(part[1]) for part in times if all(map(str.isdecimal, part))]
    return max(1, math.ceil(min([own, *shares])))


def _files_of_groups(
    root: Path, controller: str, unified: str, *divided: str
) -> Iterator[list[str]]:
    """The words in the files of this process's control groups and of all above them: in `unified`
    of version 2, in `divided` of version 1. A container may see its own group as the highest."""
    with suppress(OSError):  # not on macOS
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, controllers, group = line.split(":", 2)
            if number != "0" and controller not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("" if number == "0" else controllers)
            inner = top / group.lstrip("/")
            for folder in (inner, *inner.parents):
                if not folder.is_relative_to(top):
                    break
                with suppress(OSError):  # the machine's own group has no limits
                    names = [unified] if number == "0" else divided
                    yield " ".join(
                        (folder / name).read_text(encoding="utf-8") for name in names
                    ).split()
