"""Which episodes a rollout or an evaluation plays: their order, the curriculum over tasks, dynamic sampling."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from configs.config import RolloutConfig, TaskConfig, TrainConfig
from envs.perturb import NONE, from_label
from rl.rollout import Rollout, seed_sequence
from rl.trajectory import Episode, Trajectory

log = logging.getLogger(__name__)

PREFERENCE_TEMPERATURE = 0.2
FLOOR = 0.2  # share of the episodes that is spread evenly over the tasks: what is mastered or hopeless is still tried
UNKNOWN = 0.5  # a task that was not played yet counts as worth most


def training_episodes(
    task: TaskConfig, group_size: int, seed: int, update: int, drawn: Mapping[int, int],
    probabilities: Mapping[int, float] | None = None, perturbed: Mapping[str, float] | None = None,
) -> Iterator[Episode]:  # fmt: skip
    """Endless groups of `group_size` episodes with one task, initial state and perturbation each.

    A function of the arguments. Tasks take turns, or are drawn by `probabilities`, perturbations by `perturbed`.
    `drawn`: groups that a task had in earlier updates; its initial states are a deck over the whole run, shuffled anew
    when all were used, or fresh ones for each (update, group).
    """
    rng = np.random.default_rng(seed_sequence(seed, "tasks", update))
    draws = {task_id: drawn.get(task_id, 0) for task_id in task.task_ids}
    for group in itertools.count():
        if probabilities is None:
            turn = min(draws.values())
            order = _shuffled(task.task_ids, seed, "turn", turn)
            task_id = next(task_id for task_id in order if draws[task_id] == turn)
        else:
            task_id = int(rng.choice(list(probabilities), p=list(probabilities.values())))
        draw, init_state_id, placement = draws[task_id], None, 0
        if isinstance(task.train_init_states, tuple):
            states = range(*task.train_init_states)
            init_state_id = _shuffled(states, seed, "deck", task_id, draw // len(states))[draw % len(states)]
        else:
            placement = int(seed_sequence(seed, "fresh", update, group).generate_state(1)[0])
        draws[task_id] += 1
        change = None
        if perturbed is not None:
            own_seed, choice = seed_sequence(seed, "perturb", update, group).generate_state(2).tolist()
            label = np.random.default_rng(choice).choice(list(perturbed), p=list(perturbed.values()))
            change = from_label(str(label), own_seed)
        for member in range(group_size):
            yield Episode(group * group_size + member, task_id, init_state_id, group, placement, draw, change)


def _shuffled(items: Sequence[int], seed: int, purpose: str, *counters: int) -> list[int]:
    return np.random.default_rng(seed_sequence(seed, purpose, *counters)).permutation(items).tolist()


def evaluation_episodes(task_ids: Sequence[int], init_states: tuple[int, int], trials: int) -> list[Episode]:
    """Every (task, held-out initial state), `trials` times; one group per (task, initial state)."""
    starts = [(task_id, state) for task_id in task_ids for state in range(*init_states)]
    episodes = [
        (task_id, state, group) for _ in range(trials) for group, (task_id, state) in enumerate(starts)
    ]
    return [Episode(index, *start) for index, start in enumerate(episodes)]


def task_probabilities(config: TrainConfig, success: Mapping[int, float]) -> dict[int, float] | None:
    """With --curriculum; else None, and tasks take turns."""
    task_ids = config.task.task_ids
    return (
        dict(zip(task_ids, preferences(task_ids, success), strict=True))
        if config.rollout.curriculum
        else None
    )


def perturbation_probabilities(config: TrainConfig, success: Mapping[str, float]) -> dict[str, float] | None:
    """Of none, and of every kind and magnitude of --perturb: kinds (none is one) alike, or by --curriculum."""
    labels = (NONE, *config.simulator.perturbations)
    if len(labels) == 1:
        return None
    shares = [1.0] + [1.0 / len({*config.simulator.magnitudes})] * (len(labels) - 1)
    if config.rollout.curriculum:
        shares = preferences(labels, success)
    return {label: share / sum(shares) for label, share in zip(labels, shares, strict=True)}


def preferences(things: Sequence[Any], success: Mapping[Any, float]) -> list[float]:
    """What succeeds half of the time teaches most: softmax of -|success - 0.5| / temperature, mixed with uniform."""
    distance = np.array([abs(success.get(thing, UNKNOWN) - 0.5) for thing in things])
    preference = np.exp(-distance / PREFERENCE_TEMPERATURE)
    return (FLOOR / len(things) + (1 - FLOOR) * preference / preference.sum()).tolist()


def informative_rollout(
    play: Callable[..., Rollout], episodes: Callable[[], Iterator[Episode]], config: RolloutConfig
) -> tuple[Rollout, list[Trajectory]]:
    """Dynamic sampling (DAPO, Yu et al. 2025, section 3.2): learn only from groups that can teach, within a bound.

    Plays until the groups inside the bounds hold `n_steps` env steps, or twice as many env steps have been played.
    episodes() gives the update's episodes from the first on. Returns all that was played, and the kept groups.
    """
    played: list[Rollout] = []
    kept: list[Trajectory] = []
    next_group, missing, (low, high) = 0, config.n_steps, config.group_success_bounds
    while missing > 0:
        rest = (episode for episode in episodes() if episode.group >= next_group)
        part = play(rest, n_steps=missing)
        played.append(part)
        for _, members in itertools.groupby(part.trajectories, key=lambda t: t.episode.group):
            trajectories = list(members)
            if low <= sum(t.success for t in trajectories) / len(trajectories) <= high:
                kept += trajectories
        next_group = part.trajectories[-1].episode.group + 1
        extra = sum(p.env_steps for p in played) - config.n_steps
        lacking = config.n_steps - sum(t.env_steps for t in kept)
        missing = min(lacking, config.n_steps - extra)
    if lacking > 0:
        log.info("dynamic sampling: twice --n-steps played, %d trajectories kept", len(kept))
    whole = Rollout(
        trajectories=[t for p in played for t in p.trajectories],
        times={key: sum(p.times[key] for p in played) for key in played[0].times},
        wall_s=sum(p.wall_s for p in played),
        errors=sum(p.errors for p in played),
    )
    return whole, kept
