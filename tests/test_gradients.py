"""The gradient that `update` hands to the optimizer, against finite differences of SPEC's loss written out below.

Everything is in float64. The rollout is collected by the program itself; then the policy moves, so that ratios are not
1 and some are clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from configs.config import TrainConfig
from configs.sections import LossConfig, PhaseConfig, RolloutConfig, UpdateConfig
from rl.advantages import estimate_advantages
from rl.behaviour import behaviour_in
from rl.critic import predict_success, remembered_rows, rows_of
from rl.episode_queue import PlayAll
from rl.phases import PhaseState, phase_at
from rl.randomness import Randomness
from rl.ranks import ALONE
from rl.rollout import EpisodePlayer, play_rollout
from rl.trajectory import Batch, Episode, Trajectory, flatten
from rl.update import Learner, make_learner, update
from tests.fakes import BINS, FIRST_ACTION_TOKEN, FakePool, Script, ToyPolicy

TEMPERATURE = 1.3
GAE_LAMBDA = 0.8
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.1, 0.2, 1.7
GLOBAL_STEP = 140  # of the transition below: epsilon 0.6
# Three groups of three episodes (env steps, success); the last group has no signal when compared with itself. Chunks
# have 2 actions of 2 tokens, so most episodes end inside one.
EPISODES = (
    (3, True),
    (1, False),
    (5, True),
    (3, False),
    (4, True),
    (1, False),
    (4, False),
    (2, False),
    (1, False),
)
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
    """A dual clip that ratios of this size reach."""
    monkeypatch.setattr("rl.losses.DUAL_CLIP", DUAL_CLIP)


def make_case(advantage: str = "group", mixed: bool = False, **loss: object) -> Case:
    loss = {"ratio_level": "chunk" if advantage == "absolute" else "token"} | loss
    config = TrainConfig(
        phases=PhaseConfig(warmup=mixed, warmup_steps=100, transition_steps=100),
        rollout=RolloutConfig(group_size=GROUP, temperature=TEMPERATURE),
        loss=LossConfig(
            advantage=advantage,
            clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH,
            gae_lambda=GAE_LAMBDA,
            **loss,
        ),
        update=UpdateConfig(micro_batch_size=2, batch_size=2, n_epochs=10, desired_kl=None),
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
        values = predict_success(
            remembered_rows(learner.critic), rows_of(trajectories), seed=0, update_index=3
        )
    batch = estimate_advantages(batch, trajectories, values, config.loss)
    return Case(config, phase, learner, trajectories, batch, values)


class JumpThenRecord:
    """An optimizer whose first step, when ratios are 1, goes to another policy; later ones only keep its gradient."""

    def __init__(self, learner: Learner):
        self.param_groups = [dict(group) for group in learner.optimizer.param_groups]
        self.gradients: list[Tensor] = []  # per step
        self._jumped = False

    def step(self) -> None:
        if self._jumped:
            self.gradients.append(torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]]))
        else:
            jump(self.param_groups)
        self._jumped = True

    def zero_grad(self, set_to_none: bool) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


@torch.no_grad()
def jump(param_groups: Sequence[dict]) -> None:
    generator = torch.Generator().manual_seed(1)
    for group in param_groups:
        for parameter in group["params"]:
            parameter += 0.8 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def gradients(case: Case, **settings: object) -> list[Tensor]:
    """What a step of the second epoch is given, after the jump; by default the whole rollout is one minibatch."""
    whole = len(case.batch)
    settings = {
        "n_epochs": 2,
        "batch_size": whole,
        "micro_batch_size": whole,
        "max_grad_norm": 1e6,
        "desired_kl": None,
    } | settings
    optimizer = JumpThenRecord(case.learner)
    config = replace(case.config, update=UpdateConfig(**settings))
    update(replace(case.learner, optimizer=optimizer), case.batch, case.phase, config, update_index=0)
    return optimizer.gradients


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


def reference_log_ratios(case: Case, row: int, new: Tensor, old: Tensor) -> list[float]:
    """Of one decision, from the log-probs of its executed tokens."""
    if case.config.loss.ratio_level == "chunk":
        return [(new.mean() - old.mean()).item()]
    return (new - old).tolist()


def reference_surrogate(ratio: float, advantage: float) -> float:
    clipped = min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH)
    loss = -min(ratio * advantage, clipped * advantage)
    return min(loss, DUAL_CLIP * -advantage) if advantage < 0 else loss


class Before(NamedTuple):
    """The reference's own record of the policy that collected, and of the teacher."""

    logprobs: Tensor  # (N, A, V)
    teacher_logprobs: Tensor  # (N, A, V)
    advantages: list[float]


@torch.no_grad()
def logprobs_now(case: Case) -> Tensor:
    return (case.learner.policy.chunk_logits(case.batch.observations) / TEMPERATURE).log_softmax(-1)


def before_the_jump(case: Case) -> Before:
    with case.learner.policy.teacher():
        teacher = logprobs_now(case)
    return Before(logprobs_now(case), teacher, reference_advantages(case))


