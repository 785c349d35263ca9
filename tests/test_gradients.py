"""The gradient that `update` hands to the optimizer, against that of SPEC's loss written out below row by row.

Everything is in float64. The rollout is collected by the program itself; then the policy moves, so that ratios are not
1 and some are clipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from configs.config import TrainConfig, changed
from rl.advantages import estimate_advantages
from rl.behaviour import behaviour_in
from rl.critic import old_and_new_rows, predict_success
from rl.episode_order import PlayAll
from rl.episode_player import EpisodePlayer
from rl.phases import PhaseState, phase_at
from rl.randomness import Randomness
from rl.ranks import ALONE
from rl.rollout import play_rollout
from rl.trajectory import Batch, Episode, Trajectory, flatten
from rl.update import Learner, make_learner, update
from tests.fakes import BINS, FIRST_ACTION_TOKEN, FakePool, Recorder, Script, ToyPolicy

TEMPERATURE = 1.3
GAE_LAMBDA = 0.8
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.1, 0.2, 1.7
GLOBAL_STEP = 140  # of the transition below: epsilon 0.6
# Three groups of three episodes (env steps, success); the last group has no signal when compared with itself. Chunks
# have 2 actions of 2 tokens, so most episodes end inside one.
EPISODES = [
    (3, True), (1, False), (5, True), (3, False), (4, True), (1, False), (4, False), (2, False), (1, False)
]  # fmt: skip
GROUP = 3
ADVANTAGES = ("absolute", "group", "batch", "gae")


class Case(NamedTuple):
    """A collected rollout and what is to be minimised on it."""

    config: TrainConfig
    phase: PhaseState
    learner: Learner
    trajectories: list[Trajectory]
    batch: Batch
    values: Tensor | None  # (N,), of a critic


@pytest.fixture(autouse=True)
def constants_of_a_small_problem(monkeypatch):
    """A dual clip that ratios of this size reach; and the policy has moved before the first minibatch."""
    monkeypatch.setattr("rl.losses.DUAL_CLIP", DUAL_CLIP)
    monkeypatch.setattr("rl.update.check_first_ratios", lambda statistics: {})


def make_case(advantage: str = "group", mixed: bool = False, **loss: object) -> Case:
    loss = {"ratio_level": "chunk" if advantage == "absolute" else "token"} | loss
    config = changed(
        TrainConfig(),
        warmup=mixed,
        warmup_steps=100,
        transition_steps=100,
        group_size=GROUP,
        temperature=TEMPERATURE,
        advantage=advantage,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        gae_lambda=GAE_LAMBDA,
        **loss,
    )
    generator = torch.Generator().manual_seed(2)
    base = torch.randn(3, 4, len(BINS), generator=generator, dtype=torch.float64)
    learner = make_learner(ToyPolicy(base, chunk_length=2, action_dim=2), config)
    phase = phase_at(GLOBAL_STEP, config.phases)
    player = EpisodePlayer(
        learner.policy,
        FakePool(lambda _, state: Script(*EPISODES[state]), num_slots=2),
        behaviour_in(phase, config, "greedy", episode_length=0.0),
        Randomness(0, "rollout"),
    )
    episodes = [Episode(i, 0, i, i // GROUP) for i in range(len(EPISODES))]
    trajectories = play_rollout(player, PlayAll(episodes, ALONE)).trajectories
    batch = flatten(trajectories, action_dim=2)
    values = None
    if learner.critic is not None:
        learner.critic.remember(trajectories)
        values = predict_success(*old_and_new_rows(learner.critic, trajectories), seed=0, update_index=3)
    batch = estimate_advantages(batch, trajectories, values, config.loss)
    return Case(config, phase, learner, trajectories, batch, values)


@torch.no_grad()
def jump(policy: ToyPolicy) -> None:
    generator = torch.Generator().manual_seed(1)
    policy.adapter += 0.8 * torch.randn(policy.adapter.shape, generator=generator, dtype=torch.float64)


def gradients(case: Case, **settings: object) -> list[Tensor]:
    """What the steps of an epoch are given; by default the whole rollout is one minibatch."""
    whole = len(case.batch)
    one_minibatch = {"n_epochs": 1, "batch_size": whole, "micro_batch_size": whole}
    config = changed(case.config, max_grad_norm=1e6, desired_kl=None, **(one_minibatch | settings))
    recorder = Recorder(case.learner.policy)
    update(replace(case.learner, optimizer=recorder), case.batch, case.phase, config, update_index=0)
    return recorder.gradients


# SPEC sections 2 to 5, written out one decision at a time


def reference_advantages(case: Case) -> list[float]:
    kind = case.config.loss.advantage
    returns = [float(t.success) for t in case.trajectories]
    advantages: list[float] = []
    for i, trajectory in enumerate(case.trajectories):
        count = len(trajectory.decisions)
        first_of_group = i // GROUP * GROUP
        group_returns = returns[first_of_group : first_of_group + GROUP]
        if kind == "absolute":
            advantages += [returns[i]] * count
        elif kind == "group":
            advantages += [standard_score(returns[i], group_returns)] * count
        elif kind == "batch":
            advantages += [standard_score(returns[i], returns)] * count
        else:
            values = case.values[len(advantages) : len(advantages) + count].tolist()
            advantages += reference_gae(values, returns[i])
    if kind == "gae":
        advantages = [standard_score(a, advantages) for a in advantages]
    by_teacher = [d.by_teacher for t in case.trajectories for d in t.decisions]
    return [max(a, 0.0) if teacher else a for a, teacher in zip(advantages, by_teacher, strict=True)]


def reference_gae(values: Sequence[float], reward: float) -> list[float]:
    """Of one episode, as a double sum; the reward comes with the last decision."""
    count = len(values)
    rewards = [0.0] * (count - 1) + [reward]
    next_values = [*values[1:], 0.0]
    errors = [rewards[t] + next_values[t] - values[t] for t in range(count)]
    return [sum(GAE_LAMBDA ** (k - t) * errors[k] for k in range(t, count)) for t in range(count)]


def standard_score(value: float, among: Sequence[float]) -> float:
    mean = sum(among) / len(among)
    return (value - mean) / (math.sqrt(sum((x - mean) ** 2 for x in among) / (len(among) - 1)) + 1e-6)


def reference_ratios(case: Case, new: Tensor, old: Tensor) -> Tensor:
    """Of one decision, from the log-probs of its executed tokens."""
    log_ratios = new - old
    if case.config.loss.ratio_level == "chunk":
        log_ratios = log_ratios.mean()[None]
    return log_ratios.clamp(-5, 5).exp()


def reference_surrogate(ratio: Tensor, advantage: float) -> Tensor:
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
    return loss.clamp(max=DUAL_CLIP * -advantage) if advantage < 0 else loss


def logprobs_now(case: Case) -> Tensor:
    """(N, A, V), with gradient to the policy's adapter."""
    return (case.learner.policy.chunk_logits(case.batch.observations) / TEMPERATURE).log_softmax(-1)


