"""Which episodes an evaluation consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from errors import BadInput
from rl.trajectory import Episode

# Strides of episode numbers: above the number of tasks of any suite (90) and of initial states of any task.
TASK_STRIDE, STATE_STRIDE = 100, 10_000


class Key(NamedTuple):
    """What makes two episodes of two evaluations a pair."""

    task_suite: str
    task_id: int
    init_state_id: int
    repeat: int  # 0, unless there are more trials than initial states


@dataclass(frozen=True)
class Task:
    """A task of a suite, or one of the user's own."""

    task_suite: str
    task_id: int
    name: str
    instruction: str
    max_env_steps: int
    num_init_states: int


@dataclass(frozen=True)
class Plan:
    """What is to be played, in this order, and what stands in the results file beside the results."""

    tasks: Sequence[Task]
    keys: Sequence[Key]
    head: Mapping[str, Any]  # protocol, command line, versions

    @property
    def suites(self) -> list[str]:
        return list(dict.fromkeys(task.task_suite for task in self.tasks))


def make_plan(tasks: Sequence[Task], trials: int, first_init_state: int, head: Mapping[str, Any]) -> Plan:
    """Trial i starts from initial state `first_init_state` + i; after the last state it starts over with the first.

    Trial i of every task of a suite comes before trial i + 1 of any: a look at an unfinished file covers all tasks.
    Raises BadInput when a task has no such initial state.
    """
    keys = []
    for suite in dict.fromkeys(task.task_suite for task in tasks):
        for trial in range(trials):
            for task in tasks:
                if task.task_suite == suite:
                    repeat, offset = divmod(trial, _states(task, first_init_state))
                    keys.append(Key(suite, task.task_id, first_init_state + offset, repeat))
    return Plan(tasks, keys, head)


def episode_of(key: Key) -> Episode:
    """The episode to play. Its number, and with it its random stream, is a function of the key alone."""
    index = (key.repeat * STATE_STRIDE + key.init_state_id) * TASK_STRIDE + key.task_id
    return Episode(index, key.task_id, key.init_state_id, group=index)


def _states(task: Task, first: int) -> int:
    if first >= task.num_init_states:
        raise BadInput(
            f"--first-init-state {first}: {task.task_suite} task {task.task_id} has only {task.num_init_states} of them"
        )
    return task.num_init_states - first
