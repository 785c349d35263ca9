"""Separate three reasons why a policy's training episodes succeed less often than its evaluation, as Markdown tables.

    python -m benchmarks.policy_physics --checkpoint FOLDER --task-ids 0 --episodes 200 --num-envs 8 --assets official

Training samples, in fast physics, from fresh initial states; an evaluation is greedy, in exact physics, from official
initial states. The conditions below change one of these at a time. The seeds 0, 1, ... place the fresh states, so all
conditions with fresh states start from the same ones, which are also those of `benchmarks.physics`. These conditions
are compared episode by episode (exact McNemar test). Fresh and official states have no episodes in common; their
success rates have only their own intervals.

With the bundled policy, sampled as its training samples it: --checkpoint checkpoints/tiny-libero-spatial --temperature
0.6. Each success rate is printed as soon as it is known.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeAlias

from command_line import main_guard, parse_flags
from configs.bounds import NOT_NEGATIVE, POSITIVE, check_numbers
from configs.sections import RolloutConfig
from envs.env import EnvSpec, Physics
from envs.pool import Pool, make_pool
from experiment.statistics import compare, count_successes
from experiment.terminal import show_progress

if TYPE_CHECKING:  # imported where it is used: --help needs no torch
    from rl.trajectory import Episode
    from vla.policy import Policy


class Condition(NamedTuple):
    """How a policy plays: where episodes start, in which physics, and how the policy chooses tokens."""

    states: Literal["official", "fresh"]
    physics: Physics
    mode: Literal["greedy", "sample"]

    def __str__(self) -> str:
        return f"{self.states}, {self.physics}, {self.mode}"


CONDITIONS = (  # from an evaluation's to training's; neighbours differ in one thing
    Condition("official", "exact", "greedy"),
    Condition("fresh", "exact", "greedy"),
    Condition("fresh", "fast", "greedy"),
    Condition("fresh", "fast", "sample"),
)

Outcomes: TypeAlias = "dict[Episode, bool]"  # success by episode


@dataclass(frozen=True)
class Args:
    checkpoint: str
    """Folder or hub id of the policy, or a trained adapter's folder."""
    task_suite: str = "libero_spatial"
    task_ids: tuple[int, ...] = (0,)
    episodes: Annotated[int, POSITIVE] = 200
    """Fresh initial states of each task."""
    official_states: Annotated[int, POSITIVE] = 50
    """Official initial states of each task, from the first one on; LIBERO has 50."""
    temperature: Annotated[float, POSITIVE] = RolloutConfig.temperature
    """Sampling temperature of the condition that samples."""
    num_envs: Annotated[int, POSITIVE] = 1
    """Simulators that work in parallel."""
    assets: str = "lowpoly"
    """Looks: lowpoly, official or a folder."""
    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Seed of sampling."""
    device: str = "auto"

    def __post_init__(self) -> None:
        check_numbers(self)


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.policy_physics", description=__doc__)
    from vla.loading import LoadOptions
    from vla.policy import Policy

    policy = Policy.load(args.checkpoint, LoadOptions(args.task_suite, device=args.device))
    spec = EnvSpec(args.task_suite, args.task_ids, policy.num_images, args.assets)
    with make_pool(spec, args.num_envs, policy.model_inputs.prepare_images) as pool:
        print_tables(policy, pool, args)


def print_tables(policy: Policy, pool: Pool, args: Args) -> None:
    """Play all conditions; print a table of their success rates and one of the paired differences."""
    print(f"| initial states, physics, tokens (sampled at T = {args.temperature:g}) | successes [95 %] |")
    print("|---|---|", flush=True)
    outcomes: dict[Condition, Outcomes] = {}
    for condition in CONDITIONS:
        outcomes[condition] = play(policy, pool, condition, args)
        print(f"| {condition} | {count_successes(outcomes[condition].values())} |", flush=True)
    print()
    print("| A | B | same episodes | B minus A |")
    print("|---|---|---|---|")
    for row in paired_rows(outcomes):
        print(row)


def play(policy: Policy, pool: Pool, condition: Condition, args: Args) -> Outcomes:
    """Play the episodes of one condition with the code of training rollouts."""
    from rl.behaviour import Behaviour
    from rl.curriculum import evaluation_episodes
    from rl.randomness import Randomness
    from rl.rollout import play_episodes

    if condition.states == "official":
        episodes = evaluation_episodes(args.task_ids, (0, args.official_states), trials=1)
    else:
        episodes = fresh_episodes(args.task_ids, args.episodes)
    behaviour = Behaviour(
        epsilon=0.0,
        temperature=args.temperature,
        student_mode=condition.mode,
        physics=condition.physics,
        keep_observations=False,
    )
    with show_progress(str(condition), len(episodes), "episodes") as activity:
        rollout = play_episodes(
            policy,
            pool,
            episodes,
            behaviour,
            Randomness(args.seed, "evaluation"),
            on_finished=lambda trajectory: activity.count_episode(trajectory.success),
        )
    return {trajectory.episode: trajectory.success for trajectory in rollout.trajectories}


def fresh_episodes(task_ids: tuple[int, ...], episodes_per_task: int) -> list[Episode]:
    """Episodes from the fresh initial states that the seeds 0, 1, ... place, task by task."""
    from rl.trajectory import Episode

    starts = [(task_id, seed) for task_id in task_ids for seed in range(episodes_per_task)]
    return [Episode(index, task_id, None, index, seed) for index, (task_id, seed) in enumerate(starts)]


def paired_rows(outcomes: Mapping[Condition, Outcomes]) -> list[str]:
    """A row of the second table for every two conditions that have played the same episodes."""
    rows = []
    for a, b in combinations(outcomes, 2):
        pair = compare(outcomes[a], outcomes[b])
        if pair.n > 0:
            solved = f"solved in both {pair.both}, only in A {pair.only_before}, only in B {pair.only_after}"
            rows.append(f"| {a} | {b} | {pair.n}: {solved} | {pair} |")
    return rows


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.policy_physics", main))
