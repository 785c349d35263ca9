"""A policy, a simulator pool and records, small enough to reason about; they keep the contracts of the real ones.

The policy is a torch module of a few hundred numbers with real gradients; the pool plays scripted episodes in any order
of completion. A chunk has 4 actions of 2 tokens: A = 8, V = 256.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from contracts import Observation
from envs.env import Start
from rl.trajectory import Batch, Decision, Episode, Trajectory, flatten
from vla.optimizer import make_optimizer
from vla.tokens import median_tokens

CHUNK_LENGTH, ACTION_DIM = 4, 2
NUM_TOKENS, NUM_BINS = CHUNK_LENGTH * ACTION_DIM, 256
NUM_FEATURES = 3
FIRST_ACTION_TOKEN = 31744


def observation(*features: float) -> Observation:
    """The simulator's state is what the robot feels."""
    images, proprio = np.zeros((1, 2, 2, 3), dtype=np.uint8), np.array(features, dtype=np.float64)
    return Observation(images, proprio, "do it", state=proprio.astype(np.float32))


def random_observations(count: int, seed: int = 0) -> list[Observation]:
    rng = np.random.default_rng(seed)
    return [observation(*rng.normal(size=NUM_FEATURES)) for _ in range(count)]


@dataclass(frozen=True)
class Acted:
    tokens: Tensor
    logprobs: Tensor
    actions: np.ndarray
    kept: Sequence[Tensor | None]


class FakePolicy(nn.Module):
    """Logits are a frozen linear map of the features plus a trainable one (the "adapter").

    The features are what a frozen trunk would keep.
    """

    chunk_length = CHUNK_LENGTH
    action_dim = ACTION_DIM
    num_images = 1
    action_head = None
    frozen_weights = "float32"
    device = torch.device("cpu")
    base_fingerprint = "fake"
    model_inputs = SimpleNamespace(prepare_images=None, images_of=lambda observation: observation.images)
    few_sizes = False
    kept_on = torch.device("cpu")
    info = SimpleNamespace(weights_folder=Path("fake"), uses_proprio=True)

    _teacher: FakePolicy | None = None  # None: itself without its adapter

    def __init__(self, seed: int = 0, sharpness: float = 2.0, adapter_scale: float = 0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_TOKENS * NUM_BINS, NUM_FEATURES)
        self.register_buffer("base", sharpness * torch.randn(shape, generator=generator))
        self.adapter = nn.Parameter(adapter_scale * torch.randn(shape, generator=generator))
        self.bias = nn.Parameter(torch.zeros(shape[0]))
        self.rows_run = 0  # observations that went through chunk_logits
        self.modes: list[tuple[str, int]] = []  # (who decided how, batch size) of each call of act
        self._is_teacher = False

    def chunk_logits(self, observations: Sequence[Any], kept: Sequence[Any] | None = None) -> Tensor:
        self.rows_run += len(observations)
        return self._logits(self._features(observations, kept))

    def _features(self, observations: Sequence[Any], kept: Sequence[Any] | None) -> Tensor:
        features = torch.tensor(np.stack([o.proprio for o in observations]), dtype=torch.float32)
        known = [None] * len(observations) if kept is None else kept
        return torch.stack(
            [row if states is None else states for row, states in zip(features, known, strict=True)]
        )

    def _logits(self, features: Tensor) -> Tensor:
        # Products and short sums, no matrix product: a row's bits do not depend on the batch around it.
        logits = (features[:, None, :] * self.base).sum(-1)
        if not self._is_teacher:
            logits = logits + (features[:, None, :] * self.adapter).sum(-1) + self.bias
        return logits.view(len(features), NUM_TOKENS, NUM_BINS)

    @torch.no_grad()
    def act(
        self,
        observations: Sequence[Any],
        mode: str = "greedy",
        temperature: float = 1.0,
        generators: Sequence[torch.Generator] | None = None,
        kept: Sequence[Any] | None = None,
    ) -> Acted:
        self.modes.append((f"teacher {mode}" if self._is_teacher else f"student {mode}", len(observations)))
        features = self._features(observations, kept)
        logits = self._logits(features)
        if mode == "sample":
            probabilities = (logits / temperature).softmax(-1)
            draws = [
                torch.multinomial(p, 1, generator=g)[:, 0]
                for p, g in zip(probabilities, generators, strict=True)
            ]
            tokens = torch.stack(draws) + FIRST_ACTION_TOKEN
        elif mode == "median":
            tokens = median_tokens(logits)
        else:
            tokens = logits.argmax(-1) + FIRST_ACTION_TOKEN
        actions = (tokens - FIRST_ACTION_TOKEN).double().numpy() / 128 - 1
        actions = actions.reshape(len(tokens), CHUNK_LENGTH, ACTION_DIM)
        logprobs = self.token_logprobs(logits, tokens, temperature)
        return Acted(tokens, logprobs, actions, list(features))

    @staticmethod
    def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        columns = (tokens - FIRST_ACTION_TOKEN)[..., None]
        return (logits / temperature).log_softmax(-1).gather(-1, columns).squeeze(-1)

    def act_as_teacher(
        self, observations: Sequence[Any], mode: str = "greedy", kept: Sequence[Any] | None = None
    ) -> Acted:
        with self.teacher() as teacher:
            return teacher.act(observations, mode, kept=kept)

    def teacher_logits(self, observations: Sequence[Any], kept: Sequence[Any] | None = None) -> Tensor:
        with self.teacher() as teacher:
            return teacher.chunk_logits(observations, kept)

    def use_teacher(self, teacher: FakePolicy) -> None:
        object.__setattr__(self, "_teacher", teacher)  # torch would make it a part of this module

    @contextmanager
    def teacher(self) -> Iterator[FakePolicy]:
        if self._teacher is not None:
            yield self._teacher
            return
        before, self._is_teacher = self._is_teacher, True
        try:
            yield self
        finally:
            self._is_teacher = before

    def equals_teacher(self) -> bool:
        return self._teacher is None and not self.adapter.any() and not self.bias.any()

    @property
    def network(self) -> FakePolicy:
        return self

    is_compiled = False

    def recompute_everything(self) -> bool:
        return False

    def make_optimizer(self, lr: float, weight_decay: float) -> torch.optim.AdamW:
        return make_optimizer([p for _, p in self.named_trainable_parameters()], lr, weight_decay)

    def named_trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [("adapter", self.adapter), ("bias", self.bias)]

    def save_adapter(self, folder: str | Path, looks: str = "") -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, parameter in self.named_trainable_parameters():
            np.save(Path(folder) / f"{name}.npy", parameter.detach().numpy())

    def load_adapter(self, folder: str | Path) -> None:
        for name, parameter in self.named_trainable_parameters():
            parameter.data.copy_(torch.from_numpy(np.load(Path(folder) / f"{name}.npy")))

    def describe(self) -> list[tuple[str, str]]:
        return [("kind", "fake")]


