"""Make the initial states of a task of one's own: as many as asked for, each tried out in the simulator.

python -m envs.make_init_states my_task.bddl --count 50

LIBERO's own sampler places the objects, with seeds 0, 1, 2, ...; a placement is kept if, started and settled as
training starts an episode, all objects rest where they were put and the task is not solved yet. They are written beside
the BDDL file (my_task.pruned_init), where --bddl-file finds them, in the format of LIBERO's own files.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from command_line import answer_at_once, main_guard, parse_flags


@dataclass(frozen=True)
class InitStatesArgs:
    """Make the initial states of a task of one's own: as many as asked for, each tried out in the simulator."""

    bddl: tyro.conf.Positional[Path]
    """BDDL file of the task."""
    count: int = 50
    """Initial states to make."""
    assets: str = "lowpoly"
    """What objects look like: `lowpoly`, `official` or a folder."""


parse = partial(parse_flags, InitStatesArgs, prog="python -m envs.make_init_states")

if __name__ == "__main__":
    answer_at_once("envs.make_init_states", parse)  # before the seconds that the imports below take

import numpy as np

from envs.assets import find_assets
from envs.libero import SETTLING_ACTION, SETTLING_STEPS, Simulator, SimulatorFault
from envs.tasks import bddl_task, libero_root, save_init_states
from errors import BadInput

# LIBERO's samplers drop objects from some centimetres above their places. Its own initial states settle by up to 17 cm
# and 17 degrees (a bowl into a ramekin) and are at rest after the settling steps.
MAX_DROP_M = 0.25
MAX_TILT_DEG = 30.0
MAX_SPEED = 0.05  # m/s, and 10 times it in rad/s
TRIES_PER_STATE = 10  # placements tried, before the task is taken to be impossible


def main(argv: Sequence[str]) -> None:
    arguments = parse(argv)
    print(make_init_states(arguments.bddl, arguments.count, arguments.assets))


def make_init_states(bddl: Path, count: int, assets: str = "lowpoly") -> str:
    """Make and write `count` states; returns a report of one line. Raises BadInput."""
    if count < 1:
        raise BadInput(f"--count must be at least 1, got {count}")
    task = bddl_task(str(bddl))
    out = task.bddl.with_suffix(".pruned_init")
    if task.bddl.is_relative_to(libero_root()):
        raise BadInput(f"{bddl} is LIBERO's own and has its initial states; copy the file to change it")
    if out.exists():
        raise BadInput(f"{out} exists; move it away to make another")
    simulator = Simulator(task.bddl, find_assets(assets), ("agentview",))
    try:
        states, rejected = collect_states(simulator, count)
        spread = 100 * spread_of(simulator, states)
    finally:
        simulator.close()
    reasons = ", ".join(f"{number} x {reason}" for reason, number in rejected.most_common()) or "none"
    if len(states) < count:
        tried = count * TRIES_PER_STATE
        raise BadInput(
            f"{bddl}: only {len(states)} of {tried} placements can be used, {count} are wanted; rejected: {reasons}"
        )
    save_init_states(out, np.stack(states))
    return (
        f"{out}: {count} initial states of {len(states[0])} numbers, instruction {task.instruction!r}; rejected: "
        f"{reasons}; objects start in places up to {spread:.0f} cm apart"
    )


def collect_states(simulator: Simulator, count: int) -> tuple[list[np.ndarray], Counter[str]]:
    """Up to `count` usable states (1 + nq + nv,), and why others were rejected."""
    states: list[np.ndarray] = []
    rejected: Counter[str] = Counter()
    for state in placements(simulator, count * TRIES_PER_STATE):
        if state is None:
            rejected["no room for all objects"] += 1
        elif problem := find_problem(simulator, state):
            rejected[problem] += 1
        else:
            states.append(state)
        if len(states) == count:
            break
    return states, rejected


def placements(simulator: Simulator, tries: int) -> Iterator[np.ndarray | None]:
    """What LIBERO's sampler makes of each seed: a state (1 + nq + nv,), or None."""
    for seed in range(tries):
        try:
            simulator.reset(seed)
        except SimulatorFault:
            yield None
            continue
        yield np.array(simulator.domain.sim.get_state().flatten())


def find_problem(simulator: Simulator, state: np.ndarray) -> str | None:
    """Start an episode from `state` as `envs.libero` does, and say what speaks against it.

    Cabinets and other fixtures stand where the seed of episodes puts them, not where they stood when the objects were
    placed: they are no part of a state.
    """
    simulator.reset(0)
    simulator.set_state(state)
    placed = poses(simulator)
    solved = False
    try:
        for _ in range(SETTLING_STEPS):
            _, success = simulator.step(SETTLING_ACTION)
            solved = solved or success
    except SimulatorFault:
        return "unstable simulation"
    for name, (height, rotation) in poses(simulator).items():
        height_before, rotation_before = placed[name]
        if height_before - height > MAX_DROP_M:
            return f"{name} falls"
        if angle_between(rotation_before, rotation) > MAX_TILT_DEG:
            return f"{name} tips over"
    if (moving := moving_object(simulator)) is not None:
        return f"{moving} does not come to rest"
    return "already solved" if solved else None


def poses(simulator: Simulator) -> dict[str, tuple[float, np.ndarray]]:
    """Height (m) and rotation matrix (3, 3) of every movable object."""
    domain = simulator.domain
    bodies = {name: domain.obj_body_id[name] for name in domain.objects_dict}
    data = domain.sim.data
    return {name: (float(data.body_xpos[b][2]), data.body_xmat[b].reshape(3, 3).copy()) for name, b in bodies.items()}


def moving_object(simulator: Simulator) -> str | None:
    domain = simulator.domain
    for name, body in domain.objects_dict.items():
        velocity = np.abs(domain.sim.data.get_joint_qvel(body.joints[-1]))  # (6,): m/s, rad/s
        if velocity[:3].max() > MAX_SPEED or velocity[3:].max() > 10 * MAX_SPEED:
            return name
    return None


def spread_of(simulator: Simulator, states: Sequence[np.ndarray]) -> float:
    """Metres between the outermost places, along x or y, of the object that varies most; 0: all states are alike."""
    domain = simulator.domain
    first = [1 + domain.sim.model.get_joint_qpos_addr(body.joints[-1])[0] for body in domain.objects_dict.values()]
    return max(
        (float(np.ptp([state[i : i + 2] for state in states], axis=0).max()) for i in first if states), default=0
    )


def angle_between(a: np.ndarray, b: np.ndarray) -> float:
    """Angle in degrees of the rotation from one rotation matrix (3, 3) to another."""
    return math.degrees(math.acos(float(np.clip((np.trace(a.T @ b) - 1) / 2, -1, 1))))


if __name__ == "__main__":
    sys.exit(main_guard("envs.make_init_states", main))
