"""A task small enough to be learnt in a second, and a policy for it small enough to be differentiated by hand.

Both keep the contracts of the real ones. The policy chooses among 3 of the 256 action tokens; its logits are linear in
the observation's features. The task: `EPISODE` env steps, at each of which one of the 3 actions is right; an episode in
which all of them were right is a success. Chunks have 2 actions, so every episode ends inside its second chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from contracts import Observation
from envs.env import Start
from tests.fakes import (
    FIRST_ACTION_TOKEN,
    NUM_BINS,
    Acted,
    FakePolicy,
    FakePool,
    FakeResult,
    Script,
    observation,
)

BINS = (0, 100, 255)  # the action tokens in use, among them the first and the last
NEVER = -80.0  # logit of all others
CONTEXTS = 2  # kinds of initial states
EPISODE = 3  # env steps
CHUNK = 2  # actions
FEATURES = CONTEXTS * 2  # one-hot: context and decision number


class ToyPolicy(FakePolicy):
    """Logits (B, A, 3) = features times (base + adapter); only the adapter is trained, the teacher is without it."""

    def __init__(self, base: Tensor, chunk_length: int, action_dim: int):
        """base (F, A, 3); its dtype is that of everything."""
        nn.Module.__init__(self)
        self.chunk_length, self.action_dim, self.dtype = chunk_length, action_dim, base.dtype
        self.register_buffer("base", base)
        self.adapter = nn.Parameter(torch.zeros_like(base))
        self._is_teacher = False

    def chunk_logits(self, observations: Sequence[Any], kept=None) -> Tensor:
        features = torch.from_numpy(np.stack([o.proprio for o in observations])).to(self.dtype)
        weights = self.base if self._is_teacher else self.base + self.adapter
        used = torch.einsum("bf,fav->bav", features, weights)
        everywhere = used.new_full((*used.shape[:2], NUM_BINS), NEVER)
        return everywhere.index_copy(-1, torch.tensor(BINS), used)

    @torch.no_grad()
    def act(self, observations, mode="greedy", temperature=1.0, generators=None, kept=None) -> Acted:
        logits = self.chunk_logits(observations)
        if mode == "sample":
            uniforms = torch.stack(
                [torch.rand(logits.shape[1], generator=g, dtype=self.dtype) for g in generators]
            )
            cumulative = (logits / temperature).softmax(-1).cumsum(-1)
            bins = (cumulative < uniforms[..., None]).sum(-1).clamp(max=NUM_BINS - 1)
        else:
            bins = logits.argmax(-1)
        tokens = bins + FIRST_ACTION_TOKEN
        actions = bins.double().numpy().reshape(len(bins), self.chunk_length, self.action_dim)
        logprobs = self.token_logprobs(logits, tokens, temperature)
        return Acted(tokens, logprobs, actions, [None] * len(tokens))

    def named_trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [("adapter", self.adapter)]


def pretrained_policy(seed: int) -> ToyPolicy:
    """Somewhat better than chance at the task: the right action has a logit of about 0.7 above the others."""
    base = 0.3 * torch.randn(FEATURES, CHUNK, len(BINS), generator=torch.Generator().manual_seed(seed))
    for context in range(CONTEXTS):
        for env_step in range(EPISODE):
            decision, position = divmod(env_step, CHUNK)
            base[2 * context + decision, position, right_choice(context, env_step)] += 0.7
    return ToyPolicy(base, chunk_length=CHUNK, action_dim=1)


def right_choice(context: int, env_step: int) -> int:
    """Index into BINS of the action that the task wants."""
    return (context + 2 * env_step) % len(BINS)


@dataclass
class _Playing:
    context: int
    env_steps: int = 0
    all_right: bool = True


class ToyPool(FakePool):
    """The task in 16 environments."""

    def __init__(self):
        super().__init__(lambda *_: Script(EPISODE), num_slots=16)
        self._playing = {}

    def reset(self, slot: int, task_id: int, start: Start) -> None:
        super().reset(slot, task_id, start)
        self._playing[slot] = _Playing(start.init_state_id % CONTEXTS)

    def _play(self, slot: int) -> FakeResult:
        now, actions = self._playing[slot], self._slots[slot].actions
        if actions is None:
            return FakeResult(_observe(now), False, 0, 0, done=False)
        executed = 0
        for action in actions[: EPISODE - now.env_steps, 0]:
            now.all_right &= action == BINS[right_choice(now.context, now.env_steps)]
            now.env_steps += 1
            executed += 1
        done = now.env_steps == EPISODE
        return FakeResult(
            None if done else _observe(now), bool(done and now.all_right), executed, now.env_steps, done
        )


def _observe(now: _Playing) -> Observation:
    return observation(*np.eye(FEATURES)[2 * now.context + now.env_steps // CHUNK])
