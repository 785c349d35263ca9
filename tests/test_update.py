"""`update`: exact accumulation, gradient protection, decisions left out without a trace, and want of memory."""

import math
from dataclasses import replace

import pytest
import torch

from configs.config import TrainConfig, changed
from configs.sections import PhaseConfig, UpdateConfig
from contracts import BadInput, SelfCheckError
from rl.advantages import trajectory_weights
from rl.losses import approx_kl
from rl.optimizer_step import follow_kl, rl_learning_rate
from rl.phases import phase_at
from rl.update import Learner, Objective, draw_minibatches, prepare_batch, update
from tests.fakes import (
    FakePolicy,
    Recorder,
    acted_batch,
    adamw,
    assert_same_bits,
    is_in_a_graph,
    parameters_of,
)
from vla.tokens import token_logprobs

LENGTHS = (3, 2, 3)
N = sum(LENGTHS)
ADVANTAGES = torch.tensor([1.0, 0.0, -2.0, 0.5, 0.0, 0.0, -1.0, 1.5])
RL = phase_at(0, PhaseConfig(warmup=False))
WARMUP = phase_at(0, PhaseConfig(warmup_steps=1, warmup_actor="teacher"))
TRANSITION = phase_at(1, PhaseConfig(warmup_steps=1, transition_steps=2))


class Observed(FakePolicy):
    """Has memory for one autograd graph; the gradient of its n-th pass becomes change(n, gradient), which may raise."""

    def __init__(self, change, adapter_scale: float = 0.2):
        super().__init__(adapter_scale=adapter_scale)
        self.change = change
        self.sizes: list[int] = []  # of its passes

    def chunk_logits(self, observations, kept=None):
        assert not any(is_in_a_graph(parameter) for parameter in self.parameters())
        number = len(self.sizes)
        self.sizes.append(len(observations))
        logits = super().chunk_logits(observations)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: self.change(number, gradient))
        return logits


@pytest.fixture
def policy() -> FakePolicy:
    return FakePolicy(adapter_scale=0.2)


@pytest.fixture
def batch(policy):
    return acted_batch(policy, LENGTHS)


def learn(policy, batch, advantages=ADVANTAGES, optimizer=None, phase=RL, **settings):
    """Metrics of an update. By default the batch is one minibatch of one epoch."""
    one_minibatch = {"n_epochs": 1, "warmup_epochs": 1, "batch_size": N, "micro_batch_size": N}
    limits = {"ratio_level": "chunk", "max_grad_norm": 1e6, "lr": 1e-2, "warmup_lr": 3e-6, "desired_kl": None}
    config = changed(TrainConfig(), warmup_target="hard")
    config = changed(config, **(one_minibatch | limits | settings))
    learner = Learner(policy, None, optimizer or adamw(policy))
    if phase is not WARMUP:
        batch = replace(batch, advantages=advantages)
    return update(learner, batch, phase, config, 0)


def gradients(policy, batch, *arguments, **settings) -> list[torch.Tensor]:
    recorder = Recorder(policy)
    learn(policy, batch, *arguments, optimizer=recorder, **settings)
    return recorder.gradients


# accumulation


@pytest.mark.parametrize("batch_size", [N, 2, 3])
def test_leaving_out_zero_advantages_gives_the_gradient_of_running_them(
    monkeypatch, policy, batch, batch_size
):
    settings = {"batch_size": batch_size, "micro_batch_size": 1}
    batch = replace(batch, weights=trajectory_weights(batch))
    policy.rows_run = 0
    without = gradients(policy, batch, **settings)
    assert policy.rows_run == int((ADVANTAGES != 0).sum()) + N  # all of them once, for the statistics
    monkeypatch.setattr(Objective, "is_active", lambda *_: torch.ones(N, dtype=torch.bool))
    with_all = gradients(policy, batch, **settings)
    run = [g for g in with_all if g.any()]  # minibatches of zeros only take no step
    assert len(run) > 0
    assert_same_bits(without, run)


