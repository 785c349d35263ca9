"""Make the observations of a task on which a run's checks try its policy."""

from typing import NamedTuple

import numpy as np

from configs.sections import TaskConfig
from contracts import BadInput, Observation
from envs.env import EnvSpec, Start
from envs.perturb import MAGNITUDES, Kind, Perturbation
from envs.pool import Pool, task_info
from envs.tasks import task_names

OTHER_STARTS: tuple[Kind, ...] = ("position", "robot")  # moved objects, a moved arm
OTHER_SEED = 1  # the first observation's is 0


class FirstObservations(NamedTuple):
    """Observations of a run's first task, before any action."""

    first: Observation
    from_other_starts: list[Observation]  # with moved objects, and with a moved arm


def first_observations(pool: Pool, task: TaskConfig) -> FirstObservations:
    """Reset a simulator to the first task, several times.

    Raises BadInput if the first reset fails, or if none of 100 placements can be used. Another start in which the
    simulator fails, or that looks like the first one, is left out of `from_other_starts`.
    """
    first = _first_observation(pool, task)
    states = task.train_init_states
    last_state = states[1] - 1 if isinstance(states, tuple) else None
    from_other_starts = []
    for kind in OTHER_STARTS:
        perturbation = Perturbation(kind, MAGNITUDES[-1], OTHER_SEED)
        pool.reset(0, task.task_ids[0], Start(last_state, OTHER_SEED, perturbation=perturbation))
        ((_, result),) = pool.ready()
        other = result.observation
        if other is not None and not np.array_equal(other.images, first.images):
            from_other_starts.append(other)
    return FirstObservations(first, from_other_starts)


def first_init_state(task: TaskConfig) -> int | None:
    """The first initial state of training; None with --train-init-states fresh, where it is drawn."""
    states = task.train_init_states
    return states[0] if isinstance(states, tuple) else None


def _first_observation(pool: Pool, task: TaskConfig) -> Observation:
    """Reset a simulator to the first task and return its observation. Raises BadInput if the simulator fails."""
    pool.reset(0, task.task_ids[0], Start(first_init_state(task)))
    ((_, result),) = pool.ready()
    if result.observation is None:
        raise BadInput(
            f"the simulator failed at its first reset (task {task.task_ids[0]}: {result.error}): see the messages "
            "above; to repair the installation run: pip install --no-deps -r requirements-simulator.txt"
        )
    return result.observation


def instruction_of_another_task(task: TaskConfig) -> str | None:
    """The instruction of the suite's task after the run's first one, or None if the suite has no other task."""
    num_tasks = len(task_names(task.task_suite))
    if num_tasks == 1:
        return None
    next_task = (task.task_ids[0] + 1) % num_tasks
    return task_info(EnvSpec(task.task_suite, (next_task,), num_images=1))[0].instruction
