"""What an update reports: a progress bar, its numbers under their wandb names, and one readable line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from rl.phases import Phase, PhaseState
from rl.results import count
from rl.rollout import Rollout


@contextlib.contextmanager
def progress_bar(description: str, total: int | None, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing in a log file. Yields a function to call with how many things were done since."""
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)


def duration(seconds: float) -> str:
    """A time span as people write it: `45 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def rollout_metrics(played: Rollout, phase: PhaseState, restarts: int) -> dict[str, float]:
    trajectories = played.trajectories
    decisions = [d for t in trajectories for d in t.decisions]
    per_task = {
        f"rollout/success_rate_task_{task}": count([t for t in trajectories if t.episode.task_id == task]).rate
        for task in sorted({t.episode.task_id for t in trajectories})
    }
    return {
        "rollout/success_rate": count(trajectories).rate,
        **(per_task if len(per_task) > 1 else {}),
        "rollout/episode_length": played.env_steps / len(trajectories),
        "rollout/trajectories": len(trajectories),
        "rollout/env_steps_per_s": played.env_steps / played.wall_s,
        "rollout/teacher_fraction": sum(d.by_teacher for d in decisions) / len(decisions),
        "rollout/epsilon": phase.epsilon,
        "rollout/errors": played.errors,
        "rollout/worker_restarts": restarts,
        "rollout/time_s": played.wall_s,
        "schedule/phase": list(Phase).index(phase.phase),
        "schedule/warmup_progress": phase.warmup_progress,
        "schedule/transition_progress": phase.transition_progress,
        **{f"time/{part}": seconds for part, seconds in played.times.items()},
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
    if torch.cuda.is_available():
        found["system/gpu_mem_gb"] = torch.cuda.max_memory_allocated() / 2**30
        with contextlib.suppress(ModuleNotFoundError):  # of NVIDIA's library
            found["system/gpu_util"] = torch.cuda.utilization()
    return found


def update_line(
    metrics: dict[str, float], played: Rollout, phase: PhaseState, global_step: int, end: int, eta_s: float
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
    successes = count(played.trajectories)
    return (
        f"step {global_step}/{end}  {phase.phase.value:<10}  success {successes.k}/{successes.n}  {learning}  "
        f"rollout {duration(played.wall_s)}, update {duration(metrics.get('train/time_s', 0.0))}, "
        f"{duration(max(0.0, eta_s))} to go"
    )
