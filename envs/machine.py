"""Find out what this process may use of its machine: CPU cores and main memory, also in a container or under Slurm."""

import math
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from contracts import GIB

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")  # names the cgroup that this process is in
MEMORY = Path("/proc/meminfo")


@cache
def usable_cores() -> int:
    """The number of CPU cores that this process may use: those of its affinity, or fewer by its cgroups' quotas."""
    quotas = map(_cpu_quota, _cgroups("cpu"))
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def free_main_memory() -> float:
    """GiB of main memory that this process may still take, by the kernel's estimate and by its cgroups' limits."""
    available_kib = re.findall(r"MemAvailable:\s+(\d+)", MEMORY.read_text())[0]
    left_bytes = map(_memory_left, _cgroups("memory"))
    return min([int(available_kib) * 1024, *left_bytes]) / GIB


def _cgroups(controller: str) -> Iterator[Path]:
    """Folders of the cgroups that this process is in: its own, and all above it.

    Version 2 has one tree for all controllers, version 1 one for each. A container may see only the upper part of the
    path.
    """
    for line in (_read(MEMBERSHIP) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = CGROUPS / controllers
            folder = root / path.lstrip("/")
            yield from [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _cpu_quota(cgroup: Path) -> float:
    """How many cores' time a cgroup may use; infinity without a limit."""
    limit = _read(cgroup / "cpu.max")  # "QUOTA PERIOD" in microseconds, or "max PERIOD"
    if limit is None:  # version 1, where -1 is no limit
        limit = f"{_read(cgroup / 'cpu.cfs_quota_us') or -1} {_read(cgroup / 'cpu.cfs_period_us')}"
    quota, period = limit.split()
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)


def _memory_left(cgroup: Path) -> float:
    """Bytes that a cgroup may still take; infinity without a limit. Cached files count as free, as in MemAvailable."""
    limit = _read(cgroup / "memory.max") or _read(cgroup / "memory.limit_in_bytes")
    usage = _read(cgroup / "memory.current") or _read(cgroup / "memory.usage_in_bytes")
    if limit is None or limit == "max" or usage is None:
        return math.inf
    statistics = _read(cgroup / "memory.stat") or ""
    cached = re.findall(r"^(?:total_)?inactive_file (\d+)", statistics, flags=re.MULTILINE)
    return int(limit) - int(usage) + max(map(int, cached), default=0)


def _read(path: Path) -> str | None:
    """The content of a small file, or None if it does not exist or may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
