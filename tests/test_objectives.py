"""What an update minimises, against formulas evaluated here in float64 on the same logits."""

import pytest
import torch

from configs.config import LossConfig, PhaseConfig
from rl.objectives import decision_weights, distillation_objective, policy_objective, teacher_distribution
from rl.trajectory import flatten
from tests.fakes import ACTION_DIM, FIRST_ACTION_TOKEN, NUM_BINS, NUM_TOKENS, FakePolicy, acted_batch, trajectory

LENGTHS = (3, 2, 3)
ROWS = torch.arange(sum(LENGTHS))
ADVANTAGES = torch.tensor([1.0, -0.5, 0.0, 2.0, -2.0, 0.0, 1.5, -1.0])


@pytest.fixture
def policy() -> FakePolicy:
    return FakePolicy(adapter_scale=0.2)


@pytest.fixture
def batch(policy):
    return acted_batch(policy, LENGTHS)


def moved(policy: FakePolicy) -> FakePolicy:
    """The same policy after some training: ratios are no longer 1."""
    with torch.no_grad():
        policy.bias += 0.3 * torch.randn(policy.bias.shape, generator=torch.Generator().manual_seed(1))
    return policy


def loss_and_statistics(policy, batch, advantages=ADVANTAGES, rows=ROWS, temperature=1.0, epsilon=None, **settings):
    objective = policy_objective(policy, batch, advantages, LossConfig(**settings), temperature, 2, epsilon)
    return objective.loss(policy.chunk_logits([batch.observations[i] for i in rows]), rows)


def mean_over_executed(values, batch) -> torch.Tensor:
    return (values * batch.executed).sum(-1) / batch.executed.sum(-1)


def new_logprobs(policy, batch, temperature=1.0) -> torch.Tensor:
    """(N, A, V) of the policy now, in float64."""
    return (policy.chunk_logits(batch.observations).detach().double() / temperature).log_softmax(-1)


def at_tokens(logprobs, batch) -> torch.Tensor:
    return logprobs.gather(-1, (batch.tokens - FIRST_ACTION_TOKEN)[..., None]).squeeze(-1)


def clipped(ratio, advantage) -> torch.Tensor:
    lower, upper = (0.8, 1.28) if advantage > 0 else (0.72, 1.2)
    return -torch.minimum(ratio * advantage, ratio.clamp(lower, upper) * advantage)


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_chunk_level_loss_is_the_formula(policy, temperature):
    batch = acted_batch(policy, LENGTHS, temperature)
    new = at_tokens(new_logprobs(moved(policy), batch, temperature), batch)
    ratio = mean_over_executed(new - batch.student_logprobs, batch).exp()
    expected = sum(clipped(r, a) for r, a in zip(ratio, ADVANTAGES, strict=True))
    loss, statistics = loss_and_statistics(policy, batch, temperature=temperature)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert statistics.sums["train/ratio_mean"] == pytest.approx(ratio.sum().item(), rel=1e-5)
    assert statistics.maxima["train/ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-5)
    assert statistics.decisions == len(batch)


def test_token_level_loss_is_the_formula(policy, batch):
    ratio = (at_tokens(new_logprobs(moved(policy), batch), batch) - batch.student_logprobs).exp()
    per_token = torch.stack([clipped(r, a) for r, a in zip(ratio, ADVANTAGES, strict=True)])
    loss, statistics = loss_and_statistics(policy, batch, ratio_level="token")
    assert loss.item() == pytest.approx(mean_over_executed(per_token, batch).sum().item(), rel=1e-4)
    assert statistics.maxima["train/ratio_max"] == pytest.approx(ratio[batch.executed].max().item(), rel=1e-5)


def test_behaviour_importance_is_the_exact_mixtures_joint_ratio(policy, batch):
    new = at_tokens(new_logprobs(moved(policy), batch), batch)
    matches = torch.zeros_like(batch.executed)
    matches[::2] = True  # every other chunk is the teacher's
    batch.matches_teacher.copy_(matches)
    student = (batch.student_logprobs.double() * batch.executed).sum(-1).exp()
    behaviour = 0.25 * matches[:, 0] + 0.75 * student
    log_ratio = (new * batch.executed).sum(-1) - behaviour.log()
    ratio = log_ratio.clamp(-5, 5).exp()
    expected = sum(clipped(r, a) for r, a in zip(ratio, ADVANTAGES, strict=True))
    loss, _ = loss_and_statistics(policy, batch, epsilon=0.25)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)


def test_before_any_step_every_ratio_is_1(policy, batch):
    _, statistics = loss_and_statistics(policy, batch)
    assert statistics.sums["ratio_error"] / len(batch) < 1e-6
    assert statistics.sums["train/ratio_mean"] / len(batch) == pytest.approx(1)
    assert statistics.sums["train/clip_fraction"] == 0


def test_kl_term_is_coef_times_the_exact_kl_to_the_teacher(policy, batch):
    with policy.teacher():
        teacher = new_logprobs(policy, batch, 1.6)
    student = new_logprobs(policy, batch, 1.6)
    expected = mean_over_executed((student.exp() * (student - teacher)).sum(-1), batch).sum().item()
    plain, _ = loss_and_statistics(policy, batch, temperature=1.6)
    loss, statistics = loss_and_statistics(policy, batch, temperature=1.6, kl_coef=0.5)
    assert expected > 0.1
    assert (loss - plain).item() == pytest.approx(0.5 * expected, rel=1e-4)
    assert statistics.sums["train/teacher_kl"] == pytest.approx(expected, rel=1e-4)