@pytest.mark.parametrize(
    ("settings", "phase", "temperature"),
    [({"kl_coef": 0.1, "temperature": 1.6}, RL, 1.6), ({"warmup_target": "soft"}, WARMUP, 0.3)],
)
def test_the_teachers_distribution_is_that_of_its_temperature_and_not_of_the_micro_batch(
    policy, batch, settings, phase, temperature
):
    with policy.teacher():
        expected = (policy.chunk_logits(batch.observations) / temperature).log_softmax(-1)
    for size in (1, 3, N):
        config = changed(TrainConfig(), micro_batch_size=size, **settings)
        prepared = prepare_batch(Learner(policy, None, adamw(policy)), batch, phase, config)
        assert torch.equal(prepared.teacher_logprobs, expected)


@pytest.mark.parametrize("mode", ["greedy", "median"])
def test_what_the_student_saw_is_labelled_with_its_teachers_tokens_where_the_student_acts(
    policy, batch, mode
):
    expected = policy.act_as_teacher(batch.observations, mode).tokens
    assert not torch.equal(expected, batch.tokens)
    for actor, tokens in (("student", expected), ("teacher", batch.tokens)):
        phases = PhaseConfig(warmup_steps=1, warmup_actor=actor)
        config = changed(TrainConfig(), warmup_actor=actor, micro_batch_size=3)
        learner = Learner(policy, None, adamw(policy), teacher_mode=mode)
        prepared = prepare_batch(learner, batch, phase_at(0, phases), config)
        assert torch.equal(prepared.tokens, tokens)


@pytest.mark.parametrize("phase", [WARMUP, RL])
@pytest.mark.parametrize(
    ("room", "failing_pass", "sizes"), [(math.inf, None, [3, 2]), (math.inf, 1, [3, 1]), (2, None, [3, 1])]
)
def test_however_a_minibatch_fits_into_memory_its_gradient_is_the_same(
    batch, phase, room, failing_pass, sizes
):
    """A graph is gone when the next pass begins: it may be recorded as a CUDA graph of another size."""

    def run_out_of_memory(n, gradient):
        if n == failing_pass:
            raise torch.OutOfMemoryError
        return gradient

    policy = Observed(run_out_of_memory)
    policy.room = room
    small = FakePolicy(adapter_scale=0.2)
    learn(policy, batch, torch.ones(N), phase=phase, micro_batch_size=3)
    learn(small, batch, torch.ones(N), phase=phase, micro_batch_size=1)
    assert list(dict.fromkeys(policy.sizes)) == sizes
    torch.testing.assert_close(parameters_of(policy), parameters_of(small), rtol=1e-5, atol=1e-5)
    policy.room = 0
    with pytest.raises(BadInput, match="--micro-batch-size"):
        learn(policy, batch, micro_batch_size=3)


def test_minibatches_are_equal_parts_of_all_rows(policy, batch):
    """No remainder of one row takes a whole step. Their sizes count inactive rows."""
    batch = replace(batch, advantages=ADVANTAGES)
    objective = Objective(policy, RL, TrainConfig())
    for batch_size, sizes in ((7, [4, 4]), (3, [3, 3, 2]), (N, [N])):
        generator = torch.Generator().manual_seed(0)
        minibatches = draw_minibatches(objective, batch, batch_size, generator)
        assert [minibatch.size for minibatch in minibatches] == sizes
        rows = torch.cat([minibatch.active.student_logprobs for minibatch in minibatches])
        assert sorted(rows.tolist()) == sorted(batch.student_logprobs[ADVANTAGES != 0].tolist())


# degenerate rollouts


