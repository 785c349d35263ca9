"""Checks that the program makes on itself in every run. Each failure is one sentence: what was found, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from errors import BadInput
from rl.contracts import Observation, Policy, TeacherMode
from rl.learner import ADAM_EPS, make_optimizer
from rl.losses import FIRST_ACTION_TOKEN
from rl.randomness import torch_generator
from rl.ranks import Ranks
from rl.trajectory import Batch, Trajectory
from untrusted.archives import read_npz

# Largest accepted |log-prob when sampling - log-prob when learning| of one token. In float32 both passes run the same
# kernels; in bfloat16 kernels chosen by batch size or for the backward pass round differently.
LOGPROB_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.25}
# Of an optimizer step that is taken as a test, in nats: small, and more than bfloat16 loses in noise.
PROMISED_GAIN = 0.2
# Of the promise. Seen: 0.90 to 1.06 with networks from 32 wide, and 0.4 or less where rounding swallowed adapters. In
# bfloat16 networks 16 wide are too curved and noisy for the test (0.5 to 2.8), in float32 they are not (0.8 to 1.2).
GAIN_LIMITS = (0.6, 1.6)


class SelfCheckError(RuntimeError):
    """The program found itself computing something else than it claims; its results would be wrong."""


def check_logits_path(policy: Policy, observation: Observation, temperature: float, dtype: torch.dtype) -> str:
    """Sampling and learning agree about the policy: the sampled tokens' log-probs are those that the update sees."""
    acted = policy.act(
        [observation], mode="sample", temperature=temperature, generators=[torch_generator(0, "self-check")]
    )
    with torch.enable_grad():
        logits = policy.chunk_logits([observation])
    learned = policy.token_logprobs(logits, acted.tokens, temperature).detach().cpu()
    difference = (learned - acted.logprobs).abs().max().item()
    if not difference <= LOGPROB_LIMIT[dtype]:
        raise SelfCheckError(
            f"sampling and learning disagree about the policy: log-probs of the same tokens differ by {difference:.3g} "
            f"(limit {LOGPROB_LIMIT[dtype]}): temperature, dropout or precision differ between rollout and update; "
            "see whether --compile off or --dtype float32 changes it"
        )
    return f"sampled and recomputed log-probs differ by at most {difference:.1e}"


def check_learning(policy: Policy, observations: Sequence[Observation]) -> str:
    """An optimizer step and its opposite, both taken back at once, move every row as far as the gradient promises.

    A gradient may be right and lead nowhere: layers, recorded passes and other devices keep copies of the parameters,
    and rounding may swallow what a step changes. What is raised is the log-prob of the least likely tokens, whose
    gradient never vanishes. AdamW's first step moves a parameter by lr * g / (|g| + eps), so the promised gain is
    lr * sum(g^2 / (|g| + eps)); half the difference between both steps is free of the loss's curvature. observations:
    equal ones, so that every row gains as much. Raises SelfCheckError.
    """
    trained = [parameter for _, parameter in policy.named_trainable_parameters()]
    with torch.enable_grad():
        logits = policy.chunk_logits(observations)
        tokens = logits.argmin(-1).cpu() + FIRST_ACTION_TOKEN
        policy.token_logprobs(logits, tokens, 1.0).mean().neg().backward()
    policy.reduce_gradients()
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    slope = sum((g.square() / (g.abs() + ADAM_EPS)).sum().item() for g in gradients)
    lr = PROMISED_GAIN / slope if slope > 0 else 0.0
    ahead = _gain_of_a_step(policy, trained, lr, observations, tokens)
    torch._foreach_neg_(gradients)
    back = _gain_of_a_step(policy, trained, lr, observations, tokens)
    for parameter in trained:
        parameter.grad = None
    gains = (ahead - back) / 2
    low, high = (limit * PROMISED_GAIN for limit in GAIN_LIMITS)
    if not bool(((low <= gains) & (gains <= high)).all()):
        raise SelfCheckError(
            f"an optimizer step that promises {PROMISED_GAIN} nats brings {gains.min():.4f} to {gains.max():.4f}: "
            "the policy does not follow its parameters, training would lead nowhere; try --compile off or --dtype "
            "float32"
        )
    return f"an optimizer step that promises {PROMISED_GAIN} nats brings {gains.mean():.4f}"


