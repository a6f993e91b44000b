"""In a container the limits are those of its control groups, in both versions and nested."""

import os

import pytest

from g2rpo.core import devices

GIB = 2**30


def written(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


@pytest.mark.parametrize(
    ("files", "memory", "cores"),
    [
        ({}, None, 8),
        ({"proc/self/cgroup": "0::/"}, None, 8),
        (
            {
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/memory.max": GIB,
                "sys/fs/cgroup/cpu.max": "150000 100000",
            },
            GIB,
            2,
        ),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/memory.max": GIB,
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/cpu.max": "max 100000",
                "sys/fs/cgroup/a/b/cpu.max": "20000 100000",
            },
            GIB,
            1,
        ),
        ({"proc/self/cgroup": "0::/docker/not/seen", "sys/fs/cgroup/memory.max": GIB}, GIB, 8),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/d\n7:memory:/d/e\n1:name=systemd:/d",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
                "sys/fs/cgroup/memory/d/memory.limit_in_bytes": 2 * GIB,
                "sys/fs/cgroup/memory/d/e/memory.limit_in_bytes": 3 * GIB,
                "sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_quota_us": 300000,
                "sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_period_us": 100000,
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": -1,
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
            },
            2 * GIB,
            3,
        ),
    ],
)
def test_the_smallest_limit_counts(tmp_path, monkeypatch, files, memory, cores):
    """A plan for the machine's memory would be killed in its container."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    root = written(tmp_path, files)
    assert devices.usable_memory(root) == min(own, memory or own)
    assert devices.usable_cores(root) == cores
