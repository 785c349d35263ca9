"""Compute the metrics of an update, under their names in metrics.jsonl and wandb, and its line in the log."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from envs.perturb import NONE
from experiment.statistics import count_successes
from rl.phases import Phase, PhaseState

if TYPE_CHECKING:  # these import torch, which takes seconds, and `--help` does not need it
    from torch import Tensor

    from rl.rollout import Rollout
    from rl.trajectory import Trajectory


def rollout_metrics(
    rollout: Rollout, phase: PhaseState, task_probabilities: Mapping[int, float] | None = None
) -> dict[str, float]:
    """Metrics of a rollout. `task_probabilities`: task id -> probability with which --curriculum draws the task."""
    trajectories = rollout.trajectories
    by_teacher = [decision.by_teacher for trajectory in trajectories for decision in trajectory.decisions]
    metrics = {
        "rollout/success_rate": count_successes(trajectory.success for trajectory in trajectories).rate,
        **success_rates("rollout/success_rate", trajectories),
        "rollout/episode_length": rollout.env_steps / len(trajectories),
        "rollout/trajectories": len(trajectories),
        "rollout/env_steps_per_s": rollout.env_steps / rollout.wall_s,
        "rollout/teacher_fraction": sum(by_teacher) / len(by_teacher),
        "rollout/epsilon": phase.epsilon,
        "rollout/errors": rollout.errors,
        "rollout/time_s": rollout.wall_s,
        "schedule/phase": list(Phase).index(phase.phase),
        "schedule/warmup_progress": phase.warmup_progress,
        "schedule/transition_progress": phase.transition_progress,
    }
    for part, seconds in rollout.times.items():
        metrics[f"time/{part}"] = seconds
    if task_probabilities is not None:
        for task_id, probability in task_probabilities.items():
            metrics[f"curriculum/probability_task_{task_id}"] = probability
    return metrics


def success_rates(name: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Success rates by task and by kind of perturbation, under names that begin with `name`.

    Rates by task are left out if there is only one task, and so are rates by kind if there is only one kind.
    """
    by_task = _rates_by_group(name, ((f"task_{t.episode.task_id}", t) for t in trajectories))
    by_perturbation = _rates_by_group(name, ((_perturbation_kind(t), t) for t in trajectories))
    return by_task | by_perturbation


def _rates_by_group(name: str, labelled: Iterable[tuple[str, Trajectory]]) -> dict[str, float]:
    """The success rate of each label; empty if there is only one label."""
    outcomes: dict[str, list[bool]] = {}
    for label, trajectory in labelled:
        outcomes.setdefault(label, []).append(trajectory.success)
    if len(outcomes) <= 1:
        return {}
    return {f"{name}_{label}": count_successes(outcomes[label]).rate for label in sorted(outcomes)}


def _perturbation_kind(trajectory: Trajectory) -> str:
    perturbation = trajectory.episode.perturbation
    return NONE if perturbation is None else perturbation.kind


def advantage_metrics(advantages: Tensor) -> dict[str, float]:
    """Statistics of the (N,) advantages of a rollout's decisions."""
    return {
        "advantage/mean": advantages.mean().item(),
        "advantage/std": advantages.std(unbiased=False).item(),
        "advantage/min": advantages.min().item(),
        "advantage/max": advantages.max().item(),
        "advantage/nonzero_fraction": (advantages != 0).float().mean().item(),
    }


def system_metrics() -> dict[str, float]:
    """Main memory and peak GPU memory of this process in GiB; utilisation of the GPU in percent, if it can be read."""
    import torch

    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    # If this curve only rises, the program leaks memory.
    metrics = {"system/ram_gb": resident_pages * os.sysconf("SC_PAGE_SIZE") / 2**30}
    if torch.cuda.is_available():
        metrics["system/gpu_mem_gb"] = torch.cuda.max_memory_allocated() / 2**30
        with contextlib.suppress(Exception):  # fails without NVIDIA's library, and on a part of a GPU (MIG)
            metrics["system/gpu_util"] = torch.cuda.utilization()
    return metrics


def update_line(
    metrics: Mapping[str, float],
    rollout: Rollout,
    phase: PhaseState,
    global_step: int,
    total_steps: int,
    seconds: float,
) -> str:
    """The line that is logged for an update.

    `seconds`: wall time of this rollout and its update, from which the time to go is extrapolated.
    """
    successes = count_successes(trajectory.success for trajectory in rollout.trajectories)
    rollout_time = _whole_seconds(rollout.wall_s)
    update_time = _whole_seconds(metrics.get("train/time_s", 0))
    steps_to_go = max(0, total_steps - global_step)
    time_to_go = _whole_seconds(seconds / rollout.env_steps * steps_to_go)
    return (
        f"step {global_step}/{total_steps}  {phase.phase.value:<10}  success {successes.k}/{successes.n}  "
        f"{_what_was_learned(metrics)}  rollout {rollout_time}, update {update_time}, {time_to_go} to go"
    )


def _what_was_learned(metrics: Mapping[str, float]) -> str:
    """The main metrics of the loss that was minimised."""
    if "distill/loss" in metrics:
        return f"distill loss {metrics['distill/loss']:.3f}, accuracy {metrics['distill/accuracy']:.3f}"
    if "train/policy_loss" in metrics:
        return (
            f"policy loss {metrics['train/policy_loss']:+.4f}, KL {metrics['train/approx_kl']:.4f}, "
            f"clipped {metrics['train/clip_fraction']:.2f}"
        )
    return "no learning signal (all advantages 0)"


def _whole_seconds(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
