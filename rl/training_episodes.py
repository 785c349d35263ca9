"""Which episodes a rollout plays, in which order; the curriculum over tasks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from configs.config import TrainConfig
from rl.randomness import seed_sequence
from rl.trajectory import Episode

# Temperature of the softmax in `task_probabilities`: a smaller one prefers success rates near 0.5 more strongly.
PREFERENCE_TEMPERATURE = 0.2
# Share of the episodes that is spread evenly, so that mastered and hopeless tasks are tried again.
FLOOR = 0.2
# Success rate that is assumed of a task not played yet: the one that is preferred most.
UNKNOWN = 0.5


@dataclass(frozen=True)
class TrainingEpisodes:
    """The endless episodes of one update: groups of `group_size` with one task and initial state each.

    They depend on the fields alone, and every iteration begins with the first episode. With --train-init-states FIRST
    END the groups of a task go through the benchmark's initial states, each time in another order. The next rollout
    goes on after the last group that any rank has played: groups that a slower rank did not reach are left out. With
    `fresh` every group has a newly sampled initial state.
    """

    config: TrainConfig
    update_index: int
    groups_drawn: Mapping[int, int]  # task id -> number of its groups in earlier updates
    task_probabilities: Mapping[int, float] | None = None  # None: tasks take turns

    def __iter__(self) -> Iterator[Episode]:
        rng = np.random.default_rng(seed_sequence(self.config.run.seed, "tasks", self.update_index))
        group_size = self.config.rollout.group_size
        groups_drawn = {task_id: self.groups_drawn.get(task_id, 0) for task_id in self.config.task.task_ids}
        for group in itertools.count():
            if self.task_probabilities is None:
                task_id = self._task_whose_turn_it_is(groups_drawn)
            else:
                probabilities = list(self.task_probabilities.values())
                task_id = int(rng.choice(list(self.task_probabilities), p=probabilities))
            group_of_task = groups_drawn[task_id]
            groups_drawn[task_id] += 1
            init_state_id, placement_seed = self._start(task_id, group_of_task, group)
            for member in range(group_size):
                index = group * group_size + member
                yield Episode(index, task_id, init_state_id, group, placement_seed, group_of_task)

    def _task_whose_turn_it_is(self, groups_drawn: Mapping[int, int]) -> int:
        """A task among those with the fewest groups. Each turn has its own order, so that no task is always first."""
        turn = min(groups_drawn.values())
        order = _shuffled(self.config.task.task_ids, self.config.run.seed, "turn", turn)
        return next(task_id for task_id in order if groups_drawn[task_id] == turn)

    def _start(self, task_id: int, group_of_task: int, group: int) -> tuple[int | None, int]:
        """Where a group starts: (one of the benchmark's initial states, 0), or (None, seed of a fresh one)."""
        if isinstance(self.config.task.train_init_states, tuple):
            states = range(*self.config.task.train_init_states)
            deck = _shuffled(states, self.config.run.seed, "deck", task_id, group_of_task // len(states))
            return deck[group_of_task % len(states)], 0
        sequence = seed_sequence(self.config.run.seed, "fresh", self.update_index, group)
        return None, int(sequence.generate_state(1)[0])


def _shuffled(items: Sequence[int], seed: int, purpose: str, *counters: int) -> list[int]:
    """The items in an order that depends only on (seed, purpose, counters)."""
    return np.random.default_rng(seed_sequence(seed, purpose, *counters)).permutation(items).tolist()


def task_probabilities(config: TrainConfig, success: Mapping[int, float]) -> dict[int, float] | None:
    """The probability of each task with --curriculum; None without it, when tasks take turns. success: rate by task.

    Tasks with a success rate near one half teach most. The probabilities are the softmax of
    -|success - 0.5| / PREFERENCE_TEMPERATURE, mixed with the uniform distribution by FLOOR.
    """
    if not config.rollout.curriculum:
        return None
    task_ids = config.task.task_ids
    distances = np.array([abs(success.get(task_id, UNKNOWN) - 0.5) for task_id in task_ids])
    weights = np.exp(-distances / PREFERENCE_TEMPERATURE)
    probabilities = FLOOR / len(task_ids) + (1 - FLOOR) * weights / weights.sum()
    return dict(zip(task_ids, probabilities.tolist(), strict=True))
