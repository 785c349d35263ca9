"""Compute the metrics of an update, under their names in metrics.jsonl and wandb, and its line in the log."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from configs.config import TrainConfig
from contracts import GIB
from experiment.statistics import count_successes, rates_by_task
from experiment.terminal import duration
from rl.phases import Phase, PhaseState
from rl.rollout import Rollout
from rl.trajectory import Trajectory


def rollout_metrics(
    rollout: Rollout, phase: PhaseState, task_probabilities: Mapping[int, float] | None = None
) -> dict[str, float]:
    """Metrics of a rollout. `task_probabilities`: task id -> probability with which --curriculum draws the task."""
    trajectories = rollout.trajectories
    outcomes = [(trajectory.episode.task_id, trajectory.success) for trajectory in trajectories]
    by_teacher = [decision.by_teacher for trajectory in trajectories for decision in trajectory.decisions]
    metrics = {
        **rates_by_task("rollout/success_rate", outcomes),
        "rollout/episode_length": rollout.env_steps / len(trajectories),
        "rollout/trajectories": len(trajectories),
        "rollout/env_steps_per_s": rollout.env_steps / rollout.wall_s,
        "rollout/teacher_fraction": sum(by_teacher) / len(by_teacher),
        "rollout/epsilon": phase.epsilon_start,
        "rollout/errors": rollout.errors,
        "rollout/time_s": rollout.wall_s,
        "schedule/phase": list(Phase).index(phase.phase),
    }
    for part, seconds in rollout.times.items():
        metrics[f"time/{part}"] = seconds
    for task_id, probability in (task_probabilities or {}).items():
        metrics[f"curriculum/probability_task_{task_id}"] = probability
    return metrics


def advantage_metrics(advantages: Tensor) -> dict[str, float]:
    """Statistics of the (N,) advantages of a rollout's decisions."""
    return {
        "advantage/mean": advantages.mean().item(),
        "advantage/std": advantages.std(unbiased=False).item(),
        "advantage/min": advantages.min().item(),
        "advantage/max": advantages.max().item(),
    }


def system_metrics() -> dict[str, float]:
    """Main memory and peak GPU memory of this process in GiB."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    # If this curve only rises, the program leaks memory.
    metrics = {"system/ram_gb": resident_pages * os.sysconf("SC_PAGE_SIZE") / GIB}
    if torch.cuda.is_available():
        metrics["system/gpu_mem_gb"] = torch.cuda.max_memory_allocated() / GIB
    return metrics


def update_line(
    metrics: Mapping[str, float],
    rollout: Rollout,
    phase: PhaseState,
    global_step: int,
    config: TrainConfig,
    seconds_left: float,
) -> str:
    """The line that the screen shows for an update, of at most 80 characters."""
    successes = count_successes(trajectory.success for trajectory in rollout.trajectories)
    parts = [
        f"{global_step:,}/{config.phases.total_steps:,}",
        f"success {successes.k}/{successes.n} = {100 * successes.rate:.0f} %",
    ]
    if phase.phase is not Phase.RL:
        parts.append(phase.phase.value)
    if "distill/loss" in metrics:
        parts.append(f"{100 * metrics['distill/accuracy']:.0f} % as teacher")
    elif "train/policy_loss" in metrics:
        if "train/approx_kl" in metrics:
            parts.append(f"KL {metrics['train/approx_kl']:.2g}")
    else:
        parts.append("nothing learned")
    parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def why_nothing_was_learned(rollout: Rollout, trajectories: Sequence[Trajectory], config: TrainConfig) -> str:
    """Why all advantages of an update were 0, and what to do. `trajectories`: those of the rollout to learn from."""
    outcomes = {trajectory.success for trajectory in rollout.trajectories}
    if outcomes == {False}:
        reason = "all episodes failed: lower --temperature, or lengthen the warmup"
    elif outcomes == {True}:
        reason = "all episodes succeeded: choose harder --task-ids, or raise --temperature"
    elif not trajectories:
        reason = "no group had a success rate within --group-success-bounds: raise --group-size"
    else:
        reason = f"--advantage {config.loss.advantage} compared only equal episodes: raise --group-size or --n-steps"
    return f"this update learned nothing, because {reason}, if this goes on"
