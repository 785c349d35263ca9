"""What the algorithm asks of the policy and of the simulators: all that `rl` knows of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

TeacherMode = Literal["greedy", "l1"]
Mode = Literal["greedy", "sample", "l1"]


class Observation(Protocol):
    """What a policy decides on. Images stay uint8 on the CPU until the forward pass."""

    @property
    def images(self) -> np.ndarray: ...
    @property
    def proprio(self) -> np.ndarray: ...
    @property
    def instruction(self) -> str: ...
    @property
    def prepared(self) -> bool: ...


class Acted(Protocol):
    """A chunk per observation, on the CPU."""

    @property
    def tokens(self) -> Tensor: ...  # (B, A) int64
    @property
    def logprobs(self) -> Tensor: ...  # (B, A) float32
    @property
    def actions(self) -> np.ndarray: ...  # (B, chunk_length, action_dim) float64, ready for the env


class Policy(Protocol):
    """`vla.policy.Policy` as rollouts and updates use it."""

    action_dim: int
    chunk_length: int
    num_images: int

    @property
    def device(self) -> torch.device: ...
    @property
    def devices(self) -> Sequence[torch.device]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def hidden_dim(self) -> int: ...

    def act(
        self,
        observations: Sequence[Observation],
        mode: Mode = "greedy",
        temperature: float = 1.0,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Acted: ...
    def chunk_logits(self, observations: Sequence[Observation]) -> Tensor: ...
    def chunk_outputs(self, observations: Sequence[Observation]) -> tuple[Tensor, Tensor | None]: ...
    @property
    def token_logprobs(self) -> Callable[[Tensor, Tensor, float], Tensor]: ...
    def actions(self, tokens: np.ndarray) -> np.ndarray: ...
    def view(self, observation: Observation) -> np.ndarray: ...
    def teacher(self) -> AbstractContextManager[None]: ...
    def keeping_step(self) -> AbstractContextManager[None]: ...
    def named_trainable_parameters(self) -> list[tuple[str, nn.Parameter]]: ...
    def reduce_gradients(self) -> None: ...
    def parameters_changed(self) -> None: ...
    def save_adapter(self, folder: Path, samples: Sequence[Observation] = ()) -> None: ...
    def load_adapter(self, folder: Path) -> None: ...


class StepResult(Protocol):
    """Outcome of a reset or of a chunk: `envs.libero.ChunkResult`."""

    @property
    def observation(self) -> Observation | None: ...  # None when the episode is over
    @property
    def success(self) -> bool: ...
    @property
    def executed(self) -> int: ...  # actions of this chunk
    @property
    def env_steps(self) -> int: ...  # of the episode so far
    @property
    def done(self) -> bool: ...
    @property
    def error(self) -> str | None: ...  # a fault of the simulator, which is no failure of the policy
    @property
    def sim_s(self) -> float: ...
    @property
    def render_s(self) -> float: ...
    @property
    def preprocess_s(self) -> float: ...
    @property
    def frames(self) -> list[np.ndarray]: ...


class Pool(Protocol):
    """Envs side by side: `envs.pool`. Results come as they are ready, by slot."""

    restarts: int  # simulators rebuilt after a fault

    @property
    def num_slots(self) -> int: ...
    def reset(self, slot: int, task_id: int, init_state_id: int, seed: int = 0, record: bool = False) -> None: ...
    def step(self, slot: int, actions: np.ndarray) -> None: ...
    def ready(self, timeout_s: float | None = None) -> Sequence[tuple[int, StepResult]]: ...
