"""The gradient that `update` hands to the optimizer, against finite differences of SPEC's loss written out below.

Everything is in float64. The rollout is collected by the program itself; then the policy moves, so that ratios are not
1 and some are clipped.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from configs.config import CriticConfig, LossConfig, PhaseConfig, RolloutConfig, TrainConfig, UpdateConfig
from rl.phases import PhaseState, phase_at
from rl.rollout import Randomness, behaviour_in, rollout
from rl.trajectory import Batch, Episode, Trajectory, flatten
from rl.update import Learner, estimate_advantages, make_learner, update
from tests.fakes import FIRST_ACTION_TOKEN, FakePool, Script
from tests.toy import BINS, ToyPolicy

TEMPERATURE, DISCOUNT, EPSILON = 1.3, 0.9, 0.6
CLIP_LOW, CLIP_HIGH = 0.1, 0.5  # far apart: ratios lie between them; the former must not matter
GLOBAL_STEP = 140  # of the transition below: epsilon 0.6
# Three groups of three episodes (env steps, success); the last group has no signal when compared with itself. Chunks
# have 2 actions of 2 tokens, so most episodes end inside one.
EPISODES = ((3, True), (1, False), (5, True), (3, False), (4, True), (1, False), (4, False), (2, False), (1, False))
GROUP = 3
ADVANTAGES = ("absolute", "group", "rloo", "batch", "gae")


@dataclass(frozen=True)
class Case:
    """A collected rollout and what is to be minimised on it."""

    config: TrainConfig
    phase: PhaseState
    learner: Learner
    trajectories: list[Trajectory]
    batch: Batch


def make_case(advantage: str = "group", importance: str = "student", **loss: object) -> Case:
    mixed = importance == "behaviour"
    config = TrainConfig(
        phases=PhaseConfig(warmup=mixed, warmup_steps=100, transition_steps=100, importance=importance),
        rollout=RolloutConfig(group_size=GROUP, temperature=TEMPERATURE),
        loss=LossConfig(advantage=advantage, discount=DISCOUNT if advantage in ("absolute", "gae") else 1.0,
            clip_high=CLIP_HIGH, **loss),
        critic=CriticConfig(gae_lambda=0.8),
        update=UpdateConfig(micro_batch_size=2),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(3, 4, len(BINS), generator=generator, dtype=torch.float64)
    learner = make_learner(ToyPolicy(base, chunk_length=2, action_dim=2), config)
    if learner.critic is not None:  # values that are not 0
        torch.nn.init.normal_(learner.critic.net[-1].weight, std=0.03, generator=generator)
    phase = phase_at(GLOBAL_STEP, config.phases)
    trajectories = rollout(
        learner.policy, FakePool(lambda _, state: Script(*EPISODES[state]), num_slots=2),
        [Episode(i, 0, i, i // GROUP) for i in range(len(EPISODES))],
        behaviour_in(phase, config, "greedy"), Randomness(0, "rollout"),
    ).trajectories  # fmt: skip
    batch = estimate_advantages(learner, flatten(trajectories, action_dim=2), trajectories, config)
    return Case(config, phase, learner, trajectories, batch)


class JumpThenRecord:
    """An optimizer whose first step leaves the collecting policy for another one; later ones only keep the gradient.

    (Before the first step `update` insists that ratios are 1.)
    """

    def __init__(self, learner: Learner):
        self.param_groups = [dict(group) for group in learner.optimizer.param_groups]
        self.gradients: list[list[Tensor]] = []  # per step, per parameter group
        self._jumped = False

    def step(self) -> None:
        if not self._jumped:
            self._jumped = True
            jump(self.param_groups)
            return
        self.gradients.append([torch.cat([p.grad.flatten() for p in g["params"]]) for g in self.param_groups])

    def zero_grad(self, set_to_none: bool) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


@torch.no_grad()
def jump(param_groups: Sequence[dict]) -> None:
    generator = torch.Generator().manual_seed(1)
    for group, scale in zip(param_groups, (0.8, 0.02), strict=False):  # policy; critic
        for parameter in group["params"]:
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def gradients(case: Case, **settings: object) -> list[list[Tensor]]:
    """What a step of the second epoch is given, after the jump; by default the whole rollout is one minibatch."""
    whole = len(case.batch)
    settings = {"n_epochs": 2, "batch_size": whole, "micro_batch_size": whole, "max_grad_norm": 1e6} | settings
    optimizer = JumpThenRecord(case.learner)
    config = replace(case.config, update=UpdateConfig(**settings))
    update(replace(case.learner, optimizer=optimizer), case.batch, case.phase, config, number=0)
    return optimizer.gradients


def policy_gradient(case: Case, **settings: object) -> Tensor:
    return gradients(case, **settings)[-1][0]


# SPEC sections 2, 4 and 5, written out one decision at a time


def reference_advantages(case: Case, values: Sequence[float] | None) -> list[float]:
    kind = case.config.loss.advantage
    returns = [float(t.success) for t in case.trajectories]
    advantages: list[float] = []
    for i, trajectory in enumerate(case.trajectories):
        count = len(trajectory.decisions)
        same_start = returns[i // GROUP * GROUP : i // GROUP * GROUP + GROUP]
        if kind == "absolute":
            own = [returns[i] * DISCOUNT ** (count - 1 - t) for t in range(count)]
        elif kind == "group":
            own = [standard_score(returns[i], same_start)] * count
        elif kind == "rloo":
            own = [returns[i] - (sum(same_start) - returns[i]) / (GROUP - 1)] * count
        elif kind == "batch":
            own = [standard_score(returns[i], returns)] * count
        else:
            v = [*values[len(advantages) : len(advantages) + count], 0.0]
            errors = [(returns[i] if t == count - 1 else 0) + DISCOUNT * v[t + 1] - v[t] for t in range(count)]
            own = [sum((DISCOUNT * 0.8) ** (k - t) * errors[k] for k in range(t, count)) for t in range(count)]
        advantages += own
    return advantages


def standard_score(value: float, among: Sequence[float]) -> float:
    mean = sum(among) / len(among)
    return (value - mean) / (math.sqrt(sum((x - mean) ** 2 for x in among) / (len(among) - 1)) + 1e-6)


def reference_log_ratios(case: Case, row: int, new: Tensor, old: Tensor) -> list[float]:
    """Of one decision, from the log-probs of its executed tokens."""
    if case.config.phases.importance == "behaviour":
        teachers = bool(case.batch.matches_teacher[row, : len(new)].all())
        return [new.sum().item() - math.log(EPSILON * teachers + (1 - EPSILON) * old.sum().exp().item())]
    if case.config.loss.ratio_level == "chunk":
        return [(new.mean() - old.mean()).item()]
    return (new - old).tolist()


def bounds(advantage: float) -> tuple[float, float]:
    return (1 - CLIP_LOW, 1 + CLIP_HIGH) if advantage > 0 else (1 - CLIP_HIGH, 1 + CLIP_LOW)


@dataclass(frozen=True)
class Before:
    """The reference's own record of the policy that collected, and of the teacher."""

    logprobs: Tensor  # (N, A, V)
    teacher_logprobs: Tensor  # (N, A, V)
    values: Tensor | None  # (N,)
    advantages: list[float]