def test_a_rollout_without_advantages_leaves_no_trace_unless_kl_or_entropy_count(policy, batch):
    before = parameters_of(policy)
    optimizer = adamw(policy, weight_decay=0.5)
    metrics = learn(policy, batch, torch.zeros(N), optimizer)
    assert_same_bits(before, parameters_of(policy))
    assert all(state["step"] == 0 for state in optimizer.state.values())
    assert metrics["train/optimizer_steps"] == metrics["train/skipped_steps"] == 0
    assert metrics["train/zero_advantage_fraction"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    for term in ("kl_coef", "entropy_coef"):
        metrics = learn(policy, acted_batch(policy, LENGTHS), torch.zeros(N), **{term: 0.1})
        assert metrics["train/optimizer_steps"] == 1


# gradient protection


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e9])
def test_a_bad_gradient_skips_the_step_and_leaves_nothing_behind(factor):
    last = N - 1  # step of the epoch
    policy = Observed(lambda n, gradient: gradient * (factor if n == last else 1), adapter_scale=0.0)
    clean = FakePolicy()
    batch = acted_batch(policy, LENGTHS)
    one_by_one = {"batch_size": 1, "max_grad_norm": 1.0, "phase": WARMUP}
    metrics = learn(policy, batch, **one_by_one)
    assert (metrics["train/skipped_steps"], metrics["train/optimizer_steps"]) == (1, N - 1)
    assert all(p.grad is None for _, p in policy.named_trainable_parameters())

    optimizer = adamw(clean)
    step = optimizer.step
    optimizer.step = lambda: step() if next(iter(optimizer.state.values()))["step"] < last else None
    learn(clean, batch, optimizer=optimizer, **one_by_one)
    assert_same_bits(parameters_of(policy), parameters_of(clean))


@pytest.mark.parametrize(("usable", "passes"), [(0, N), (5, 2 * N)])
def test_an_epoch_without_a_usable_gradient_is_an_error(usable, passes):
    policy = Observed(lambda n, gradient: gradient * (1 if n < usable else math.nan), adapter_scale=0.0)
    batch = acted_batch(policy, LENGTHS)
    with pytest.raises(BadInput, match="diverged"):
        learn(policy, batch, phase=WARMUP, batch_size=1, micro_batch_size=1, warmup_epochs=9)
    assert len(policy.sizes) == passes


@pytest.mark.parametrize(("norm", "stepped_norm", "spikes"), [(0.5, 0.5, 0), (99.0, 1.0, 0), (101.0, 1.0, 1)])
def test_norms_above_the_bound_are_scaled_down_to_it_and_spikes_counted(
    policy, batch, norm, stepped_norm, spikes
):
    (plain,) = gradients(policy, batch, phase=WARMUP)
    scaled = Observed(lambda n, gradient: gradient * norm / plain.norm())
    recorder = Recorder(scaled)
    metrics = learn(scaled, batch, optimizer=recorder, phase=WARMUP, max_grad_norm=1.0)
    assert (metrics["train/gradient_spikes"], metrics["train/skipped_steps"]) == (spikes, 0)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)  # before clipping
    assert recorder.gradients[0].norm().item() == pytest.approx(stepped_norm, rel=1e-4)


# the ratios of the first minibatch


def test_first_ratio_error_is_0_when_update_and_rollout_agree(policy):
    batch = acted_batch(policy, LENGTHS, temperature=1.6)
    metrics = learn(policy, batch, temperature=1.6, n_epochs=3, batch_size=2, micro_batch_size=1, lr=0.1)
    assert metrics["train/first_ratio_error"] < 1e-5  # though later minibatches have moved far
    assert metrics["train/first_token_ratio_error"] < 1e-5
    assert metrics["train/ratio_max"] > 1.05


@pytest.mark.parametrize("fault", ["temperature", "weights", "tokens", "nan"])
def test_an_update_that_does_not_see_the_policy_that_acted_is_found_before_any_step(policy, fault):
    batch = acted_batch(policy, LENGTHS, temperature=1.6 if fault == "temperature" else 1.0)
    if fault == "weights":
        policy = FakePolicy(adapter_scale=0.6)
    if fault == "tokens":  # whose errors cancel within a chunk, but the loss clips tokens
        batch.student_logprobs[:, 0::2] += 0.5
        batch.student_logprobs[:, 1::2] -= 0.5
    if fault == "nan":
        batch.student_logprobs[:] = math.nan
    before = parameters_of(policy)
    with pytest.raises(SelfCheckError, match="first minibatch"):
        learn(policy, batch)
    assert_same_bits(before, parameters_of(policy))


# statistics


