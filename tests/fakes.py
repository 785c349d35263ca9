"""A policy, a simulator pool and records, small enough to reason about; they keep the contracts of the real ones.

The policy is a torch module of a few hundred numbers with real gradients; the pool plays scripted episodes in any order
of completion. A chunk has 4 actions of 2 tokens: A = 8, V = 256. The toy policy at the end has three actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from contracts import Observation
from envs.env import ChunkResult, Start
from rl.trajectory import Batch, Decision, Episode, Trajectory, flatten
from vla.optimizer import make_optimizer
from vla.policy import Acted
from vla.tokens import FIRST_ACTION_TOKEN, NUM_BINS, median_tokens, token_logprobs

CHUNK_LENGTH, ACTION_DIM = 4, 2
NUM_TOKENS = CHUNK_LENGTH * ACTION_DIM
NUM_FEATURES = 3


def observation(*features: float) -> Observation:
    """The simulator's state is what the robot feels."""
    proprio = np.array(features, dtype=np.float64)
    images = np.zeros((1, 2, 2, 3), dtype=np.uint8)
    return Observation(images, proprio, "do it", state=proprio.astype(np.float32))


def random_observations(count: int, seed: int = 0) -> list[Observation]:
    rng = np.random.default_rng(seed)
    return [observation(*rng.normal(size=NUM_FEATURES)) for _ in range(count)]


class FakePolicy(nn.Module):
    """Logits are a frozen linear map of the features plus a trainable one (the "adapter").

    The features are what a frozen trunk would keep.
    """

    chunk_length = CHUNK_LENGTH
    action_dim = ACTION_DIM
    num_images = 1
    l1_head = None
    is_laplace = False
    frozen_weights = "float32"
    fixed_unnorm_key = None
    device = kept_on = torch.device("cpu")
    base_fingerprint = "fake"
    model_inputs = SimpleNamespace(prepare_images=None, images_of=lambda observation: observation.images)
    few_sizes = is_compiled = False
    room = math.inf  # observations at once for which there is memory
    info = SimpleNamespace(weights_folder=Path("fake"), uses_proprio=True, statistics={})

    _is_teacher = False

    def __init__(self, seed: int = 0, adapter_scale: float = 0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shape = (NUM_TOKENS * NUM_BINS, NUM_FEATURES)
        self.register_buffer("base", 2.0 * torch.randn(shape, generator=generator))
        self.adapter = nn.Parameter(adapter_scale * torch.randn(shape, generator=generator))
        self.bias = nn.Parameter(torch.zeros(shape[0]))
        self.largest_batches: dict[bool, int] = {}
        self.rows_run = 0  # observations that went through chunk_logits
        self.modes: list[tuple[str, int]] = []  # (who decided how, batch size) of each call of act

    def chunk_logits(self, observations: Sequence[Any], kept: Sequence[Any] | None = None) -> Tensor:
        self.rows_run += len(observations)
        return self._logits(self._features(observations, kept))

    def _features(self, observations: Sequence[Any], kept: Sequence[Any] | None) -> Tensor:
        if len(observations) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore lines")
        features = torch.tensor(np.stack([o.proprio for o in observations]), dtype=self.base.dtype)
        if kept is None:
            return features
        pairs = zip(features, kept, strict=True)
        return torch.stack([row if states is None else states for row, states in pairs])

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
            pairs = zip((logits / temperature).softmax(-1), generators, strict=True)
            draws = [torch.multinomial(row, 1, generator=generator)[:, 0] for row, generator in pairs]
            tokens = torch.stack(draws) + FIRST_ACTION_TOKEN
        elif mode == "median":
            tokens = median_tokens(logits)
        else:
            tokens = logits.argmax(-1) + FIRST_ACTION_TOKEN
        actions = (tokens - FIRST_ACTION_TOKEN).double().numpy() / 128 - 1
        actions = actions.reshape(len(tokens), self.chunk_length, self.action_dim)
        return Acted(tokens, token_logprobs(logits, tokens, temperature), actions, list(features))

    def act_as_teacher(
        self, observations: Sequence[Any], mode: str = "greedy", kept: Sequence[Any] | None = None
    ) -> Acted:
        with self.teacher():
            return self.act(observations, mode, kept=kept)

    @contextmanager
    def teacher(self) -> Iterator[None]:
        before, self._is_teacher = self._is_teacher, True
        try:
            yield
        finally:
            self._is_teacher = before

    def equals_teacher(self) -> bool:
        return not any(p.any() for p in self.parameters())

    @property
    def network(self) -> FakePolicy:
        return self

    def recompute_everything(self) -> bool:
        return False

    def make_optimizer(self, lr: float, weight_decay: float) -> torch.optim.AdamW:
        return make_optimizer(list(self.parameters()), lr, weight_decay)

    def named_trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.named_parameters())

    def save_adapter(self, folder: str | Path, looks: str = "") -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), Path(folder) / "adapter.safetensors")

    def load_adapter(self, folder: str | Path) -> None:
        self.load_state_dict(load_file(Path(folder) / "adapter.safetensors"))