def logprobs_now(case: Case) -> Tensor:
    with torch.no_grad():
        return (case.learner.policy.chunk_logits(case.batch.observations) / TEMPERATURE).log_softmax(-1)


def values_now(case: Case, hidden: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        hidden = case.learner.policy.chunk_outputs(case.batch.observations)[1] if hidden is None else hidden
        return copy.deepcopy(case.learner.critic.net).double()(hidden.mean(1)).squeeze(-1)


def before_the_jump(case: Case) -> Before:
    with case.learner.policy.teacher():
        teacher = logprobs_now(case)
    values = None if case.learner.critic is None else values_now(case)
    advantages = reference_advantages(case, None if values is None else values.tolist())
    return Before(logprobs_now(case), teacher, values, advantages)


def reference_loss(case: Case, before: Before, logprobs: Tensor) -> float:
    """Mean over decisions of surrogate + kl_coef KL - entropy_coef entropy."""
    loss, total = case.config.loss, 0.0
    starts = [0]
    for trajectory in case.trajectories:
        starts.append(starts[-1] + len(trajectory.decisions))
    for row, advantage in enumerate(before.advantages):
        own = case.batch.trajectory[row].item()
        decision = case.trajectories[own].decisions[row - starts[own]]
        n = decision.executed * 2  # tokens
        columns = (decision.tokens[:n] - FIRST_ACTION_TOKEN)[:, None]
        now, then, teacher = logprobs[row, :n], before.logprobs[row, :n], before.teacher_logprobs[row, :n]
        log_ratios = reference_log_ratios(case, row, now.gather(1, columns)[:, 0], then.gather(1, columns)[:, 0])
        ratios = [math.exp(min(max(x, -5.0), 5.0)) for x in log_ratios]
        low, high = bounds(advantage)
        value = sum(-min(r * advantage, min(max(r, low), high) * advantage) for r in ratios) / len(ratios)
        value += loss.kl_coef * (now.exp() * (now - teacher)).sum().item() / n
        value -= loss.entropy_coef * -(now.exp() * now).sum().item() / n
        decisions = len(case.trajectories[own].decisions)
        weight = 1 / len(case.batch) if loss.aggregation == "decision" else 1 / len(case.trajectories) / decisions
        total += weight * value
    return total


def reference_value_loss(before: Before, values: Tensor) -> float:
    """value_coef times the mean over decisions of the clipped value loss."""
    targets = before.values + torch.tensor(before.advantages)
    bounded = before.values + (values - before.values).clamp(-0.2, 0.2)
    return 0.5 * (0.5 * torch.maximum((values - targets) ** 2, (bounded - targets) ** 2)).mean().item()


@torch.no_grad()
def central_differences(function: Callable[[], float], parameter: Tensor, step: float = 1e-5) -> Tensor:
    flat, found = parameter.view(-1), []
    for i in range(len(flat)):
        middle = flat[i].item()
        flat[i] = middle + step
        above = function()
        flat[i] = middle - step
        found.append((above - function()) / (2 * step))
        flat[i] = middle
    return torch.tensor(found, dtype=torch.float64)


def assert_some_ratios_are_clipped_but_none_is_at_a_kink(case: Case, before: Before) -> None:
    """Otherwise the finite differences would prove less than they seem to, or nothing."""
    logprobs, held = logprobs_now(case), []
    for row, advantage in enumerate(before.advantages):
        if advantage == 0:
            continue
        n = int(case.batch.executed[row].sum())
        columns = (case.batch.tokens[row, :n] - FIRST_ACTION_TOKEN)[:, None]
        now, then = (x[row, :n].gather(1, columns)[:, 0] for x in (logprobs, before.logprobs))
        low, high = (math.log(bound) for bound in bounds(advantage))
        for log_ratio in reference_log_ratios(case, row, now, then):
            assert min(abs(log_ratio - kink) for kink in (low, high, -5.0, 5.0)) > 1e-4
            held.append(log_ratio > high if advantage > 0 else log_ratio < low)
    assert any(held)
    assert not all(held)


def assert_is_the_gradient_of_the_reference(case: Case) -> None:
    before = before_the_jump(case)
    found = policy_gradient(case)
    assert_some_ratios_are_clipped_but_none_is_at_a_kink(case, before)

    expected = central_differences(
        lambda: reference_loss(case, before, logprobs_now(case)), case.learner.policy.adapter
    )
    assert expected.norm() > 1e-2
    # Advantages, weights and the critic are float32, hence no better than 1e-6.
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-7)


