"""Tell a policy to do another task of the same scene: does it do that one?

    python -m benchmarks.instructions --checkpoint CHECKPOINT --task-suite libero_goal --task-ids 1 4 8

Every episode begins in an initial state of one task (the scene's own) and has the instruction of one of the tasks (the
told one). It succeeds when the goal of the told task is reached. At its end it is also checked whether the goal of the
scene's own task holds: a policy that does not read would do the same thing whatever it is told. Greedy, exact physics.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from command_line import main_guard, parse_flags
from configs.bounds import POSITIVE, check_numbers
from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
from experiment.statistics import Successes

if TYPE_CHECKING:  # imported where it is used: --help needs no torch
    from vla.policy import Policy


@dataclass(frozen=True)
class Args:
    """Tell a policy to do another task of the same scene: does it do that one?"""

    checkpoint: str
    """Folder or hub id of the policy, or the folder of an adapter."""
    task_suite: str = "libero_goal"
    task_ids: tuple[int, ...] = (1, 4, 8)
    """Tasks that share one scene."""
    num_states: Annotated[int, POSITIVE] = 20
    """Episodes of each pair of tasks, one from each of the first initial states."""
    assets: str = "lowpoly"
    """Looks: lowpoly, official or a folder."""
    device: str = "auto"

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True)
class Task:
    """What an episode is told, and how its success is decided."""

    task_id: int
    instruction: str
    goal: list  # LIBERO's facts, for example [["on", "akita_black_bowl_1", "plate_1"]]


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.instructions")
    from vla.loading import LoadOptions
    from vla.policy import Policy

    policy = Policy.load(args.checkpoint, LoadOptions(args.task_suite, device=args.device))
    spec = EnvSpec(args.task_suite, args.task_ids, policy.num_images, args.assets)
    tasks = [read_task(spec, task_id) for task_id in args.task_ids]
    for scene in tasks:
        env = LiberoEnv(spec, scene.task_id)
        for told in tasks:
            outcomes = [play(policy, env, state, scene, told) for state in range(args.num_states)]
            reached = Successes(sum(told_goal for told_goal, _ in outcomes), len(outcomes))
            scene_goals = sum(scene_goal for _, scene_goal in outcomes)
            line = (
                f"scene of task {scene.task_id}, told task {told.task_id} ({told.instruction!r}): {reached}"
            )
            if told != scene:
                line += f"; the scene's own goal {scene_goals}/{len(outcomes)}"
            print(line, flush=True)
        env.close()


def read_task(spec: EnvSpec, task_id: int) -> Task:
    """Build a task to read its instruction and goal."""
    env = LiberoEnv(spec, task_id)
    env.reset(Start(0), observe=False)
    goal = copy.deepcopy(env.domain.parsed_problem["goal_state"])
    instruction = env.instruction
    env.close()
    return Task(task_id, instruction, goal)


def play(policy: Policy, env: LiberoEnv, init_state_id: int, scene: Task, told: Task) -> tuple[bool, bool]:
    """Play one greedy episode. Returns whether the told goal was reached, and whether the scene's own goal holds.

    (False, False) if the simulator fails.
    """
    result = env.reset(Start(init_state_id))
    if result.error is not None:
        return False, False  # a failed env has no goals to read
    problem = env.domain.parsed_problem  # the next reset restores its goal
    problem["goal_state"] = told.goal
    while not result.done:
        observation = replace(result.observation, instruction=told.instruction)
        result = env.step_chunk(policy.act([observation]).actions[0])
    problem["goal_state"] = scene.goal
    if result.error is not None:
        return False, False
    return result.success, bool(env.domain._check_success())


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.instructions", main))
