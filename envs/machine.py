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
    quotas = map(_cpu_quota, _cgroups())
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def free_main_memory() -> float:
    """GiB of main memory that this process may still take, by the kernel's estimate and by its cgroups' limits."""
    available_kib = re.findall(r"MemAvailable:\s+(\d+)", MEMORY.read_text())[0]
    left_bytes = map(_memory_left, _cgroups())
    return min([int(available_kib) * 1024, *left_bytes]) / GIB


def _cgroups() -> Iterator[Path]:
    """Folders of the cgroups (version 2) that this process is in: its own, and all above it.

    A container may see only the upper part of the path.
    """
    membership = re.search(r"^0::/(.*)$", _read(MEMBERSHIP) or "", flags=re.MULTILINE)
    if membership is None:
        return
    folder = CGROUPS / membership[1]
    yield folder
    for parent in folder.parents:
        if parent.is_relative_to(CGROUPS):
            yield parent


def _cpu_quota(cgroup: Path) -> float:
    """How many cores' time a cgroup may use; infinity without a limit."""
    limit = _read(cgroup / "cpu.max")  # "QUOTA PERIOD" in microseconds, or "max PERIOD"
    if limit is None or limit.startswith("max"):
        return math.inf
    quota, period = limit.split()
    return int(quota) / int(period)


def _memory_left(cgroup: Path) -> float:
    """Bytes that a cgroup may still take; infinity without a limit. Cached files count as free, as in MemAvailable."""
    limit = _read(cgroup / "memory.max")
    usage = _read(cgroup / "memory.current")
    if limit is None or limit == "max" or usage is None:
        return math.inf
    cached = re.search(r"^inactive_file (\d+)", _read(cgroup / "memory.stat") or "", flags=re.MULTILINE)
    return int(limit) - int(usage) + (int(cached[1]) if cached else 0)


def _read(path: Path) -> str | None:
    """The content of a small file, or None if it does not exist or may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