def _gain_of_a_step(
    policy: Policy, trained: Sequence[nn.Parameter], lr: float, observations: Sequence[Observation], tokens: Tensor
) -> Tensor:
    """What a first optimizer step, which is then undone, adds to the mean log-prob of each row's tokens: (B,)."""

    def logprobs() -> Tensor:
        with torch.enable_grad():  # the pass that the update makes
            return policy.token_logprobs(policy.chunk_logits(observations), tokens, 1.0).mean(-1).detach()

    start = logprobs()
    before = [parameter.detach().to("cpu", copy=True) for parameter in trained]
    make_optimizer([{"params": trained, "lr": lr}], weight_decay=0.0).step()
    policy.parameters_changed()
    gain = logprobs() - start
    with torch.no_grad():
        for parameter, value in zip(trained, before, strict=True):
            parameter.copy_(value)
    policy.parameters_changed()
    return gain


def check_executed(batch: Batch, trajectories: Sequence[Trajectory], action_dim: int) -> None:
    """Exactly the tokens of executed actions count: as many as env steps were taken, times the action dimension."""
    counted, expected = int(batch.executed.sum()), action_dim * sum(t.env_steps for t in trajectories)
    if counted != expected:
        raise SelfCheckError(
            f"the update would learn from {counted} action tokens, but the rollout's env steps executed {expected}: "
            "the mask of executed tokens is wrong"
        )


def remember_teacher(
    path: Path, policy: Policy, observation: Observation, teacher_mode: TeacherMode, write: bool = True
) -> None:
    """Store an observation and the teacher's chunk for it, for `check_teacher`."""
    with policy.teacher():
        tokens = policy.act([observation], mode=teacher_mode).tokens[0]
    if not write:
        return
    np.savez_compressed(
        path,
        images=observation.images,
        proprio=observation.proprio,
        instruction=observation.instruction,
        prepared=observation.prepared,
        tokens=tokens.numpy(),
    )


def check_teacher(path: Path, policy: Policy, teacher_mode: TeacherMode, tolerated: float = 0.0) -> None:
    """The teacher never changes: it still answers the stored observation with the stored chunk.

    `tolerated`: share of tokens that may differ. In bfloat16 a run that goes on with another GPU rounds near-ties
    differently; in float32 nothing is excused.
    """
    stored = read_npz(path, ("images", "proprio", "instruction", "prepared", "tokens"))
    observation = SimpleNamespace(
        images=stored["images"],
        proprio=stored["proprio"],
        instruction=str(stored["instruction"]),
        prepared=stored["prepared"].any(),
    )
    expected = stored["tokens"]
    if observation.images.ndim != 4 or observation.proprio.ndim != 1 or observation.images.dtype != np.uint8:
        raise BadInput(f"{path}: holds no observation of this run; restore it from a copy of the run")
    try:
        with policy.teacher():
            tokens = policy.act([observation], mode=teacher_mode).tokens[0].numpy()
    except (IndexError, TypeError, ValueError) as error:
        raise BadInput(
            f"{path}: holds no observation of this run ({error}); restore it from a copy of the run"
        ) from error
    if tokens.shape != expected.shape:
        raise BadInput(f"{path}: holds {expected.shape} tokens, this policy's chunk has {tokens.shape}; restore it")
    changed = int((tokens != expected).sum())
    if changed > tolerated * len(expected):
        raise SelfCheckError(
            f"the teacher has moved: {changed} of {len(expected)} tokens of its chunk for the stored observation "
            f"({path}) are no longer what they were at the start; frozen weights were trained or replaced"
        )


def check_same_parameters(parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
    """All ranks hold the same float32 parameters, bit for bit (sums of their bits as integers agree)."""
    if ranks.size == 1:
        return
    own = torch.stack([p.detach().view(torch.int32).sum(dtype=torch.int64) for p in parameters]).tolist()
    for rank, others in enumerate(ranks.gather(own)):
        if others != own:
            differing = sum(a != b for a, b in zip(own, others, strict=True))
            raise SelfCheckError(
                f"ranks {ranks.rank} and {rank} no longer train the same policy: {differing} of {len(own)} trainable "
                "tensors differ after an update; resume from the last checkpoint, on machines of one kind"
            )


def check_signal(updates_without_signal: int, limit: int) -> None:
    """Stop a run that has not had one non-zero advantage for `limit` updates in a row."""
    if updates_without_signal >= limit:
        raise BadInput(
            f"no learning signal: all advantages of the last {updates_without_signal} updates were 0 (every episode of "
            "a group, or with --advantage absolute every episode, ended the same way). Look at rollout/success_rate: "
            "near 0, start from a better checkpoint or raise --warmup-steps; near 1, the task is solved; or use more "
            "initial states, a larger --group-size or --max-updates-without-signal"
        )
