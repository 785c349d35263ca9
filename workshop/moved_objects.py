"""Move the objects at the start of an episode, so that only a policy that looks can imitate the expert."""

import numpy as np

from envs.env import ChunkResult, Start
from envs.libero import LiberoEnv

STACKED_M = 0.07  # objects nearer than this in x and y move together: a bowl on a ramekin
APART_M = 0.13  # other objects keep this distance, or the distance that they had if it was smaller
NEARER = 0.8  # if an object would fall, the next attempt moves objects by this factor of the last distance
# Directions tried for each stack, attempts to find room for all stacks, and to find a start in which no object falls.
MAX_ATTEMPTS = 20


def reset_with_moved_objects(
    env: LiberoEnv, start: Start, distance_m: float, generator: np.random.Generator, observe: bool = True
) -> ChunkResult:
    """Start an episode in which every stack of objects is `distance_m` away from where `start` puts it.

    If an object does not stay there, all are moved less far, after MAX_ATTEMPTS not at all.
    """
    if distance_m == 0:
        return env.reset(start, observe)
    result = env.reset(start, observe=False)
    if result.error is not None:
        return result
    placement = env.placement
    assert placement is not None  # set by the reset
    for attempt in range(MAX_ATTEMPTS):
        state = moved_state(env, placement.state, distance_m * NEARER**attempt, generator)
        result = env.reset(start, observe, placement._replace(state=state))
        if result.error is None:
            return result
    return env.reset(start, observe)


def moved_state(
    env: LiberoEnv, state: np.ndarray, distance_m: float, generator: np.random.Generator
) -> np.ndarray:
    """The state (1 + nq + nv,) of the simulation with every stack of objects moved by `distance_m`."""
    state = state.copy()
    joints = [thing.joints[-1] for thing in env.domain.objects_dict.values()]
    starts = [1 + env.domain.sim.model.get_joint_qpos_addr(joint)[0] for joint in joints]
    columns = np.add.outer(starts, (0, 1))  # (objects, 2): x and y of each
    state[columns] = scattered(state[columns], distance_m, generator)
    return state


def scattered(places: np.ndarray, radius: float, generator: np.random.Generator) -> np.ndarray:
    """Move every stack of objects by `radius` metres in a random direction; returns the new places (n, 2) in metres.

    If a stack has no room, all begin again. After MAX_ATTEMPTS attempts nothing moves.
    """
    attempts = (_scatter_once(places, radius, generator) for _ in range(MAX_ATTEMPTS))
    return next((moved for moved in attempts if moved is not None), places)


def _scatter_once(places: np.ndarray, radius: float, generator: np.random.Generator) -> np.ndarray | None:
    """New places (n, 2) of all stacks, or None if one of them has no room in MAX_ATTEMPTS directions.

    Stacks move one after the other. A stack keeps its distance from those that moved before it, and not from those that
    have yet to move: if it did, an object between two others could move in few directions only.
    """
    distances = np.linalg.norm(places[:, None] - places, axis=-1)
    moved = places.copy()
    placed: list[int] = []  # the objects that have their new places
    while len(placed) < len(places):
        first = min(set(range(len(places))) - set(placed))
        stack = [i for i in range(len(places)) if i not in placed and distances[i, first] < STACKED_M]
        least_distances = np.minimum(distances[np.ix_(stack, placed)], APART_M)
        angles = generator.uniform(0, 2 * np.pi, MAX_ATTEMPTS)
        steps = radius * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
        candidates = places[stack] + steps[:, None]  # (MAX_ATTEMPTS, objects of the stack, 2)
        gaps = np.linalg.norm(candidates[:, :, None] - moved[placed], axis=-1)
        has_room = (gaps >= least_distances).all(axis=(1, 2))
        if not has_room.any():
            return None
        moved[stack] = candidates[has_room.argmax()]
        placed += stack
    return moved