class Before(NamedTuple):
    """The log-probs (N, A, V) of the policy that collected, and of the teacher."""

    policy: Tensor
    teacher: Tensor


@torch.no_grad()
def before_the_jump(case: Case) -> Before:
    with case.learner.policy.teacher():
        teacher = logprobs_now(case)
    return Before(logprobs_now(case), teacher)


def reference_loss(case: Case, before: Before) -> Tensor:
    """Mean over executed tokens, or over trajectories of theirs, of surrogate + kl_coef KL - entropy_coef entropy."""
    loss = case.config.loss
    logprobs = logprobs_now(case)
    rows = [(index, d) for index, t in enumerate(case.trajectories) for d in t.decisions]
    tokens_of = [sum(d.executed * 2 for d in t.decisions) for t in case.trajectories]
    slopes = []  # of each surrogate by its ratio, 0 where it is clipped
    total = torch.zeros((), dtype=torch.float64)
    for row, ((index, decision), advantage) in enumerate(zip(rows, reference_advantages(case), strict=True)):
        n = decision.executed * 2
        columns = (decision.tokens[:n] - FIRST_ACTION_TOKEN)[:, None]
        now, then, teacher = (each[row, :n] for each in (logprobs, *before))
        ratios = reference_ratios(case, now.gather(1, columns)[:, 0], then.gather(1, columns)[:, 0])
        surrogate = reference_surrogate(ratios, advantage).mean()
        if advantage != 0:
            slopes.append(torch.autograd.grad(surrogate, ratios, retain_graph=True)[0])
        kl = (now.exp() * (now - teacher)).sum() / n
        entropy = -(now.exp() * now).sum() / n
        weight = n / sum(tokens_of)
        if loss.advantage in ("group", "batch"):
            weight = n / tokens_of[index] / len(tokens_of)
        total = total + weight * (surrogate + loss.kl_coef * kl - loss.entropy_coef * entropy)
    is_clipped = torch.cat(slopes) == 0
    assert is_clipped.any()  # otherwise the gradient would prove less than it seems to
    assert not is_clipped.all()
    return total


