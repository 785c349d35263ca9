#!/usr/bin/env python
"""Measure the success rate of a checkpoint on LIBERO tasks.

    python eval.py --checkpoint runs/RUN/checkpoints/best --task-ids 0 --trials 50
    python eval.py --checkpoint Haozhan72/Openvla-oft-SFT-libero-goal-traj1 --task-suite libero_goal --out goal.json

Episode i of a task starts from the benchmark's initial state i; 50 trials are the published protocol. Policies act
greedily unless --temperature is given.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.cli import answer_at_once, main_guard
from configs.eval_config import EvalConfig, parse_eval

if __name__ == "__main__":
    answer_at_once("eval.py", parse_eval)  # --help and wrong flags, before the seconds that the imports below take

from assembly import env_spec, load_policy
from configs.config import PolicyConfig, RunConfig, TaskConfig, TrainConfig
from envs.assets import describe_assets
from envs.libero import task_info
from envs.pool import make_pool
from envs.tasks import TaskInfo, task_names
from errors import BadInput
from rl.evaluation import count, evaluate
from rl.progress import progress_bar
from rl.rollout import Acting, Batching
from rl.run import provenance, write_json
from rl.trajectory import Episode, Trajectory
from rl.video import write_video

log = logging.getLogger("eval")


def main(argv: Sequence[str]) -> None:
    config = parse_eval(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    task_ids = config.task_ids or (tuple(range(len(task_names(config.task_suite)))) if not config.bddl_file else (0,))
    settings = TrainConfig(
        task=TaskConfig(
            task_suite=config.task_suite, task_ids=task_ids, bddl_file=config.bddl_file, assets=config.assets
        ),
        policy=PolicyConfig(
            checkpoint=config.checkpoint,
            unnorm_key=config.unnorm_key,
            device=config.device,
            data_parallel=config.data_parallel,
            dtype=config.dtype,
        ),
        run=RunConfig(seed=config.seed),
    )
    policy = load_policy(settings)
    mode = choose_mode(config, policy)
    spec = env_spec(settings.task, policy.num_images)
    tasks = task_info(spec)
    episodes = trial_episodes(tasks, config.trials, config.first_init_state)
    looks = describe_assets(spec.assets)
    print(f"{config.checkpoint}: {policy.kind}, {mode}; assets: {looks}")

    acting = Acting(
        epsilon=1.0 if mode == "l1" else 0.0,
        temperature=config.temperature or 1.0,
        teacher_mode="l1",
        student_mode="sample" if mode == "sample" else "greedy",
        keep_observations=False,
    )
    with make_pool(spec, config.num_envs, policy.prepare) as pool, progress_bar("env steps", None) as on_steps:
        collected = evaluate(
            policy,
            pool,
            episodes,
            acting,
            config.seed,
            Batching(config.max_batch),
            record=lambda e: config.video is not None and e.index < len(tasks),
            on_steps=on_steps,
        )
    trajectories = collected.trajectories
    print_table(tasks, trajectories)
    print(f"{collected.env_steps / collected.wall_s:.0f} env steps/s, {collected.wall_s:.0f} s")

    if config.video is not None:
        for trajectory in trajectories[: len(tasks)]:
            write_video(Path(config.video) / f"{video_name(trajectory)}.mp4", trajectory.frames)
    if config.out is not None:
        write_json(Path(config.out), results(config, mode, looks, tasks, trajectories, argv))


def choose_mode(config: EvalConfig, policy) -> str:
    """`greedy`, `sample` or `l1`. Raises BadInput when the checkpoint has no L1 head."""
    if config.mode == "l1" and policy.action_head is None:
        raise BadInput(f"--mode l1: {config.checkpoint} ships no action head")
    if config.mode != "auto":
        return config.mode
    if config.temperature is not None:
        return "sample"
    is_adapter = (Path(config.checkpoint) / "adapter_config.json").is_file()  # trained on tokens, whatever its base is
    return "l1" if policy.action_head is not None and not is_adapter else "greedy"


def trial_episodes(tasks: Sequence[TaskInfo], trials: int, first_init_state: int) -> list[Episode]:
    """Trial i of every task before trial i + 1 of any, so that an interrupted look at the bar covers all tasks."""
    for task in tasks:
        if first_init_state >= task.num_init_states:
            raise BadInput(
                f"--first-init-state {first_init_state}: task {task.task_id} has {task.num_init_states} initial states"
            )
    starts = [
        (task.task_id, first_init_state + trial % (task.num_init_states - first_init_state), number)
        for trial in range(trials)
        for number, task in enumerate(tasks)
    ]
    return [Episode(index, *start) for index, start in enumerate(starts)]


def print_table(tasks: Sequence[TaskInfo], trajectories: Sequence[Trajectory]) -> None:
    """Success of each task and of all, with Wilson 95 % intervals."""
    for task in tasks:
        own = [t for t in trajectories if t.episode.task_id == task.task_id]
        print(f"{task.task_id:>3}  {count(own)!s:<28}  {task.instruction}")
    print(f"all  {count(trajectories)}")


def video_name(trajectory: Trajectory) -> str:
    episode = trajectory.episode
    outcome = "success" if trajectory.success else "failure"
    return f"task_{episode.task_id}-init_state_{episode.init_state_id}-{outcome}"


def results(
    config: EvalConfig,
    mode: str,
    looks: str,
    tasks: Sequence[TaskInfo],
    trajectories: Sequence[Trajectory],
    argv: Sequence[str],
) -> dict:
    """The table and every episode, as plain data."""
    per_task = {
        task.task_id: {
            "name": task.name,
            **count([t for t in trajectories if t.episode.task_id == task.task_id]).metrics("success"),
        }
        for task in tasks
    }
    episodes = [
        {
            "task_id": t.episode.task_id,
            "init_state_id": t.episode.init_state_id,
            "success": t.success,
            "env_steps": t.env_steps,
            "decisions": len(t.decisions),
        }
        for t in trajectories
    ]
    return {
        "checkpoint": config.checkpoint,
        "task_suite": config.task_suite,
        "mode": mode,
        "temperature": config.temperature,
        "seed": config.seed,
        "assets": looks,
        "tasks": per_task,
        "all": count(trajectories).metrics("success"),
        "episodes": episodes,
        **provenance(argv),
    }


if __name__ == "__main__":
    sys.exit(main_guard("eval.py", main))
