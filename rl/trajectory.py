"""The records of the algorithm: decisions, trajectories, and the flat batch that an update learns from.

Dimension key: N decisions of the batch, M trajectories, A action tokens of a chunk (8 actions x 7 = 56).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.contracts import Observation


@dataclass(frozen=True)
class Episode:
    """What to play: enough to play it again identically."""

    index: int  # position in this rollout; with the update number it fixes all randomness of the episode
    task_id: int
    init_state_id: int
    group: int  # episodes with one group number share task and initial state

    def describe(self) -> str:
        return f"task {self.task_id}, initial state {self.init_state_id}"


@dataclass
class Decision:
    """One policy call. Only `executed` is unknown until the simulator has played the chunk."""

    observation: Any  # rl.contracts.Observation, its images uint8 on the CPU; None where it was not kept
    tokens: Tensor  # (A,) int64 token ids of the chunk that was executed
    by_teacher: bool
    student_logprobs: Tensor | None  # (A,) float32 at the sampling temperature; None in the warmup
    matches_teacher: Tensor | None  # (A,) bool: token equals the teacher's greedy one; only for behaviour importance
    executed: int = 0  # actions of the chunk that the simulator executed


@dataclass
class Trajectory:
    """One whole episode."""

    episode: Episode
    decisions: list[Decision] = field(default_factory=list)
    success: bool = False
    env_steps: int = 0  # settling not counted
    frames: list[np.ndarray] = field(default_factory=list)  # (256, 256, 3) uint8 per env step when recorded
    seconds: float = 0.0  # from its reset to its end, waiting for the policy included
    fault: str | None = None  # of the simulator, in an earlier attempt at this episode

    @property
    def success_return(self) -> float:
        """Undiscounted return of the sparse reward: 1 at success, else 0."""
        return float(self.success)


@dataclass(frozen=True)
class Batch:
    """All decisions of a rollout, one row each; no padded time axis.

    Two trajectories of 2 and 1 decisions give N = 3, M = 2, `trajectory` = [0, 0, 1], `steps_to_end` = [1, 0, 0].
    """

    observations: list[Observation]  # N observations
    tokens: Tensor  # (N, A) int64
    executed: Tensor  # (N, A) bool, True where the token's action was really executed
    student_logprobs: Tensor  # (N, A) float32, the student's at collection time (zeros in the warmup)
    matches_teacher: Tensor  # (N, A) bool
    by_teacher: Tensor  # (N,) bool
    trajectory: Tensor  # (N,) int64, row -> trajectory
    steps_to_end: Tensor  # (N,) int64, decisions that follow in the same trajectory

    def __len__(self) -> int:
        return len(self.observations)

    @property
    def trajectory_lengths(self) -> Tensor:
        """(M,) decisions of each trajectory."""
        return torch.bincount(self.trajectory)


def flatten(trajectories: Sequence[Trajectory], action_dim: int) -> Batch:
    """Trajectories as one flat batch. `action_dim` tokens make one action (7 for LIBERO)."""
    rows = [(i, t, d) for i, trajectory in enumerate(trajectories) for t, d in enumerate(trajectory.decisions)]
    decisions = [d for _, _, d in rows]
    num_tokens = len(decisions[0].tokens)
    executed_tokens = torch.tensor([d.executed * action_dim for d in decisions])
    zeros, false = torch.zeros(num_tokens), torch.zeros(num_tokens, dtype=torch.bool)
    return Batch(
        observations=[d.observation for d in decisions],
        tokens=torch.stack([d.tokens for d in decisions]),
        executed=torch.arange(num_tokens)[None, :] < executed_tokens[:, None],
        student_logprobs=torch.stack([zeros if d.student_logprobs is None else d.student_logprobs for d in decisions]),
        matches_teacher=torch.stack([false if d.matches_teacher is None else d.matches_teacher for d in decisions]),
        by_teacher=torch.tensor([d.by_teacher for d in decisions]),
        trajectory=torch.tensor([i for i, _, _ in rows]),
        steps_to_end=torch.tensor([len(trajectories[i].decisions) - 1 - t for i, t, _ in rows]),
    )
