"""In a container the limits are those of its control groups, in both versions and nested."""

import os

import pytest

from g2rpo.core import devices

GIB = 2**30
LIMITS = """

proc/self/cgroup 0::/

proc/self/cgroup 0::/
sys/fs/cgroup/memory.max 1073741824
sys/fs/cgroup/cpu.max 150000 100000

proc/self/cgroup 0::/a/b
sys/fs/cgroup/a/memory.max 1073741824
sys/fs/cgroup/a/b/memory.max max
sys/fs/cgroup/a/cpu.max max 100000
sys/fs/cgroup/a/b/cpu.max 20000 100000

proc/self/cgroup 0::/docker/not/seen
sys/fs/cgroup/memory.max 1073741824

proc/self/cgroup 5:cpu,cpuacct:/d;7:memory:/d/e;1:name=systemd:/d
sys/fs/cgroup/memory/memory.limit_in_bytes 9223372036854771712
sys/fs/cgroup/memory/d/memory.limit_in_bytes 2147483648
sys/fs/cgroup/memory/d/e/memory.limit_in_bytes 3221225472
sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_quota_us 300000
sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_period_us 100000
sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us -1
sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us 100000
"""
"""Files of a machine and what they hold, ; for the end of a line."""
MEANT = [(None, 8), (None, 8), (GIB, 2), (GIB, 1), (GIB, 8), (2 * GIB, 3)]


@pytest.mark.parametrize(
    ("files", "limits"), zip(LIMITS.split("\n\n"), MEANT, strict=True), ids=str
)
def test_the_smallest_limit_counts(tmp_path, monkeypatch, files, limits):
    """A plan for the machine's memory would be killed in its container."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name, content in (line.split(" ", 1) for line in files.splitlines() if line):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content.replace(";", "\n") + "\n")
    memory, cores = limits
    assert devices.usable_memory(tmp_path) == min(own, memory or own)
    assert devices.usable_cores(tmp_path) == cores