def is_in_a_graph(parameter: Tensor) -> bool:
    """Whether an autograd graph that uses the parameter is alive, before or after its backward pass.

    Such a graph keeps the node alive that adds up the parameter's gradient. Without a graph, torch makes a new node
    each time that it is asked for one, so a mark on the first is not on the second.
    """
    get_gradient_edge(parameter).node.metadata["mark"] = True
    return get_gradient_edge(parameter).node.metadata.pop("mark", False)


def adamw(policy: FakePolicy, lr: float = 1e-2, weight_decay: float = 0.01) -> torch.optim.AdamW:
    return policy.make_optimizer(lr, weight_decay)


def parameters_of(policy: FakePolicy) -> list[Tensor]:
    """Copies of the trainable parameters."""
    return [p.detach().clone() for _, p in policy.named_trainable_parameters()]


@dataclass(frozen=True)
class Script:
    """How the episode of one (task, initial state) goes."""

    env_steps: int
    success: bool = False
    faults: int = 0  # attempts that end in a simulator fault before one goes through
    fault_after: int = 0  # chunks that a faulty attempt plays first (0: the reset itself fails)


@dataclass(frozen=True)
class FakeResult:
    """The fields of envs.env.ChunkResult."""

    observation: Observation | None
    success: bool
    executed: int
    env_steps: int
    done: bool
    error: str | None = None
    sim_s: float = 0.25
    render_s: float = 0.125
    frames: list[np.ndarray] = field(default_factory=list)
    preprocess_s: float = 0.0625


@dataclass
class _Slot:
    task_id: int
    init_state_id: int
    script: Script
    attempt: int
    record: bool
    env_steps: int = 0
    chunks: int = 0
    actions: np.ndarray | None = None  # of the request under way; None: a reset


