"""List LIBERO's suites and tasks, and load their initial states.

They are read from its files, because its own module asks questions on stdin and imports torch.
"""

import importlib.util
import pickle
import re
import runpy
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from contracts import BadInput, undamaged
from envs.bddl import read_instruction

# Step limits, in env steps after settling: those of the published OpenVLA and OpenVLA-OFT evaluations.
MAX_ENV_STEPS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
PUBLISHED_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
# LIBERO-PRO and LIBERO-Plus change the tasks of the published suites. Their suites are named after suite and change:
# libero_spatial_swap, libero_goal_camera. "plus" stands for the four changes of LIBERO-Plus before it.
PRO_CHANGES = ("swap", "lan", "task", "object")
PLUS_CHANGES = ("camera", "robot", "language", "noise", "plus")
# The functions and classes that a pickled array may name.
ARRAY_NAMES = {"numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype", "_codecs.encode"}
# Initial states of a BDDL file that comes without stored ones: as many as a benchmark task has.
NUM_SAMPLED_INIT_STATES = 50


@dataclass(frozen=True)
class TaskFiles:
    """A task of LIBERO: its name, its instruction and the paths of its files."""

    name: str
    instruction: str
    bddl: Path
    init_states: Path | None  # None: a BDDL file without stored states; LIBERO's sampler places the objects

    @property
    def init_states_source(self) -> str:
        """Where the initial states come from, in words."""
        return "LIBERO's sampler places the objects" if self.init_states is None else str(self.init_states)


@cache
def libero_root() -> Path:
    """The folder `libero/libero` of the installed package, looked up without importing it.

    Raises BadInput if LIBERO is not installed.
    """
    spec = importlib.util.find_spec("libero")
    root = Path(spec.origin).parent / "libero" if spec and spec.origin else None
    if root is None or not (root / "bddl_files").is_dir():
        raise BadInput("LIBERO is not installed; run: pip install --no-deps -r requirements-simulator.txt")
    return root


def split_suite(task_suite: str) -> tuple[str, str]:
    """A suite's base and change: ("libero_goal", "swap") for libero_goal_swap. The change of a base itself is "".

    Raises BadInput for an unknown suite.
    """
    if task_suite in MAX_ENV_STEPS:
        return task_suite, ""
    base, _, change = task_suite.rpartition("_")
    if base not in PUBLISHED_SUITES or change not in PRO_CHANGES + PLUS_CHANGES:
        raise BadInput(
            f"unknown task suite {task_suite!r}; there are: {', '.join(MAX_ENV_STEPS)}; and the first "
            f"four with _{', _'.join(PRO_CHANGES)} (LIBERO-PRO) or _{', _'.join(PLUS_CHANGES)} (LIBERO-Plus, whose "
            "light, background and layout need meshes and textures that no package has)"
        )
    return base, change


@cache
def task_names(task_suite: str) -> tuple[str, ...]:
    """The names of a suite's tasks; a task id is an index into them. Raises BadInput for an unknown suite.

    A task that LIBERO-PRO or LIBERO-Plus changes keeps its name.
    """
    base, _ = split_suite(task_suite)
    task_map = runpy.run_path(str(libero_root() / "benchmark" / "libero_suite_task_map.py"))
    return tuple(task_map["libero_task_map"][base])


def task_name(task_suite: str, task_id: int) -> str:
    """The name of a task. Raises BadInput for an unknown suite or task."""
    names = task_names(task_suite)
    if task_id not in range(len(names)):
        known = ", ".join(f"{index} {name}" for index, name in enumerate(names))
        raise BadInput(f"{task_suite} has no task {task_id}; there are: {known}")
    return names[task_id]


def instruction_in(name: str) -> str:
    """The instruction that LIBERO's benchmark derives from the name of a task."""
    return re.sub(r"^[A-Z_]+SCENE\d+_", "", name).replace("_", " ")


def suite_task(task_suite: str, task_id: int) -> TaskFiles:
    """The files of a task of LIBERO's benchmark. For a suite of LIBERO-Plus they are those of the unchanged task."""
    name = task_name(task_suite, task_id)
    base, _ = split_suite(task_suite)
    bddl = libero_root() / "bddl_files" / base / f"{name}.bddl"
    init_states = libero_root() / "init_files" / base / f"{name}.pruned_init"
    return TaskFiles(name, instruction_in(name), bddl, init_states)


def bddl_task(bddl_file: str) -> TaskFiles:
    """The task of a user's BDDL file, with its stored initial states if there are any.

    They are in a file beside it, or where LIBERO and checkouts of LIBERO-PRO keep them: bddl_files/SUITE/NAME.bddl has
    init_files/SUITE/NAME.pruned_init. Raises BadInput for a file that is no task.
    """
    bddl = Path(bddl_file).absolute()
    instruction = read_instruction(bddl)
    folders = (bddl.parent, bddl.parent / "../../init_files" / bddl.parent.name)
    names = (f"{bddl.stem}.pruned_init", f"{bddl.stem}.pruned_init.npz")
    candidates = [(folder / name).resolve() for folder in folders for name in names]
    stored = next((candidate for candidate in candidates if candidate.is_file()), None)
    return TaskFiles(bddl.stem, instruction, bddl, stored)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles NumPy arrays and nothing else, so that a file cannot execute code.

    torch.load could read them, too, but importing torch costs a worker 2 s and 0.5 GB.
    """

    def find_class(self, module: str, name: str) -> object:
        if f"{module.replace('._core', '.core')}.{name}" not in ARRAY_NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a NumPy array")
        return super().find_class(module, name)


def load_init_states(path: Path) -> np.ndarray:
    """Read a file of initial states: (num_states, 1 + nq + nv) float64, a row of time, qpos and qvel for each.

    Two formats: torch.save's (.pruned_init), and numpy.savez's with the key "states" (.npz), which LIBERO-PRO uses.
    A file of LIBERO-Plus may hold a single row, without the table around it.
    Raises BadInput if the file holds anything else.
    """
    with undamaged(path):
        states = _read_array(path)
        if states.ndim == 1:
            states = states[np.newaxis]
        if states.dtype != np.float64 or states.ndim != 2 or not states.size or not np.isfinite(states).all():
            raise ValueError("it holds no table of finite float64 numbers")
    return states


def _read_array(path: Path) -> np.ndarray:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return arrays["states"]
    with zipfile.ZipFile(path) as archive:  # torch.save makes a zip file
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        return _ArrayUnpickler(archive.open(name)).load()