# the gradient


TERMS = ({"kl_coef": 0.3}, {"entropy_coef": 0.2}, {"kl_coef": 0.3, "entropy_coef": 0.2})


@pytest.mark.parametrize("ratio_level", ["chunk", "token"])
@pytest.mark.parametrize("aggregation", ["decision", "trajectory"])
@pytest.mark.parametrize(("advantage", "terms"), [(a, {}) for a in ADVANTAGES] + [("absolute", t) for t in TERMS])
def test_an_update_descends_the_mean_loss_over_all_decisions(advantage, terms, aggregation, ratio_level):
    assert_is_the_gradient_of_the_reference(
        make_case(advantage, aggregation=aggregation, ratio_level=ratio_level, **terms)
    )


@pytest.mark.parametrize("aggregation", ["decision", "trajectory"])
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_so_it_does_when_the_ratio_is_against_the_mixture_that_acted(advantage, aggregation):
    case = make_case(advantage, "behaviour", aggregation=aggregation, kl_coef=0.1)
    assert case.phase.epsilon == pytest.approx(EPSILON)
    assert 0 < case.batch.by_teacher.sum() < len(case.batch)
    assert_is_the_gradient_of_the_reference(case)


def test_the_critic_descends_the_clipped_value_loss():
    case = make_case("gae")
    before = before_the_jump(case)
    _, found = gradients(case)[-1]
    moved = (values_now(case) - before.values).abs()
    assert (moved > 0.2).any()
    assert (moved < 0.2).any()

    critic = copy.deepcopy(case.learner.critic).double()
    hidden = case.learner.policy.chunk_outputs(case.batch.observations)[1].detach()
    parameters = torch.nn.utils.parameters_to_vector(critic.parameters()).detach()
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):  # derivatives in random directions: its parameters are thousands
        direction = torch.randn(len(parameters), generator=generator, dtype=torch.float64)
        losses = []
        for step in (1e-6, -1e-6):
            torch.nn.utils.vector_to_parameters(parameters + step * direction, critic.parameters())
            with torch.no_grad():
                losses.append(reference_value_loss(before, critic.net(hidden.mean(1)).squeeze(-1)))
        expected = (losses[0] - losses[1]) / 2e-6
        assert (found.double() @ direction).item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


