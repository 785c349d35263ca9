"""Which episodes a rollout or an evaluation plays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from configs.config import TaskConfig
from rl.randomness import numpy_generator
from rl.trajectory import Episode


def training_episodes(
    task: TaskConfig, group_size: int, seed: int, update: int, probabilities: Mapping[int, float] | None = None
) -> Iterator[Episode]:
    """Endless groups of `group_size` episodes for one update, a function of (seed, update) and the probabilities.

    Tasks take turns, or are drawn with the given probabilities (`rl.curriculum`); within a task the training initial
    states are drawn without replacement until all were used. A group never mixes tasks or initial states.
    """
    rng = numpy_generator(seed, "episodes", update)
    states = range(*task.train_init_states)
    decks: dict[int, list[int]] = {task_id: [] for task_id in task.task_ids}
    index = group = 0
    while True:
        if probabilities is None:
            turn = rng.permutation(task.task_ids).tolist()
        else:
            turn = [int(rng.choice(list(probabilities), p=list(probabilities.values())))]
        for task_id in turn:
            deck = decks[task_id]
            if not deck:
                deck.extend(rng.permutation(states).tolist())
            init_state_id = deck.pop()
            for _ in range(group_size):
                yield Episode(index, task_id, init_state_id, group)
                index += 1
            group += 1


def evaluation_episodes(task_ids: Sequence[int], init_states: tuple[int, int], trials: int) -> list[Episode]:
    """Every (task, held-out initial state), `trials` times; one group per (task, initial state)."""
    starts = [(task_id, state) for task_id in task_ids for state in range(*init_states)]
    episodes = [(task_id, state, group) for _ in range(trials) for group, (task_id, state) in enumerate(starts)]
    return [Episode(index, *start) for index, start in enumerate(episodes)]
