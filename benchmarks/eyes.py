"""Measure what a policy's decisions depend on: images, robot state, instruction; and if its hand follows the object.

    python -m benchmarks.eyes --checkpoint checkpoints/tiny-libero-spatial --task-id 0

Three measurements on one task, all with greedy episodes in exact physics:

* The hand: in --placements episodes the objects are moved by --move-objects cm. How does the hand's position at the
  moment when the gripper first closes depend on the position of the object to be picked up? A slope of 1 means that the
  hand follows the object, 0 that it always goes to the same place.
* Swapped inputs: how much does a decision change (KL divergence in nats per token, at temperature 1) when one of its
  inputs is replaced: by that of another episode at the same decision, by that of another task, or by black?
* Black images: how many of the benchmark's initial states does the policy solve without seeing anything?
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np

from command_line import main_guard, parse_flags
from configs.bounds import NOT_NEGATIVE, POSITIVE, check_numbers
from contracts import Observation
from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
from envs.pool import task_info
from envs.tasks import task_names
from experiment.statistics import Successes
from workshop.moved_objects import reset_with_moved_objects

if TYPE_CHECKING:  # imported where it is used: --help needs no torch
    from vla.policy import Policy

GRIPPER_CLOSES = 0.0  # the gripper closes if the last number of an action is greater (-1 opens, 1 closes)
KL_BATCH = 16  # observations that are sent through the network together


@dataclass(frozen=True)
class Args:
    checkpoint: str
    """Folder or hub id of the policy."""
    task_suite: str = "libero_spatial"
    task_id: int = 0
    placements: Annotated[int, POSITIVE] = 50
    """Episodes with moved objects."""
    move_objects: Annotated[float, NOT_NEGATIVE] = 8.0
    """How far objects are moved, in cm."""
    black_episodes: Annotated[int, NOT_NEGATIVE] = 50
    """Episodes with black images, from the benchmark's initial states (0: none)."""
    assets: str = "lowpoly"
    """Looks: lowpoly, official or a folder."""
    device: str = "auto"

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass
class Approach:
    """An episode up to the moment when the gripper first closes."""

    observations: list[Observation] = field(default_factory=list)
    # Positions in metres, (2,). None if the simulator has failed before.
    object_xy: np.ndarray | None = None  # the object to be picked up, before the first action
    hand_xy: np.ndarray | None = None  # the hand when the gripper closes; also None if it never closes


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.eyes", description=__doc__)
    from vla.loading import LoadOptions
    from vla.policy import Policy

    policy = Policy.load(args.checkpoint, LoadOptions(args.task_suite, device=args.device))
    spec = EnvSpec(args.task_suite, (args.task_id,), policy.num_images, args.assets)
    env = LiberoEnv(spec, args.task_id)
    print(f"{args.checkpoint}: {env.instruction!r}, {args.assets} looks", flush=True)
    approaches = [approach(policy, env, seed, args.move_objects) for seed in range(args.placements)]
    print(hand_report(approaches), flush=True)
    for name, nats in swapped_inputs(policy, approaches, other_instructions(args)).items():
        print(f"{name:40} {nats:8.3f} nats a token", flush=True)
    if args.black_episodes > 0:
        states = range(min(args.black_episodes, env.num_init_states))
        successes = sum(succeeds_blind(policy, env, init_state_id) for init_state_id in states)
        print(f"black images: {Successes(successes, len(states))} successes")
    env.close()


def approach(policy: Policy, env: LiberoEnv, seed: int, moved_cm: float) -> Approach:
    """Play greedily until the gripper closes for the first time; `seed` decides how the objects are moved.

    If the simulator fails, the record ends there, without a position of the hand.
    """
    record = Approach()
    start = Start(seed % env.num_init_states, seed)
    result = reset_with_moved_objects(env, start, moved_cm / 100, np.random.default_rng(seed))
    if result.error is not None:
        return record  # a failed env has no positions to read
    record.object_xy = object_position(env)[:2]
    while not result.done:
        record.observations.append(result.observation)
        chunk = policy.act([result.observation]).actions[0]
        closing = np.flatnonzero(chunk[:, -1] > GRIPPER_CLOSES)
        if len(closing) > 0:
            if closing[0] > 0:
                result = env.step_chunk(chunk[: closing[0]], observe=False)
            if result.error is None:
                record.hand_xy = hand_position(env)[:2]
            break
        result = env.step_chunk(chunk)
    return record


