"""The data of the algorithm: episodes, decisions, trajectories, and the flat batch that an update learns from.

Dimension key: N decisions of the batch, M trajectories, A action tokens of a chunk (8 actions x 7 = 56), V token ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contracts import Observation


@dataclass(frozen=True)
class Episode:
    """What to play, with all that is needed to play it again identically."""

    index: int  # position in the rollout; together with the update index it fixes all random draws of the episode
    task_id: int
    init_state_id: int | None  # one of the benchmark's initial states; None: a fresh one, placed by `seed`
    group: int  # episodes of one group share task and initial state
    # Of LIBERO's placement sampler. With one of the benchmark's initial states it places only the fixtures.
    seed: int = 0
    group_of_task: int = 0  # number of the group among those of its task in the run, from 0

    def describe(self) -> str:
        """The episode in words, for messages."""
        start = f"fresh ({self.seed})" if self.init_state_id is None else f"{self.init_state_id}"
        return f"task {self.task_id}, initial state {start}"


@dataclass
class Decision:
    """One decision of the policy: a chunk. `executed` is set when the simulator has played it."""

    observation: Observation | None  # its images uint8 on the CPU; None in an evaluation, which drops it
    tokens: Tensor  # (A,) int64 token ids of the chunk that was sent to the simulator
    by_teacher: bool
    # (A,) float32 at the sampling temperature; None where the teacher decided in the warmup
    student_logprobs: Tensor | None = None
    # What the policy's frozen trunk computed for the observation (`vla.kept_states`), until an update has used it; None
    # where all of the network is trained, and in an evaluation
    kept: Tensor | None = None
    executed: int = 0  # how many of the chunk's actions the simulator executed


@dataclass
class Trajectory:
    """An episode as it was played."""

    episode: Episode
    decisions: list[Decision] = field(default_factory=list)
    success: bool = False  # also its return: the reward is 1 at success, else 0
    env_steps: int = 0  # without the settling steps at the start
    frames: list[np.ndarray] = field(default_factory=list)  # (256, 256, 3) uint8 per env step when recorded
    seconds: float = 0.0  # from reset to end, including the time it waited for the policy
    fault: str | None = None  # the simulator's error in an earlier attempt at this episode


@dataclass(frozen=True)
class Batch:
    """Decisions of a rollout, one row each; no padded time axis.

    Two trajectories of 2 and 1 decisions give N = 3, M = 2, `trajectory` = [0, 0, 1], `steps_to_end` = [1, 0, 0].
    `flatten` sets advantages to 0, and gives all executed tokens the same weight. Later `rl.advantages` computes the
    advantages and the weights that suit them, and `rl.update` the teacher_logprobs.
    """

    observations: list[Observation]  # N observations
    kept: list[Tensor | None]  # N hidden states of a frozen trunk, see `Decision`; they stay where they are
    tokens: Tensor  # (N, A) int64
    executed: Tensor  # (N, A) bool, True where the token's action was executed
    # (N, A) float32, of the student that played the rollout; zeros for the teacher's decisions in a warmup
    student_logprobs: Tensor
    by_teacher: Tensor  # (N,) bool
    trajectory: Tensor  # (N,) int64, index of the row's trajectory
    steps_to_end: Tensor  # (N,) int64, number of decisions that follow in the same trajectory
    advantages: Tensor  # (N,) float32
    weights: Tensor  # (N,) float32, of the rows in the loss, with mean 1
    teacher_logprobs: Tensor | None = None  # (N, A, V) float32, always on the CPU: it may be gigabytes

    def __len__(self) -> int:
        return len(self.observations)

    def __getitem__(self, rows: slice | Tensor) -> Batch:
        """Select rows: a slice gives views of the tensors, an index tensor gives copies."""
        indices = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
        observations = [self.observations[index] for index in indices]
        kept = [self.kept[index] for index in indices]
        columns = {name: column[rows] for name, column in self.columns().items()}
        return replace(self, observations=observations, kept=kept, **columns)

    def split(self, size: int | Sequence[int]) -> Iterator[Batch]:
        """Split into consecutive parts of `size` rows (the last may have fewer), or of the sizes in a list."""
        sizes = [size] * -(-len(self) // size) if isinstance(size, int) else size
        for end, part_size in zip(itertools.accumulate(sizes), sizes, strict=True):
            yield self[end - part_size : end]

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on `device`, where rows can be selected without waiting for the CPU."""
        columns = self.columns()
        columns.pop("teacher_logprobs", None)  # it stays on the CPU
        return replace(self, **{name: column.to(device) for name, column in columns.items()})

    def columns(self) -> dict[str, Any]:
        """The fields that are tensors."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def flatten(trajectories: Sequence[Trajectory], action_dim: int) -> Batch:
    """Join trajectories into one flat batch. `action_dim` tokens make one action (7 for LIBERO)."""
    decisions = [decision for trajectory in trajectories for decision in trajectory.decisions]
    lengths = torch.tensor([len(trajectory.decisions) for trajectory in trajectories])
    observations = [decision.observation for decision in decisions if decision.observation is not None]
    assert len(observations) == len(decisions)
    num_tokens = len(decisions[0].tokens)
    executed_tokens = torch.tensor([decision.executed * action_dim for decision in decisions])
    executed = torch.arange(num_tokens)[None, :] < executed_tokens[:, None]
    zeros = torch.zeros(num_tokens)
    logprobs = [zeros if d.student_logprobs is None else d.student_logprobs for d in decisions]
    return Batch(
        observations=observations,
        kept=[decision.kept for decision in decisions],
        tokens=torch.stack([decision.tokens for decision in decisions]),
        executed=executed,
        student_logprobs=torch.stack(logprobs),
        by_teacher=torch.tensor([decision.by_teacher for decision in decisions]),
        trajectory=torch.arange(len(lengths)).repeat_interleave(lengths),
        steps_to_end=torch.cat([torch.arange(int(length)).flip(0) for length in lengths]),
        advantages=torch.zeros(len(decisions)),
        weights=token_weights(executed),
    )


def token_weights(executed: Tensor) -> Tensor:
    """The weights (N,) of the decisions, with mean 1, that give the same weight to all executed tokens.

    A decision's loss is a mean over its executed tokens. So its weight is proportional to their number: a chunk that
    the end of the episode cut short weighs less.
    """
    tokens = executed.sum(-1)
    return tokens * len(tokens) / tokens.sum()
