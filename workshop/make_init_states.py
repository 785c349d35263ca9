"""Make initial states for your own task, and test each of them in the simulator.

python -m workshop.make_init_states my_task.bddl --count 50

LIBERO's own sampler places the objects, with seeds 0, 1, 2, ... Each placement then settles as at the start of an
episode. It is kept if all objects rest where they were placed and the task is not solved yet. The states are written
beside the BDDL file (my_task.pruned_init), where --bddl-file finds them, in the format of LIBERO's own files.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from command_line import main_guard, parse_flags
from configs.bounds import POSITIVE, check_numbers
from contracts import BadInput, replaced
from envs.assets import find_pack
from envs.env import SimulatorFault
from envs.libero_simulator import LiberoSimulator
from envs.tasks import bddl_task, libero_root

TRIES_PER_STATE = 10  # placements tried before the task counts as impossible


@dataclass(frozen=True)
class InitStatesArgs:
    """Make initial states for your own task, and test each of them in the simulator."""

    bddl: tyro.conf.Positional[Path]
    """BDDL file of the task."""
    count: Annotated[int, POSITIVE] = 50
    """Initial states to make."""


def make_init_states(bddl: Path, count: int) -> str:
    """Make `count` states and write their file; returns a report of one line.

    Raises BadInput for a wrong BDDL file, if the file of states exists, or if too few placements can be used.
    """
    task = bddl_task(str(bddl))
    out = task.bddl.with_suffix(".pruned_init")
    if task.bddl.is_relative_to(libero_root()):
        raise BadInput(f"{bddl} is LIBERO's own and has its initial states; copy the file to change it")
    if out.exists():
        raise BadInput(f"{out} exists; move it away to make a new one")
    states, rejected = sample_states(task.bddl, count)
    reasons = ", ".join(f"{times} x {reason}" for reason, times in rejected.most_common()) or "none"
    if len(states) < count:
        usable = f"{len(states)} of {count * TRIES_PER_STATE} placements"
        raise BadInput(f"{bddl}: only {usable} can be used, --count is {count}; rejected: {reasons}")
    import torch  # it takes a second, and --help does not need it

    with replaced(out) as draft, draft.open("wb") as file:
        torch.save(np.stack(states), file)
    return f"{out}: {count} initial states, instruction {task.instruction!r}; rejected: {reasons}"


def sample_states(bddl: Path, count: int) -> tuple[list[np.ndarray], Counter[str]]:
    """Up to `count` usable states, each (1 + nq + nv,), and how many placements were rejected for each reason."""
    states: list[np.ndarray] = []
    rejected: Counter[str] = Counter()
    with closing(LiberoSimulator(bddl, find_pack("lowpoly").folder, ("agentview",))) as simulator:
        for seed in range(count * TRIES_PER_STATE):
            try:
                simulator.reset(seed)
            except SimulatorFault:
                rejected["no room for all objects"] += 1
                continue
            state = np.array(simulator.domain.sim.get_state().flatten())
            problem = find_problem(simulator, state)
            if problem is None:
                states.append(state)
            else:
                rejected[problem] += 1
            if len(states) == count:
                break
    return states, rejected


def find_problem(simulator: LiberoSimulator, state: np.ndarray) -> str | None:
    """Let `state` settle as at the start of an episode; returns why it cannot be used, or None.

    A state does not contain the fixtures: the episode's seed places them, which is 0 here.
    """
    simulator.reset(0, state)
    placed_poses = simulator.object_poses()
    try:
        simulator.settle()
    except SimulatorFault:
        return "unstable simulation"
    return simulator.find_problem(placed_poses)


def main(argv: Sequence[str]) -> None:
    arguments = parse_flags(InitStatesArgs, argv, prog="python -m workshop.make_init_states")
    check_numbers(arguments)
    print(make_init_states(arguments.bddl, arguments.count))


if __name__ == "__main__":
    sys.exit(main_guard("workshop.make_init_states", main))