def reference_loss(case: Case, before: Before, logprobs: Tensor) -> float:
    """Mean over executed tokens, or over trajectories of theirs, of surrogate + kl_coef KL - entropy_coef entropy."""
    loss, total = case.config.loss, 0.0
    starts = [0]
    for trajectory in case.trajectories:
        starts.append(starts[-1] + len(trajectory.decisions))
    sizes = [[d.executed * 2 for d in t.decisions] for t in case.trajectories]
    by_trajectory = loss.advantage in ("group", "batch")
    for row, advantage in enumerate(before.advantages):
        index = case.batch.trajectory[row].item()
        decision = case.trajectories[index].decisions[row - starts[index]]
        n = decision.executed * 2  # tokens
        columns = (decision.tokens[:n] - FIRST_ACTION_TOKEN)[:, None]
        now, then, teacher = logprobs[row, :n], before.logprobs[row, :n], before.teacher_logprobs[row, :n]
        log_ratios = reference_log_ratios(
            case, row, now.gather(1, columns)[:, 0], then.gather(1, columns)[:, 0]
        )
        ratios = [math.exp(min(max(x, -5.0), 5.0)) for x in log_ratios]
        value = sum(reference_surrogate(r, advantage) for r in ratios) / len(ratios)
        value += loss.kl_coef * (now.exp() * (now - teacher)).sum().item() / n
        value -= loss.entropy_coef * -(now.exp() * now).sum().item() / n
        weight = 1 / len(sizes) / sum(sizes[index]) if by_trajectory else 1 / sum(map(sum, sizes))
        total += weight * sizes[index][row - starts[index]] * value
    return total


@torch.no_grad()
def central_differences(function: Callable[[], float], parameter: Tensor, step: float = 1e-5) -> Tensor:
    flat = parameter.view(-1)
    slopes = []
    for i in range(len(flat)):
        middle = flat[i].item()
        flat[i] = middle + step
        above = function()
        flat[i] = middle - step
        slopes.append((above - function()) / (2 * step))
        flat[i] = middle
    return torch.tensor(slopes, dtype=torch.float64)


def assert_some_ratios_are_clipped_but_none_is_at_a_kink(case: Case, before: Before) -> None:
    """Otherwise the finite differences would prove less than they seem to, or nothing."""
    logprobs, held = logprobs_now(case), []
    for row, advantage in enumerate(before.advantages):
        if advantage == 0:
            continue
        n = int(case.batch.executed[row].sum())
        columns = (case.batch.tokens[row, :n] - FIRST_ACTION_TOKEN)[:, None]
        now, then = (x[row, :n].gather(1, columns)[:, 0] for x in (logprobs, before.logprobs))
        low, high = (1 - CLIP_LOW, DUAL_CLIP) if advantage < 0 else (0.0, 1 + CLIP_HIGH)
        for log_ratio in reference_log_ratios(case, row, now, then):
            assert (
                min(abs(log_ratio - kink) for kink in (math.log(low or 1e-9), math.log(high), -5.0, 5.0))
                > 1e-4
            )
            held.append(not low < math.exp(log_ratio) < high)
    assert any(held)
    assert not all(held)


def assert_is_the_gradient_of_the_reference(case: Case) -> None:
    before = before_the_jump(case)
    gradient = gradients(case)[-1]
    assert_some_ratios_are_clipped_but_none_is_at_a_kink(case, before)

    expected = central_differences(
        lambda: reference_loss(case, before, logprobs_now(case)), case.learner.policy.adapter
    )
    assert expected.norm() > 1e-2
    # Advantages and weights are float32, hence no better than 1e-6.
    torch.testing.assert_close(gradient, expected, rtol=2e-6, atol=2e-7)


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
    assert case.phase.epsilon == pytest.approx(0.6)
    assert {d.by_teacher for t in case.trajectories for d in t.decisions} == {True, False}
    assert (case.batch.advantages[case.batch.by_teacher] < 0).any() == (advantage != "absolute")
    assert_is_the_gradient_of_the_reference(case)


# what the gradient does not depend on

VARIANTS = {
    "chunk": {"advantage": "absolute"},
    "trajectory": {"advantage": "group"},
    "kl and entropy": {"kl_coef": 0.3, "entropy_coef": 0.2},
    "gae": {"advantage": "gae"},
}


@pytest.mark.parametrize("micro_batch_size", [1, 2, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_micro_batch_size_does_not_change_the_gradient(variant, micro_batch_size):
    (whole,) = gradients(make_case(**VARIANTS[variant]))
    (accumulated,) = gradients(make_case(**VARIANTS[variant]), micro_batch_size=micro_batch_size)
    assert (accumulated - whole).norm() < 1e-12 * whole.norm()


@pytest.mark.parametrize("variant", ["chunk", "trajectory"])
def test_minibatches_add_up_to_the_rollout(variant):
    settings = VARIANTS[variant] | {"entropy_coef": 0.1}  # entropy: no minibatch is skipped
    (whole,) = gradients(make_case(**settings))
    case = make_case(**settings)
    sizes = [len(rows) for rows in torch.arange(len(case.batch)).split(4)]
    assert sizes[-1] < 4
    parts = gradients(case, batch_size=4)[-len(sizes) :]
    total = sum(size * part for size, part in zip(sizes, parts, strict=True)) / len(case.batch)
    torch.testing.assert_close(total, whole, rtol=1e-9, atol=1e-12)