class FakePool:
    """The Pool contract over scripts. `order_seed` shuffles which results come when (None: all at once, by slot)."""

    def __init__(
        self, script: Callable[[int, int], Script], num_slots: int = 1, order_seed: int | None = None
    ):
        self.num_slots = num_slots
        self.started: list[tuple[int, int]] = []  # (task, initial state) of every reset
        self.physics: list[str] = []  # of every reset
        self.received: dict[
            tuple[int, int, int], list[np.ndarray]
        ] = {}  # (task, initial state, attempt) -> actions
        self._script = script
        self._attempts: dict[tuple[int, int], int] = {}
        self._slots: dict[int, _Slot] = {}
        self._busy: list[int] = []
        self._order = None if order_seed is None else np.random.default_rng(order_seed)

    def reset(self, slot: int, task_id: int, start: Start) -> None:
        init_state_id = start.seed % 1000 if start.init_state_id is None else start.init_state_id
        assert slot not in self._busy, "the slot is still at work"
        key = (task_id, init_state_id)
        self.started.append(key)
        self.physics.append(start.physics)
        self._attempts[key] = attempt = self._attempts.get(key, 0) + 1
        self._slots[slot] = _Slot(task_id, init_state_id, self._script(*key), attempt, start.record)
        self._busy.append(slot)

    def step(self, slot: int, actions: np.ndarray) -> None:
        assert slot not in self._busy, "the slot is still at work"
        now = self._slots[slot]  # KeyError: no episode is running
        now.actions = actions
        self.received.setdefault((now.task_id, now.init_state_id, now.attempt), []).append(actions)
        self._busy.append(slot)

    def ready(self, timeout_s: float | None = None) -> list[tuple[int, FakeResult]]:
        assert self._busy or timeout_s is not None, "nothing is under way: waiting would never end"
        if not self._busy:
            return []
        answered = sorted(self._busy)
        if self._order is not None:
            count = int(self._order.integers(1, len(answered) + 1))
            answered = self._order.permutation(answered)[:count].tolist()
        self._busy = [slot for slot in self._busy if slot not in answered]
        return [(slot, self._play(slot)) for slot in answered]

    def _play(self, slot: int) -> FakeResult:
        now = self._slots[slot]
        if now.attempt <= now.script.faults and now.chunks == now.script.fault_after:
            del self._slots[slot]
            return FakeResult(None, False, 0, now.env_steps, done=True, error="planted fault")
        if now.actions is None:
            return FakeResult(self._observe(now), False, 0, 0, done=False)
        executed = min(len(now.actions), now.script.env_steps - now.env_steps)
        now.env_steps += executed
        now.chunks += 1
        done = now.env_steps == now.script.env_steps
        frames = [np.full((16, 16, 3), now.env_steps, dtype=np.uint8)] * executed if now.record else []
        if done:
            del self._slots[slot]
        return FakeResult(
            None if done else self._observe(now),
            done and now.script.success,
            executed,
            now.env_steps,
            done,
            None,
            frames=frames,
        )

    def _observe(self, now: _Slot) -> Observation:
        """Depends on the whole past of the episode, so one other draw changes everything that follows."""
        moved = 0.0 if now.actions is None else float(np.tanh(now.actions.sum()))
        return observation(
            math.sin(1 + now.init_state_id + now.env_steps), math.cos(now.task_id) + 0.5, moved
        )

    def close(self) -> None:
        pass

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def trajectory(
    length: int,
    success: bool = False,
    group: int = 0,
    index: int = 0,
    task_id: int = 0,
    last_executed: int | None = None,
) -> Trajectory:
    """A record of `length` decisions without contents; the last one executed `last_executed` of its actions."""
    executed = [CHUNK_LENGTH] * length
    executed[-1] = last_executed or CHUNK_LENGTH
    decisions = [
        Decision(
            observation(i, length, 1), torch.full((NUM_TOKENS,), FIRST_ACTION_TOKEN + i), False, executed=n
        )
        for i, n in enumerate(executed)
    ]
    return Trajectory(Episode(index, task_id, index, group), decisions, success, sum(executed))


def acted_batch(
    policy: FakePolicy, lengths: Sequence[int] = (3, 2, 3), temperature: float = 1.0, seed: int = 0
) -> Batch:
    """Decisions that `policy` really sampled, trajectories of the given lengths, the last chunk of each cut short."""
    generator = torch.Generator().manual_seed(seed)
    observations = iter(random_observations(sum(lengths), seed))
    trajectories = []
    for index, length in enumerate(lengths):
        record = Trajectory(Episode(index, 0, index, index))
        for t in range(length):
            seen = next(observations)
            acted = policy.act([seen], "sample", temperature, [generator])
            executed = CHUNK_LENGTH if t < length - 1 else 1 + index % CHUNK_LENGTH
            decision = Decision(seen, acted.tokens[0], False, acted.logprobs[0], executed=executed)
            record.decisions.append(decision)
        trajectories.append(record)
    return flatten(trajectories, ACTION_DIM)
