"""What a run counts and reports: success rates with their intervals, an update's numbers under their wandb names."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rl.phases import Phase, PhaseState

if TYPE_CHECKING:  # eval.py answers --help without them
    from torch import Tensor

    from rl.rollout import Rollout

Z = 1.959963984540054  # of 95 % intervals


@dataclass(frozen=True)
class Successes:
    """k successes of n episodes."""

    k: int
    n: int

    @property
    def rate(self) -> float:
        return self.k / self.n

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.k, self.n)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.k}/{self.n} = {100 * self.rate:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"

    def metrics(self, name: str) -> dict[str, float]:
        low, high = self.interval
        return {name: self.rate, f"{name}_k": self.k, f"{name}_n": self.n, f"{name}_low": low, f"{name}_high": high}


def count(trajectories: Sequence[Any]) -> Successes:
    return Successes(sum(t.success for t in trajectories), len(trajectories))


def wilson_interval(k: int, n: int) -> tuple[float, float]:
    """Wilson's score interval of a success rate, 95 % (Wilson 1927)."""
    if n == 0:
        return 0.0, 1.0
    rate = k / n
    centre = (rate + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(rate * (1 - rate) / n + Z * Z / (4 * n * n))
    return (0.0 if k == 0 else centre - half), (1.0 if k == n else centre + half)


@contextlib.contextmanager
def progress_bar(description: str, total: int | None, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing in a log file. Yields a function to call with how many things were done since."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not (shown and sys.stdout.isatty())) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)


def rollout_metrics(played: Rollout, phase: PhaseState, restarts: int) -> dict[str, float]:
    trajectories = played.trajectories
    by_teacher = [decision.by_teacher for trajectory in trajectories for decision in trajectory.decisions]
    tasks = sorted({trajectory.episode.task_id for trajectory in trajectories})
    per_task = {
        f"rollout/success_rate_task_{task}": count([t for t in trajectories if t.episode.task_id == task]).rate
        for task in tasks
        if len(tasks) > 1
    }
    return {
        "rollout/success_rate": count(trajectories).rate,
        **per_task,
        "rollout/episode_length": played.env_steps / len(trajectories),
        "rollout/trajectories": len(trajectories),
        "rollout/env_steps_per_s": played.env_steps / played.wall_s,
        "rollout/teacher_fraction": sum(by_teacher) / len(by_teacher),
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
    import torch

    if torch.cuda.is_available():
        found["system/gpu_mem_gb"] = torch.cuda.max_memory_allocated() / 2**30
        with contextlib.suppress(ModuleNotFoundError):  # of NVIDIA's library
            found["system/gpu_util"] = torch.cuda.utilization()
    return found


def update_line(
    metrics: dict[str, float], played: Rollout, phase: PhaseState, global_step: int, end: int, eta_s: float
) -> str:
    learning = "no learning signal (all advantages 0)"
    if "distill/loss" in metrics:
        learning = "distill loss {distill/loss:.3f}, accuracy {distill/accuracy:.3f}"
    elif "train/policy_loss" in metrics:
        learning = "policy loss {train/policy_loss:+.4f}, KL {train/approx_kl:.4f}, clipped {train/clip_fraction:.2f}"
    successes = count(played.trajectories)
    rollout, update, rest = (
        timedelta(seconds=round(seconds)) for seconds in (played.wall_s, metrics.get("train/time_s", 0), max(0, eta_s))
    )
    return (
        f"step {global_step}/{end}  {phase.phase.value:<10}  success {successes.k}/{successes.n}  "
        f"{learning.format_map(metrics)}  rollout {rollout}, update {update}, {rest} to go"
    )
