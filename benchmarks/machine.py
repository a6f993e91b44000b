"""What a benchmark ran on, and how fast this machine multiplies matrices."""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from g2rpo.core.devices import accelerator


def describe(device: torch.device) -> dict[str, Any]:
    """Names and counts for a results file."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        cpu = next(
            (
                line.partition(":")[2].strip()
                for line in info.read_text().splitlines()
                if line.startswith("model name")
            ),
            cpu,
        )
    return {
        "device": module.get_device_name(device) if (module := accelerator(device)) else cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def matmul_rate(
    dtype: torch.dtype,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    seconds: float = 2.0,
) -> float:
    """FLOP/s of a square matrix product in `dtype`: the best of many, each of them 2 size^3
    operations."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, ends = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < ends:
        _wait(device)
        began = clock()
        a @ b
        _wait(device)
        best = min(best, clock() - began)
    return 2 * size**3 / best


def peak_bytes(device: torch.device) -> int:
    """The most memory in use so far: of the device, or of this process where that is the CPU."""
    if (module := accelerator(device)) is not None:
        return module.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _wait(device: torch.device) -> None:
    if (module := accelerator(device)) is not None:
        module.synchronize(device)
