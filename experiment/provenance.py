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
from envs.libero_imports import simulator_versions
from vla.device import count_gpus


class Provenance(TypedDict):
    """What config.json and results files store of a process."""

    argv: list[str]  # the command line without the program's name
    git: dict[str, str | bool]  # see `git_state`
    versions: dict[str, str]  # of Python and of every installed package
    machine: dict[str, object]  # system, number of CPUs, and each visible GPU's name and memory in GiB


def provenance(argv: Sequence[str]) -> Provenance:
    """The provenance of this process."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(count_gpus())]
    machine: dict[str, object] = {
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [gpu.name for gpu in gpus],
        "gpu_gib": [gpu.total_memory / GIB for gpu in gpus],
    }
    return {"argv": list(argv), "git": git_state(), "versions": package_versions(), "machine": machine}


def git_state() -> dict[str, str | bool]:
    """The `commit` of the program, and whether its files are `modified`; empty if git cannot tell."""
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
    installed = [distribution.metadata for distribution in importlib.metadata.distributions()]
    # Of several with one name Python imports the first. A broken installation may have none.
    versions = {metadata["Name"]: metadata["Version"] for metadata in reversed(installed) if metadata["Name"]}
    return {"python": platform.python_version(), **dict(sorted(versions.items()))}


def simulator_packages() -> str:
    """The packages that simulate and draw, with their versions: others would give other results."""
    return ", ".join(f"{package} {version}" for package, version in simulator_versions().items())