@pytest.mark.parametrize("ratio_level", ["chunk", "token"])
def test_entropy_kl_and_clip_fraction_are_those_of_all_rows_after_the_update(
    monkeypatch, policy, batch, ratio_level
):
    metrics = learn(policy, batch, n_epochs=3, lr=0.1, ratio_level=ratio_level)
    now = policy.chunk_logits(batch.observations).detach()
    new = token_logprobs(now, batch.tokens, 1.0)
    expected = {"entropy": 0.0, "approx_kl": 0.0, "clip_fraction": 0.0}
    for row in range(N):
        n = int(batch.executed[row].sum())
        steps = new[row, :n] - batch.student_logprobs[row, :n]
        ratios = (steps.mean(0, keepdim=True) if ratio_level == "chunk" else steps).exp()
        expected["entropy"] += (
            torch.distributions.Categorical(logits=now[row, :n]).entropy().mean().item() / N
        )
        expected["approx_kl"] += (steps**2 / 2).mean().item() / N
        expected["clip_fraction"] += ((ratios < 0.8) | (ratios > 1.28)).float().mean().item() / N
    assert {name: metrics[f"train/{name}"] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert expected["clip_fraction"] > 0

    monkeypatch.setattr("rl.update.SAMPLE_SIZE", 3)
    policy.rows_run = 0
    learn(policy, acted_batch(policy, LENGTHS))
    assert policy.rows_run == int((ADVANTAGES != 0).sum()) + 3


# the optimizer


def test_the_warmup_has_its_own_learning_rate_and_epochs(policy, batch):
    settings = {"lr": 2e-4, "n_epochs": 2, "warmup_lr": 2e-3, "warmup_epochs": 3}
    for phase, lr, epochs in ((RL, 2e-4, 2), (WARMUP, 2e-3, 3)):
        metrics = learn(policy, batch, phase=phase, **settings)
        assert (metrics["train/lr"], metrics["train/optimizer_steps"]) == (lr, epochs)


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.0, 3e-4), (1e9, 1e-4 / 3), (math.inf, 1e-4 / 3), (0.02, 0.5e-4), (0.005, 2e-4)]
)
def test_an_update_changes_the_learning_rate_by_a_factor_of_at_most_3(policy, kl, expected):
    optimizer = adamw(policy, lr=1e-4)
    follow_kl(optimizer, kl, UpdateConfig(lr=1e-4, desired_kl=0.01))
    assert rl_learning_rate(optimizer, initial=1.0) == pytest.approx(expected)


def test_the_learning_rate_ends_at_100_times_the_first_one_and_stays_without_a_kl(policy, batch):
    optimizer = adamw(policy, lr=1e-4)
    for _ in range(8):
        follow_kl(optimizer, 1e-5, UpdateConfig(lr=1e-4))
        optimizer.param_groups[0]["lr"] = rl_learning_rate(optimizer, initial=1.0)
    for kl, desired_kl in ((None, 0.01), (math.nan, 0.01), (0.3, None)):
        follow_kl(optimizer, kl, UpdateConfig(lr=1e-4, desired_kl=desired_kl))
    learn(policy, batch, optimizer=optimizer, phase=TRANSITION, lr=0.05, desired_kl=1e-6)  # does not count
    assert rl_learning_rate(optimizer, initial=1.0) == pytest.approx(1e-2)


def test_the_kl_is_that_of_the_students_own_decisions(policy, batch):
    """Without any, the learning rate stays, however far the policy moved."""
    settings = {"n_epochs": 4, "lr": 0.05, "desired_kl": 0.01}
    by_teacher = torch.ones(N, dtype=torch.bool)
    optimizer = adamw(policy)
    metrics = learn(policy, replace(batch, by_teacher=by_teacher), optimizer=optimizer, **settings)
    assert "train/approx_kl" not in metrics
    assert rl_learning_rate(optimizer, initial=2e-4) == 2e-4

    by_teacher[0] = False
    policy = FakePolicy(adapter_scale=0.2)
    measured = learn(policy, replace(batch, by_teacher=by_teacher), lr=0.05)["train/approx_kl"]
    new = token_logprobs(policy.chunk_logits(batch.observations[:1]), batch.tokens[:1], 1.0)
    assert measured == pytest.approx(approx_kl(new, batch.student_logprobs[:1], batch.executed[:1]).item())
