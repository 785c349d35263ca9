"""Which task to practise: those that succeed about half of the time teach most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from configs.config import CurriculumConfig, TrainConfig
from rl.trajectory import Trajectory

UNKNOWN = 0.5  # a task that was not played yet counts as worth most


def task_probabilities(
    task_ids: Sequence[int], success: Mapping[int, float], config: CurriculumConfig
) -> dict[int, float]:
    """Sampling probability of each task from its success average.

    A softmax of -|success - 0.5| / temperature, mixed with the uniform distribution so that every task keeps at least
    `floor` / number of tasks: what is mastered or hopeless now is still tried.
    """
    distance = np.array([abs(success.get(task_id, UNKNOWN) - 0.5) for task_id in task_ids])
    preference = np.exp(-distance / config.curriculum_temperature)
    mixed = config.curriculum_floor / len(task_ids) + (1 - config.curriculum_floor) * preference / preference.sum()
    return dict(zip(task_ids, mixed.tolist(), strict=True))


def task_preferences(config: TrainConfig, success: Mapping[int, float]) -> dict[int, float] | None:
    """The probabilities of a run with --curriculum; None without: tasks take turns."""
    if not config.rollout.curriculum:
        return None
    return task_probabilities(config.task.task_ids, success, config.curriculum)


def absorb_successes(success: dict[int, float], trajectories: Sequence[Trajectory], alpha: float) -> None:
    """Move each task's exponential average of successes by the episodes that were played, in their order."""
    for trajectory in trajectories:
        task_id = trajectory.episode.task_id
        previous = success.get(task_id, UNKNOWN)
        success[task_id] = alpha * previous + (1 - alpha) * trajectory.success_return


def curriculum_metrics(preferences: Mapping[int, float] | None) -> dict[str, float]:
    """The probabilities under their wandb names."""
    return {f"curriculum/probability_task_{task_id}": p for task_id, p in (preferences or {}).items()}