def test_entropy_bonus_lowers_the_loss_by_coef_times_the_entropy(policy, batch):
    logprobs = new_logprobs(policy, batch)
    expected = mean_over_executed(-(logprobs.exp() * logprobs).sum(-1), batch).sum().item()
    plain, statistics = loss_and_statistics(policy, batch)
    loss, _ = loss_and_statistics(policy, batch, entropy_coef=0.5)
    assert (loss - plain).item() == pytest.approx(-0.5 * expected, rel=1e-4)
    assert statistics.sums["train/entropy"] == pytest.approx(expected, rel=1e-5)


def test_without_kl_and_entropy_zero_advantages_are_inactive(policy, batch):
    objective = policy_objective(policy, batch, ADVANTAGES, LossConfig(), 1.0, 2)
    assert objective.active.tolist() == (ADVANTAGES != 0).tolist()


@pytest.mark.parametrize("term", ["kl_coef", "entropy_coef"])
def test_with_kl_or_entropy_every_decision_is_active(policy, batch, term):
    objective = policy_objective(policy, batch, torch.zeros(len(batch)), LossConfig(**{term: 0.1}), 1.0, 2)
    assert objective.active.all()


@pytest.mark.parametrize("ratio_level", ["chunk", "token"])
def test_a_zero_advantage_gives_exactly_zero_gradient(policy, batch, ratio_level):
    loss, _ = loss_and_statistics(moved(policy), batch, torch.zeros(len(batch)), ratio_level=ratio_level)
    loss.backward()
    assert not policy.bias.grad.any()


def test_the_teacher_is_asked_only_for_a_kl_term(policy, batch):
    policy.rows_run = 0
    policy_objective(policy, batch, ADVANTAGES, LossConfig(), 1.0, 2)
    assert policy.rows_run == 0
    policy_objective(policy, batch, ADVANTAGES, LossConfig(kl_coef=0.1), 1.0, 2)
    assert policy.rows_run == len(batch)


def test_decision_aggregation_weighs_decisions_equally(batch):
    assert (decision_weights(batch, "decision") == 1).all()


def test_trajectory_aggregation_weighs_trajectories_equally():
    batch = flatten([trajectory(1), trajectory(4), trajectory(7)], ACTION_DIM)
    weights = decision_weights(batch, "trajectory")
    per_trajectory = torch.zeros(3).index_add(0, batch.trajectory, weights)
    assert per_trajectory.tolist() == pytest.approx([4.0, 4.0, 4.0])
    assert weights.mean().item() == pytest.approx(1)  # so the learning rate keeps its meaning


def test_trajectory_aggregation_takes_the_mean_over_trajectories_of_their_means(policy, batch):
    each = [loss_and_statistics(policy, batch, rows=row[None])[0].item() for row in ROWS]
    means, start = [], 0
    for length in LENGTHS:
        means.append(sum(each[start : start + length]) / length)
        start += length
    loss, _ = loss_and_statistics(policy, batch, aggregation="trajectory")
    assert loss.item() / len(batch) == pytest.approx(sum(means) / len(means), rel=1e-5)


def test_distillation_pulls_towards_the_executed_tokens_at_temperature_1(policy, batch):
    objective = distillation_objective(policy, batch, PhaseConfig(), 2)
    loss, _ = objective.loss(policy.chunk_logits(batch.observations), ROWS)
    expected = mean_over_executed(-at_tokens(new_logprobs(policy, batch), batch), batch).sum().item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert objective.active.all()


def test_sharpened_distillation_has_the_teachers_distribution_as_its_minimum(policy, batch):
    phases = PhaseConfig(distill_target="sharpened", distill_temperature=1.0)
    objective = distillation_objective(policy, batch, phases, 3)
    with policy.teacher():
        logits = policy.chunk_logits(batch.observations).requires_grad_()
    objective.loss(logits, ROWS)[0].backward()  # a student that equals the teacher: cross-entropy cannot fall
    assert logits.grad.abs().max() < 1e-6
    other = policy.chunk_logits(batch.observations)
    assert objective.loss(other, ROWS)[0] > objective.loss(logits, ROWS)[0]


def test_sharpening_divides_the_teachers_logits_by_the_temperature(policy, batch):
    with policy.teacher():
        expected = new_logprobs(policy, batch, 0.5)
    stored = teacher_distribution(policy, batch, 0.5, micro_batch_size=3)
    assert stored.shape == (len(batch), NUM_TOKENS, NUM_BINS)
    torch.testing.assert_close(stored.double(), expected, rtol=1e-5, atol=1e-5)
    assert not stored.requires_grad


def test_the_teachers_distribution_does_not_depend_on_the_micro_batch(policy, batch):
    one, all_at_once = (teacher_distribution(policy, batch, 1.0, size) for size in (1, len(batch)))
    assert torch.equal(one, all_at_once)