def is_in_a_graph(parameter: Tensor) -> bool:
    """Whether an autograd graph that uses the parameter is alive, before or after its backward pass.

    Such a graph keeps the node alive that adds up the parameter's gradient. Without a graph, torch makes a new node
    each time that it is asked for one, so a mark on the first is not on the second.
    """
    get_gradient_edge(parameter).node.metadata["mark"] = True
    return get_gradient_edge(parameter).node.metadata.pop("mark", False)


def adamw(policy: FakePolicy, lr: float = 1e-2, weight_decay: float = 0.01) -> torch.optim.AdamW:
    return policy.make_optimizer(lr, weight_decay)


class Recorder:
    """An optimizer that keeps the gradients it is to step with and does not step."""

    def __init__(self, policy: FakePolicy):
        self.param_groups = [{"params": [p for _, p in policy.named_trainable_parameters()], "lr": 0.0}]
        self.gradients: list[torch.Tensor] = []

    def step(self) -> None:
        if not self.found_inf:
            self.gradients.append(torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]]))

    def zero_grad(self, set_to_none: bool) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


def assert_same_bits(actual: Any, expected: Any) -> None:
    """That tensors and numbers are equal, also in lists and dictionaries."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


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


@dataclass
class Playing:
    """The attempt at an episode that a slot plays."""

    task_id: int
    init_state_id: int
    script: Script
    attempt: int
    record: bool
    success: bool  # so far
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
        # (task, initial state, attempt) -> the actions of its chunks
        self.received: dict[tuple[int, int, int], list[np.ndarray]] = {}
        self._script = script
        self._attempts: dict[tuple[int, int], int] = {}
        self._slots: dict[int, Playing] = {}
        self._busy: list[int] = []
        self._order = None if order_seed is None else np.random.default_rng(order_seed)

    def reset(self, slot: int, task_id: int, start: Start) -> None:
        init_state_id = start.seed % 1000 if start.init_state_id is None else start.init_state_id
        assert slot not in self._busy, "the slot is still at work"
        key = (task_id, init_state_id)
        self.started.append(key)
        self.physics.append(start.physics)
        self._attempts[key] = attempt = self._attempts.get(key, 0) + 1
        script = self._script(*key)
        self._slots[slot] = Playing(*key, script, attempt, start.record, script.success)
        self._busy.append(slot)

    def step(self, slot: int, actions: np.ndarray) -> None:
        assert slot not in self._busy, "the slot is still at work"
        now = self._slots[slot]  # KeyError: no episode is running
        now.actions = actions
        self.received.setdefault((now.task_id, now.init_state_id, now.attempt), []).append(actions)
        self._busy.append(slot)

    def ready(self, timeout_s: float | None = None) -> list[tuple[int, ChunkResult]]:
        assert self._busy or timeout_s is not None, "nothing is under way: waiting would never end"
        if not self._busy:
            return []
        answered = sorted(self._busy)
        if self._order is not None:
            count = int(self._order.integers(1, len(answered) + 1))
            answered = self._order.permutation(answered)[:count].tolist()
        self._busy = [slot for slot in self._busy if slot not in answered]
        return [(slot, self._play(slot)) for slot in answered]

    def _play(self, slot: int) -> ChunkResult:
        now = self._slots[slot]
        result = ChunkResult(env_steps=now.env_steps, sim_s=0.25, render_s=0.125, preprocess_s=0.0625)
        if now.attempt <= now.script.faults and now.chunks == now.script.fault_after:
            del self._slots[slot]
            return replace(result, done=True, error="planted fault")
        if now.actions is None:
            return replace(result, observation=self._observe(now))
        executed = now.actions[: now.script.env_steps - now.env_steps]
        self._execute(now, executed)
        now.chunks += 1
        done = now.env_steps == now.script.env_steps
        if done:
            del self._slots[slot]
        frame = np.full((16, 16, 3), now.env_steps, dtype=np.uint8)
        return replace(
            result,
            observation=None if done else self._observe(now),
            success=done and now.success,
            executed=len(executed),
            env_steps=now.env_steps,
            done=done,
            frames=[frame] * len(executed) * now.record,
        )

    def _execute(self, now: Playing, actions: np.ndarray) -> None:
        now.env_steps += len(actions)

    def _observe(self, now: Playing) -> Observation:
        """Depends on the whole past of the episode, so one other draw changes everything that follows."""
        moved = 0.0 if now.actions is None else float(np.tanh(now.actions.sum()))
        place = math.sin(1 + now.init_state_id + now.env_steps)
        return observation(place, math.cos(now.task_id) + 0.5, moved)

    def close(self) -> None:
        pass

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def trajectory(
    length: int, success: bool = False, group: int = 0, index: int = 0, task_id: int = 0
) -> Trajectory:
    """A record of `length` decisions without contents, all of whose actions were executed."""
    decisions = []
    for place in range(length):
        tokens = torch.full((NUM_TOKENS,), FIRST_ACTION_TOKEN + place)
        decisions.append(Decision(observation(place, length, 1), tokens, False, executed=CHUNK_LENGTH))
    return Trajectory(Episode(index, task_id, index, group), decisions, success, length * CHUNK_LENGTH)


def contents(trajectories: Sequence[Trajectory]) -> list[tuple]:
    """Everything about trajectories that learning sees, comparable with ==."""
    everything = []
    for one in trajectories:
        decisions = []
        for d in one.decisions:
            tensors = (d.observation.proprio, d.tokens, d.kept, d.student_logprobs)
            lists = [None if tensor is None else tensor.tolist() for tensor in tensors]
            decisions.append((d.by_teacher, d.executed, lists))
        everything.append((one.episode, one.success, one.env_steps, decisions))
    return everything


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


BINS = (0, 100, 255)  # the action tokens that a ToyPolicy uses, among them the first and the last
NEVER = -80.0  # logit of all others


class ToyPolicy(FakePolicy):
    """Logits (B, A, 3) = features times (base + adapter), in base's dtype; there is no bias."""

    def __init__(self, base: Tensor, chunk_length: int, action_dim: int):
        """base (F, A, 3)."""
        super().__init__()
        self.chunk_length, self.action_dim = chunk_length, action_dim
        self.base = base
        self.adapter = nn.Parameter(torch.zeros_like(base))
        del self.bias

    def _logits(self, features: Tensor) -> Tensor:
        weights = self.base if self._is_teacher else self.base + self.adapter
        used = torch.einsum("bf,fav->bav", features, weights)
        everywhere = used.new_full((*used.shape[:2], NUM_BINS), NEVER)
        return everywhere.index_copy(-1, torch.tensor(BINS), used)