def object_position(env: LiberoEnv) -> np.ndarray:
    """Position (3,) in metres of the object that the task's goal names first."""
    domain = env.domain
    name = domain.parsed_problem["goal_state"][0][1]
    return domain.sim.data.body_xpos[domain.obj_body_id[name]].copy()


def hand_position(env: LiberoEnv) -> np.ndarray:
    """Position (3,) in metres of the point between the fingers."""
    robot = env.domain.robots[0]
    return env.domain.sim.data.site_xpos[robot.eef_site_id].copy()


def hand_report(approaches: Sequence[Approach]) -> str:
    """Say in one line how the hand's position depends on the object's."""
    closed = [record for record in approaches if record.hand_xy is not None]
    if len(closed) < 3:
        return f"the gripper closes in {len(closed)} of {len(approaches)} episodes: no slope can be measured"
    objects = np.stack([record.object_xy for record in closed])
    hands = np.stack([record.hand_xy for record in closed])
    slopes = [slope(objects[:, axis], hands[:, axis]) for axis in (0, 1)]
    spread = np.ptp(objects, axis=0) * 100
    return (
        f"the hand follows the object with slope {slopes[0]:.2f} in x and {slopes[1]:.2f} in y: the gripper closes in "
        f"{len(closed)} of {len(approaches)} episodes, whose objects lie within {spread[0]:.0f} x {spread[1]:.0f} cm"
    )


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """The slope of the least squares line through the points (x, y)."""
    return float(np.polyfit(x, y, deg=1)[0])


def other_instructions(args: Args) -> list[str]:
    """The instructions of the suite's other tasks."""
    task_ids = [task_id for task_id in range(len(task_names(args.task_suite))) if task_id != args.task_id]
    return [task.instruction for task in task_info(EnvSpec(args.task_suite, tuple(task_ids), num_images=1))]


def swapped_inputs(
    policy: Policy, approaches: Sequence[Approach], instructions: Sequence[str]
) -> dict[str, float]:
    """How much decisions change when an input is replaced: name of the change -> mean KL divergence (nats a token)."""
    from rl.sensitivity import kl_divergence, log_probabilities

    random = np.random.default_rng(0)
    originals, neighbours = pairs_of_decisions(approaches)
    shuffled = [originals[row] for row in random.permutation(len(originals))]
    black = [replace(seen, images=np.zeros_like(seen.images)) for seen in originals]
    changed = {
        "image of another episode, same decision": with_images(originals, neighbours),
        "image of any decision": with_images(originals, shuffled),
        "black image": black,
    }
    if policy.info.uses_proprio:
        pairs = zip(originals, neighbours, strict=True)
        changed["robot state of another episode"] = [replace(a, proprio=b.proprio) for a, b in pairs]
    if instructions:
        drawn = random.choice(instructions, size=len(originals)).tolist()
        pairs = zip(originals, drawn, strict=True)
        changed["instruction of another task"] = [replace(a, instruction=text) for a, text in pairs]
    before = log_probabilities(policy, originals, KL_BATCH)
    return {
        name: kl_divergence(before, log_probabilities(policy, seen, KL_BATCH))
        for name, seen in changed.items()
    }


def with_images(observations: Sequence[Observation], neighbours: Sequence[Observation]) -> list[Observation]:
    return [replace(seen, images=other.images) for seen, other in zip(observations, neighbours, strict=True)]


def pairs_of_decisions(approaches: Sequence[Approach]) -> tuple[list[Observation], list[Observation]]:
    """The observations of all decisions, and for each that of the next episode at the same decision."""
    originals = []
    neighbours = []
    for record, following in zip(approaches, [*approaches[1:], approaches[0]], strict=True):
        length = min(len(record.observations), len(following.observations))
        originals += record.observations[:length]
        neighbours += following.observations[:length]
    return originals, neighbours


def succeeds_blind(policy: Policy, env: LiberoEnv, init_state_id: int) -> bool:
    """Whether one greedy episode succeeds in which all images are black."""
    result = env.reset(Start(init_state_id))
    while not result.done:
        seen = replace(result.observation, images=np.zeros_like(result.observation.images))
        result = env.step_chunk(policy.act([seen]).actions[0])
    return result.success


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.eyes", main))
