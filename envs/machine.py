"""Find out what this process may use of its machine: CPU cores and main memory, also in a container or under Slurm."""

import math
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from contracts import GIB

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")  # names the cgroups that this process is in
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
    """Folders of the cgroups that may limit this process's use of a controller ("cpu" or "memory").

    In version 1 of cgroups each controller has a tree of its own. In version 2 all share one tree, whose line in
    MEMBERSHIP is `0::PATH`. A container may see only the upper part of PATH, so all folders above it are tried, too.
    """
    if not MEMBERSHIP.is_file():
        return
    for line in MEMBERSHIP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tree = CGROUPS
        elif controller in controllers.split(","):
            tree = CGROUPS / controllers
        else:
            continue
        folder = tree / path.strip("/")
        yield folder
        for parent in folder.parents:
            if parent.is_relative_to(tree):
                yield parent


def _cpu_quota(cgroup: Path) -> float:
    """How many cores' time a cgroup may use; infinity without a limit."""
    version_2 = _read(cgroup / "cpu.max")  # "QUOTA PERIOD" in microseconds, or "max PERIOD"
    if version_2 is not None:
        quota, period = version_2.split()
        return math.inf if quota == "max" else int(quota) / int(period)
    quota_us = _read(cgroup / "cpu.cfs_quota_us")  # -1 without a limit
    period_us = _read(cgroup / "cpu.cfs_period_us")
    if quota_us is None or period_us is None or int(quota_us) < 0:
        return math.inf
    return int(quota_us) / int(period_us)


def _memory_left(cgroup: Path) -> float:
    """Bytes that a cgroup may still take; infinity without a limit. Cached files count as free, as in MemAvailable."""
    for limit_file, usage_file, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _read(cgroup / limit_file)
        usage = _read(cgroup / usage_file)
        if limit is not None and usage is not None and limit != "max":
            statistics = _read(cgroup / "memory.stat") or ""
            cached_bytes = re.findall(rf"^{cached} (\d+)", statistics, flags=re.MULTILINE)
            return int(limit) - int(usage) + (int(cached_bytes[0]) if cached_bytes else 0)
    return math.inf


def _read(path: Path) -> str | None:
    """The content of a small file, or None if it does not exist or may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
