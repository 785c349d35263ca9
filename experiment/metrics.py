"""What a run counts and reports: success rates with their intervals, an update's numbers under their wandb names."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from envs.perturb import NONE
from rl.phases import Phase, PhaseState

if TYPE_CHECKING:  # eval.py answers --help without them
    from torch import Tensor

    from rl.rollout import Rollout
    from rl.trajectory import Trajectory

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
        """Wilson's score interval of the rate, 95 % (Wilson 1927)."""
        rate, n = self.rate, self.n
        centre = (rate + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(rate * (1 - rate) / n + Z * Z / (4 * n * n))
        return (0.0 if self.k == 0 else centre - half), (1.0 if self.k == n else centre + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.k}/{self.n} = {100 * self.rate:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"

    def metrics(self, name: str) -> dict[str, float]:
        low, high = self.interval
        return {
            name: self.rate,
            f"{name}_k": self.k,
            f"{name}_n": self.n,
            f"{name}_low": low,
            f"{name}_high": high,
        }


def count(trajectories: Sequence[Trajectory]) -> Successes:
    return Successes(sum(t.success for t in trajectories), len(trajectories))


def rates(name: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The success rates of each task, and of each kind of perturbation, where there are several."""
    found = {}
    for parts in (
        [f"task_{t.episode.task_id}" for t in trajectories],
        [NONE if t.episode.perturbation is None else t.episode.perturbation.kind for t in trajectories],
    ):
        for part in sorted(set(parts)) if len(set(parts)) > 1 else ():
            own = [t for t, of in zip(trajectories, parts, strict=True) if of == part]
            found[f"{name}_{part}"] = count(own).rate
    return found


@contextlib.contextmanager
def progress_bar(description: str, total: int | None, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing in a log file. Yields a function to call with how many things were done since."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=not (shown and sys.stdout.isatty())) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)


def rollout_metrics(
    played: Rollout, phase: PhaseState, preferred: Mapping[int, float] | None = None
) -> dict[str, float]:
    """`preferred`: with --curriculum, the probability of each task."""
    trajectories = played.trajectories
    by_teacher = [decision.by_teacher for trajectory in trajectories for decision in trajectory.decisions]
    return {
        "rollout/success_rate": count(trajectories).rate,
        **rates("rollout/success_rate", trajectories),
        "rollout/episode_length": played.env_steps / len(trajectories),
        "rollout/trajectories": len(trajectories),
        "rollout/env_steps_per_s": played.env_steps / played.wall_s,
        "rollout/teacher_fraction": sum(by_teacher) / len(by_teacher),
        "rollout/epsilon": phase.epsilon,
        "rollout/errors": played.errors,
        "rollout/time_s": played.wall_s,
        "schedule/phase": list(Phase).index(phase.phase),
        "schedule/warmup_progress": phase.warmup_progress,
        "schedule/transition_progress": phase.transition_progress,
        **{f"time/{part}": seconds for part, seconds in played.times.items()},
        **{f"curriculum/probability_task_{task_id}": p for task_id, p in (preferred or {}).items()},
    }


def advantage_metrics(advantages: Tensor) -> dict[str, float]:
    """Of (N,) decision advantages."""
    found = {"mean": advantages.mean(), "std": advantages.std(unbiased=False), "min": advantages.min()}
    found |= {"max": advantages.max(), "nonzero_fraction": (advantages != 0).float().mean()}
    return {f"advantage/{name}": value.item() for name, value in found.items()}


def system_metrics() -> dict[str, float]:
    import torch

    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {
        "system/ram_gb": resident_pages * os.sysconf("SC_PAGE_SIZE") / 2**30
    }  # a curve that only rises is a leak
    if torch.cuda.is_available():
        found["system/gpu_mem_gb"] = torch.cuda.max_memory_allocated() / 2**30
        with contextlib.suppress(Exception):  # without NVIDIA's library, or on a part of a GPU
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
    seconds = played.wall_s, metrics.get("train/time_s", 0), max(0, eta_s)
    rollout, update, rest = (timedelta(seconds=round(part)) for part in seconds)
    return (
        f"step {global_step}/{end}  {phase.phase.value:<10}  success {successes.k}/{successes.n}  "
        f"{learning.format_map(metrics)}  rollout {rollout}, update {update}, {rest} to go"
    )