# what the gradient does not depend on

VARIANTS = {
    "chunk": {},
    "token": {"ratio_level": "token"},
    "trajectory": {"aggregation": "trajectory"},
    "kl and entropy": {"kl_coef": 0.3, "entropy_coef": 0.2},
    "behaviour": {"importance": "behaviour"},
    "gae": {"advantage": "gae"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_that_were_not_executed_get_exactly_no_gradient(variant):
    case = make_case(**({"advantage": "batch"} | VARIANTS[variant]))
    policy, outputs_of, kept = case.learner.policy, case.learner.policy.chunk_outputs, []

    def outputs(observations):
        logits, hidden = outputs_of(observations)
        if logits.requires_grad:
            logits.retain_grad()
            kept.append((observations, logits))
        return logits, hidden

    policy.chunk_outputs = outputs
    policy_gradient(case)
    observations, logits = kept[-1]
    row_of = {id(observation): row for row, observation in enumerate(case.batch.observations)}
    executed = torch.stack([case.batch.executed[row_of[id(o)]] for o in observations])
    assert not executed.all()
    assert not logits.grad[~executed].any()
    assert logits.grad[executed].any()


@pytest.mark.parametrize("micro_batch_size", [1, 2, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_micro_batch_size_does_not_change_the_gradient(variant, micro_batch_size):
    whole = policy_gradient(make_case(**VARIANTS[variant]))
    accumulated = policy_gradient(make_case(**VARIANTS[variant]), micro_batch_size=micro_batch_size)
    tolerance = 1e-6 if variant == "gae" else 1e-12  # the critic is float32
    assert (accumulated - whole).norm() < tolerance * whole.norm()


@pytest.mark.parametrize("advantage", ["absolute", "group", "rloo"])
@pytest.mark.parametrize("variant", ["chunk", "token", "trajectory", "behaviour"])
def test_decisions_without_advantage_count_the_same_whether_they_run_or_not(monkeypatch, variant, advantage):
    case = make_case(**({"advantage": advantage} | VARIANTS[variant]))
    assert 0 < (case.batch.advantages != 0).sum() < len(case.batch)
    without = policy_gradient(case)
    monkeypatch.setattr("rl.update.rows_that_learn", lambda *_: (torch.ones(len(case.batch), dtype=torch.bool), True))
    with_all = policy_gradient(make_case(**({"advantage": advantage} | VARIANTS[variant])))
    torch.testing.assert_close(without, with_all, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("variant", ["chunk", "trajectory", "behaviour"])
def test_minibatches_add_up_to_the_rollout(variant):
    settings = {"advantage": "batch", "entropy_coef": 0.1} | VARIANTS[variant]  # entropy: no minibatch is skipped
    (whole,) = gradients(make_case(**settings))
    case = make_case(**settings)
    sizes = [len(rows) for rows in torch.arange(len(case.batch)).split(4)]
    assert sizes[-1] < 4
    parts = gradients(case, batch_size=4)[-len(sizes) :]
    total = sum(size * part[0] for size, part in zip(sizes, parts, strict=True)) / len(case.batch)
    torch.testing.assert_close(total, whole[0], rtol=1e-9, atol=1e-12)
