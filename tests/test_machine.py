"""What a process may use of its machine: limits of containers and of batch systems count."""

import os
from pathlib import Path

import pytest

from contracts import GIB
from envs import machine
from envs.machine import free_main_memory, usable_cores


@pytest.fixture
def limits(tmp_path, monkeypatch):
    """Sets the limits of this process: 16 cores by affinity, 30 GiB free by the kernel, and cgroups of given files."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroups")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text(f"MemFree: 1 kB\nMemAvailable:   {30 * 2**20} kB\n")

    def set_limits(membership: str, files: dict[str, str]) -> None:
        (tmp_path / "membership").write_text(membership)
        for name, content in files.items():
            path = Path(tmp_path, "cgroups", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    usable_cores.cache_clear()
    yield set_limits
    usable_cores.cache_clear()


VERSION_2 = {
    "slice/job/cpu.max": "max 100000\n",
    "slice/cpu.max": "400000 100000\n",
    "slice/memory.max": str(16 * GIB),
    "slice/memory.current": str(10 * GIB),
    "slice/memory.stat": f"anon 7\ninactive_file {3 * GIB}\n",
}
VERSION_1 = {
    "cpu,cpuacct/cpu.cfs_quota_us": "300000",
    "cpu,cpuacct/cpu.cfs_period_us": "100000",
    "cpu,cpuacct/job/cpu.cfs_quota_us": "-1",
    "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
    "memory/job/memory.limit_in_bytes": str(16 * GIB),
    "memory/job/memory.usage_in_bytes": str(10 * GIB),
    "memory/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {2 * GIB}\n",
}


@pytest.mark.parametrize(
    ("membership", "files", "cores", "gib"),
    [
        ("", {}, 16, 30),
        ("0::/slice/job\n", VERSION_2, 4, 9),
        ("0::/slice/job\n", {"cpu.max": "50000 100000\n"}, 1, 30),  # a container sees only a part of the path
        ("4:cpu,cpuacct:/job\n5:memory:/job\n0::/\n", VERSION_1, 3, 8),
    ],
)
def test_cores_and_free_memory_are_the_machines_or_fewer_by_a_limit(limits, membership, files, cores, gib):
    """Cached files in a limited memory count as free."""
    limits(membership, files)
    assert usable_cores() == cores
    assert free_main_memory() == pytest.approx(gib)