def assert_is_the_gradient_of_the_reference(case: Case) -> None:
    before = before_the_jump(case)
    jump(case.learner.policy)
    (gradient,) = gradients(case)
    (expected,) = torch.autograd.grad(reference_loss(case, before), case.learner.policy.adapter)
    assert expected.norm() > 1e-2
    # Advantages and weights are float32, hence no better than 1e-6.
    torch.testing.assert_close(gradient, expected.flatten(), rtol=2e-6, atol=2e-7)


# the gradient


@pytest.mark.parametrize(
    "terms",
    [{"advantage": kind} for kind in ADVANTAGES]
    + [
        {"advantage": "absolute", "ratio_level": ratio_level, **terms}
        for ratio_level in ("chunk", "token")
        for terms in ({"kl_coef": 0.3}, {"entropy_coef": 0.2}, {"kl_coef": 0.3, "entropy_coef": 0.2})
    ],
)
def test_an_update_descends_the_mean_loss_over_all_executed_tokens(terms):
    assert_is_the_gradient_of_the_reference(make_case(**terms))


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_so_it_does_in_the_transition_where_the_teachers_decisions_keep_max_a_0(advantage):
    case = make_case(advantage, mixed=True, ratio_level="token")
    assert case.phase.epsilon_start == pytest.approx(0.6)
    assert {d.by_teacher for t in case.trajectories for d in t.decisions} == {True, False}
    assert (case.batch.advantages[case.batch.by_teacher] < 0).any() == (advantage != "absolute")
    assert_is_the_gradient_of_the_reference(case)


# what the gradient does not depend on

VARIANTS = [
    {"advantage": "absolute", "entropy_coef": 0.1},
    {"advantage": "group", "kl_coef": 0.3, "entropy_coef": 0.1},
    {"advantage": "gae", "entropy_coef": 0.1},
]  # entropy: no row is left out


@pytest.mark.parametrize("variant", VARIANTS)
def test_micro_batches_and_minibatches_add_up_to_the_gradient_of_the_rollout(variant):
    case = make_case(**variant)
    jump(case.learner.policy)
    (whole,) = gradients(case)
    for micro_batch_size in (1, 2, 5):
        (accumulated,) = gradients(case, micro_batch_size=micro_batch_size)
        assert (accumulated - whole).norm() < 1e-12 * whole.norm()
    sizes = [len(rows) for rows in torch.arange(len(case.batch)).tensor_split(-(-len(case.batch) // 4))]
    parts = gradients(case, batch_size=4)
    total = sum(size * part for size, part in zip(sizes, parts, strict=True)) / len(case.batch)
    torch.testing.assert_close(total, whole, rtol=1e-9, atol=1e-12)
