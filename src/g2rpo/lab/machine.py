"""What this process may use of its machine: in a container less than there is."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def memory(root: Path = Path("/")) -> int:
    """Bytes of memory: the machine's, or the smallest limit of the control groups that this process
    is in."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files = _files(root, "memory", "memory.max", "memory.limit_in_bytes")
    return min([machine, *(int(limit) for (limit,) in files if limit.isdecimal())])


def cores(root: Path = Path("/")) -> int:
    """The cores on which this process may run, at most as many as its control groups give it time
    of."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    times = _files(root, "cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    shares = [int(part[0]) / int(part[1]) for part in times if all(map(str.isdecimal, part))]
    return max(1, math.ceil(min([own, *shares])))


def _files(root: Path, controller: str, unified: str, *divided: str) -> Iterator[list[str]]:
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
