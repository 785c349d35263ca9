"""Record what is needed to repeat a run: its command, commit, package versions and machine."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from typing_extensions import TypedDict  # pydantic cannot read typing's in Python 3.10

from contracts import GIB


class GitState(TypedDict, total=False):
    """The commit of the program; empty if the program is not in a git checkout."""

    commit: str
    modified: bool  # whether files differ from the commit


class Machine(TypedDict):
    """Where the program runs."""

    system: str
    processor: str
    cpus: int | None
    gpus: list[str]  # names of the visible GPUs
    gpu_gib: list[float]  # memory of each visible GPU, in GiB


class Provenance(TypedDict):
    """What config.json and results files store of a process."""

    argv: list[str]  # the command line without the program's name
    git: GitState
    versions: dict[str, str]  # of Python and of every installed package
    machine: Machine


def provenance(argv: Sequence[str]) -> Provenance:
    """The provenance of this process."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "argv": list(argv),
        "git": git_state(),
        "versions": package_versions(),
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cpus": os.cpu_count(),
            "gpus": [gpu.name for gpu in gpus],
            "gpu_gib": [gpu.total_memory / GIB for gpu in gpus],
        },
    }


def git_state() -> GitState:
    """The commit of the program that runs, and whether files were changed since; empty if git cannot tell."""
    # --exclude=* ignores tags, so git prints the full commit, followed by "-dirty" if files differ.
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    folder = Path(__file__).parent
    try:
        finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}
    description = finished.stdout.strip()
    return {"commit": description.removesuffix("-dirty"), "modified": description.endswith("-dirty")}


def package_versions() -> dict[str, str]:
    """Version of Python and of every installed package, by name."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata  # this property reads and parses a file at every access
        if metadata["Name"] is not None:  # an interrupted pip may leave an empty folder
            versions.setdefault(metadata["Name"], metadata["Version"])  # of several, Python imports the first
    return {"python": platform.python_version(), **dict(sorted(versions.items()))}
