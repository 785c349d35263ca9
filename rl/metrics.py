"""The numbers of an update under their wandb names (SPEC section 9), and as one readable line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rl.evaluation import count
from rl.phases import Phase, PhaseState
from rl.progress import duration
from rl.rollout import Collected
from rl.trajectory import Trajectory


def rollout_metrics(collected: Collected, phase: PhaseState, restarts: int) -> dict[str, float]:
    trajectories = collected.trajectories
    decisions = [d for t in trajectories for d in t.decisions]
    per_task = {
        f"rollout/success_rate_task_{task}": count([t for t in trajectories if t.episode.task_id == task]).rate
        for task in sorted({t.episode.task_id for t in trajectories})
    }
    return {
        "rollout/success_rate": count(trajectories).rate,
        **(per_task if len(per_task) > 1 else {}),
        "rollout/episode_length": collected.env_steps / len(trajectories),
        "rollout/trajectories": len(trajectories),
        "rollout/env_steps_per_s": collected.env_steps / collected.wall_s,
        "rollout/teacher_fraction": sum(d.by_teacher for d in decisions) / len(decisions),
        "rollout/epsilon": phase.epsilon,
        "rollout/errors": collected.errors,
        "rollout/worker_restarts": restarts,
        "rollout/time_s": collected.wall_s,
        "schedule/phase": list(Phase).index(phase.phase),
        "schedule/warmup_progress": phase.warmup_progress,
        "schedule/transition_progress": phase.transition_progress,
        **{f"time/{part}": seconds for part, seconds in collected.times.items()},
    }


def advantage_metrics(advantages: Tensor) -> dict[str, float]:
    """Of (N,) decision advantages."""
    return {
        "advantage/mean": advantages.mean().item(),
        "advantage/std": advantages.std(unbiased=False).item(),
        "advantage/min": advantages.min().item(),
        "advantage/max": advantages.max().item(),
        "advantage/nonzero_fraction": (advantages != 0).float().mean().item(),
    }


def system_metrics() -> dict[str, float]:
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"system/ram_gb": resident_pages * os.sysconf("SC_PAGE_SIZE") / 2**30}  # a curve that only rises is a leak
    if not torch.cuda.is_available():
        return found
    found["system/gpu_mem_gb"] = torch.cuda.max_memory_allocated() / 2**30
    with contextlib.suppress(ModuleNotFoundError):
        found["system/gpu_util"] = torch.cuda.utilization()
    return found


def trajectory_returns(trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """(M,) returns and (M,) group numbers."""
    returns = torch.tensor([t.success_return for t in trajectories])
    return returns, torch.tensor([t.episode.group for t in trajectories])


def update_line(
    metrics: dict[str, float], collected: Collected, phase: PhaseState, global_step: int, end: int, eta_s: float
) -> str:
    """One readable line per update."""
    if "distill/loss" in metrics:
        learning = f"distill loss {metrics['distill/loss']:.3f}, accuracy {metrics['distill/accuracy']:.3f}"
    elif "train/policy_loss" in metrics:
        learning = (
            f"policy loss {metrics['train/policy_loss']:+.4f}, KL {metrics['train/approx_kl']:.4f}, "
            f"clipped {metrics['train/clip_fraction']:.2f}"
        )
    else:
        learning = "no learning signal (all advantages 0)"
    successes = count(collected.trajectories)
    return (
        f"step {global_step}/{end}  {phase.phase.value:<10}  success {successes.k}/{successes.n}  {learning}  "
        f"rollout {duration(collected.wall_s)}, update {duration(metrics.get('train/time_s', 0.0))}, "
        f"{duration(max(0.0, eta_s))} to go"
    )
