"""Losses against closed forms, torch's own functions and brute-force enumeration."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from rl.losses import (
    FIRST_ACTION_TOKEN,
    approximate_kl,
    behaviour_log_ratio,
    chunk_log_ratio,
    clipped_surrogate,
    distillation_loss,
    entropy,
    exact_kl,
    masked_mean,
)

HIGH = 0.28
B, A, V = 4, 6, 256


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def executed() -> torch.Tensor:
    """(B, A): 6, 4, 2 and 1 executed tokens."""
    return torch.arange(A)[None, :] < torch.tensor([6, 4, 2, 1])[:, None]


def random_logprobs(generator: torch.Generator) -> torch.Tensor:
    return (2 * torch.randn(B, A, V, generator=generator)).log_softmax(-1)


def surrogate_of(ratio: float, advantage: float) -> tuple[float, float, bool]:
    """Loss of one decision, its derivative by the log-ratio, and whether the clip held."""
    log_ratio = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.bool)
    loss, _, clipped = clipped_surrogate(log_ratio, torch.tensor([advantage], dtype=torch.float64), one, HIGH)
    loss.sum().backward()
    return loss.item(), log_ratio.grad.item(), bool(clipped)


# clipped surrogate


@pytest.mark.parametrize(
    ("advantage", "ratio", "effective"),
    [
        (1.0, 1.27, 1.27),
        (1.0, 1.29, 1.28),  # no reward for going further up
        (1.0, 0.81, 0.81),
        (1.0, 0.5, 0.5),  # min: a loss is never hidden by the clip
        (-1.0, 0.73, 0.73),
        (-1.0, 0.71, 0.72),  # no reward for going further down
        (-1.0, 1.19, 1.19),
        (-1.0, 3.0, 3.0),
        (2.5, 2.0, 1.28),
        (-0.3536, 0.1, 0.72),
    ],
)
def test_surrogate_on_both_sides_of_both_bounds(advantage, ratio, effective):
    loss, gradient, clipped = surrogate_of(ratio, advantage)
    assert loss == pytest.approx(-effective * advantage)
    assert clipped == (effective != ratio)
    assert gradient == pytest.approx(0.0 if clipped else -ratio * advantage)


@given(ratio=st.floats(0.01, 100), advantage=st.floats(-10, 10))
def test_surrogate_is_the_formula_of_the_specification(ratio, advantage):
    lower, upper = (1 - 0.2, 1 + 0.28) if advantage > 0 else (1 - 0.28, 1 + 0.2)
    bounded = min(max(ratio, lower), upper)
    assert surrogate_of(ratio, advantage)[0] == pytest.approx(-min(ratio * advantage, bounded * advantage), rel=1e-6)


def test_log_ratios_are_clamped_to_5():
    log_ratio = torch.tensor([[-40.0], [-6.0], [4.0], [6.0], [1e4]], requires_grad=True)
    loss, ratio, _ = clipped_surrogate(log_ratio, -torch.ones(5), torch.ones(5, 1, dtype=torch.bool), HIGH)
    assert ratio.flatten().tolist() == pytest.approx([math.exp(v) for v in (-5, -5, 4, 5, 5)])
    loss.sum().backward()
    assert log_ratio.grad.flatten().tolist() == pytest.approx([0, 0, math.exp(4), 0, 0])


def test_at_ratio_1_the_gradient_is_that_of_reinforce(generator, executed):
    logits = torch.randn(B, A, V, generator=generator, dtype=torch.float64, requires_grad=True)
    columns = torch.randint(V, (B, A), generator=generator)
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.0], dtype=torch.float64)
    new = logits.log_softmax(-1).gather(-1, columns[..., None]).squeeze(-1)
    log_ratio = chunk_log_ratio(new, new.detach(), executed)
    clipped_surrogate(log_ratio, advantages, executed[:, :1], HIGH)[0].sum().backward()
    # d(-A log pi)/d logits = -A (one-hot - softmax), shared equally by the executed tokens
    weight = advantages[:, None] * executed / executed.sum(-1, keepdim=True)
    expected = -weight[..., None] * (F.one_hot(columns, V) - logits.detach().softmax(-1))
    torch.testing.assert_close(logits.grad, expected, rtol=1e-9, atol=1e-12)


def test_token_ratios_equal_the_chunk_ratio_when_a_chunk_has_one_token(generator):
    new, old = torch.randn(2, B, 1, generator=generator)
    advantages, one = torch.tensor([1.0, -1.0, 0.5, -2.0]), torch.ones(B, 1, dtype=torch.bool)
    by_token = clipped_surrogate(new - old, advantages, one, HIGH)
    by_chunk = clipped_surrogate(chunk_log_ratio(new, old, one), advantages, one, HIGH)
    for a, b in zip(by_token, by_chunk, strict=True):
        assert torch.equal(a, b)


def test_token_ratios_are_clipped_one_by_one_and_averaged_over_executed_tokens():
    log_ratio = torch.tensor([[1.5, 1.0, 0.5, 7.0]]).log()
    executed = torch.tensor([[True, True, True, False]])
    loss, ratio, clipped = clipped_surrogate(log_ratio, torch.tensor([1.0]), executed, HIGH)
    assert loss.item() == pytest.approx(-(1.28 + 1.0 + 0.5) / 3)
    assert ratio[0, :3].tolist() == pytest.approx([1.5, 1.0, 0.5])
    assert clipped.tolist() == [[True, False, False, False]]


def test_chunk_log_ratio_is_the_difference_of_mean_logprobs_over_executed_tokens(generator, executed):
    new, old = torch.randn(2, B, A, generator=generator)
    expected = [(new[b, :n].mean() - old[b, :n].mean()).item() for b, n in enumerate((6, 4, 2, 1))]
    assert chunk_log_ratio(new, old, executed).flatten().tolist() == pytest.approx(expected, abs=1e-6)


# masks


def test_masked_mean_is_the_mean_over_executed_tokens(generator, executed):
    values = torch.randn(B, A, generator=generator)
    assert masked_mean(values, executed).tolist() == pytest.approx(
        [values[b, :n].mean().item() for b, n in enumerate((6, 4, 2, 1))], abs=1e-6
    )


def test_tokens_that_were_not_executed_change_no_loss(generator, executed):
    def losses(logits, old, reference):
        columns = torch.arange(A).expand(B, A)
        logprobs = logits.log_softmax(-1)
        new = logprobs.gather(-1, columns[..., None]).squeeze(-1)
        advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
        return [
            distillation_loss(logits, columns + FIRST_ACTION_TOKEN, executed)[0],
            distillation_loss(logits, columns + FIRST_ACTION_TOKEN, executed, reference)[0],
            clipped_surrogate(new - old, advantages, executed, HIGH)[0],
            clipped_surrogate(chunk_log_ratio(new, old, executed), advantages, executed[:, :1], HIGH)[0],
            behaviour_log_ratio(new, old, executed, executed, 0.3),
            exact_kl(logprobs, reference, executed),
            entropy(logprobs, executed),
            approximate_kl(new, old, executed),
        ]

    logits, other = torch.randn(2, B, A, V, generator=generator)
    old, reference = torch.randn(B, A, generator=generator) - 5, random_logprobs(generator)
    changed = torch.where(executed[..., None], logits, 50 * other)
    changed_old = torch.where(executed, old, old - 3)
    changed_reference = torch.where(executed[..., None], reference, random_logprobs(generator))
    before, after = losses(logits, old, reference), losses(changed, changed_old, changed_reference)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    leaf = logits.clone().requires_grad_()
    sum(loss.sum() for loss in losses(leaf, old, reference)).backward()
    assert (leaf.grad[~executed] == 0).all()
    assert (leaf.grad[executed] != 0).any()


# distillation


def test_distillation_to_tokens_is_cross_entropy(generator, executed):
    logits, columns = torch.randn(B, A, V, generator=generator), torch.randint(V, (B, A), generator=generator)
    loss, statistics = distillation_loss(logits, columns + FIRST_ACTION_TOKEN, executed)
    expected = sum(F.cross_entropy(logits[b, :n], columns[b, :n]).item() for b, n in enumerate((6, 4, 2, 1)))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert statistics.sums["distill/loss"] == pytest.approx(expected, rel=1e-6)
    assert statistics.decisions == B


def test_distillation_to_a_distribution_is_soft_cross_entropy(generator, executed):
    logits, teacher = torch.randn(B, A, V, generator=generator), random_logprobs(generator)
    loss, _ = distillation_loss(logits, torch.full((B, A), FIRST_ACTION_TOKEN), executed, teacher)
    expected = sum(F.cross_entropy(logits[b, :n], teacher[b, :n].exp()).item() for b, n in enumerate((6, 4, 2, 1)))
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_students_temperature_divides_its_logits_and_not_the_teachers(generator, executed):
    logits, teacher = torch.randn(B, A, V, generator=generator), random_logprobs(generator)
    tokens = torch.full((B, A), FIRST_ACTION_TOKEN + 3)
    for target in (None, teacher):
        warm = distillation_loss(logits, tokens, executed, target, temperature=1.6)[0]
        assert warm.item() == pytest.approx(distillation_loss(logits / 1.6, tokens, executed, target)[0].item())
        assert warm.item() != pytest.approx(distillation_loss(logits, tokens, executed, target)[0].item(), rel=1e-3)


def test_accuracy_is_the_share_of_executed_tokens_whose_argmax_is_the_teachers(executed):
    logits = F.one_hot(torch.full((B, A), 9), V).float()
    tokens = torch.full((B, A), FIRST_ACTION_TOKEN + 9)
    tokens[0, :3] += 1  # three of six wrong
    tokens[2, 2:] += 1  # wrong, but never executed
    _, statistics = distillation_loss(logits, tokens, executed)
    assert statistics.sums["distill/accuracy"] == pytest.approx(0.5 + 1 + 1 + 1)


# divergences and entropy


def test_exact_kl_and_entropy_are_those_of_torch_distributions(generator, executed):
    logprobs, reference = random_logprobs(generator), random_logprobs(generator)
    policy, teacher = (torch.distributions.Categorical(logits=x) for x in (logprobs, reference))
    expected_kl, expected_entropy = torch.distributions.kl_divergence(policy, teacher), policy.entropy()
    for b, n in enumerate((6, 4, 2, 1)):
        assert exact_kl(logprobs, reference, executed)[b] == pytest.approx(expected_kl[b, :n].mean().item(), rel=1e-4)
        assert entropy(logprobs, executed)[b] == pytest.approx(expected_entropy[b, :n].mean().item(), rel=1e-5)


def test_exact_kl_is_that_of_kl_div(generator):
    logprobs, reference = random_logprobs(generator).double(), random_logprobs(generator).double()
    expected = F.kl_div(reference, logprobs, reduction="sum", log_target=True) / A  # kl_div(q, p) is KL(p || q)
    assert exact_kl(logprobs, reference, torch.ones(B, A)).sum().item() == pytest.approx(expected.item())


steps_of_any_size = st.one_of(st.floats(-20, 20, width=32), st.floats(-0.001953125, 0.001953125, width=32))


@given(steps_of_any_size)
def test_approximate_kl_is_never_negative_and_0_without_a_step(step):
    old, one = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    assert approximate_kl(old + step, old, one).item() >= 0
    assert approximate_kl(old, old, one).item() == 0


@pytest.mark.parametrize("log_ratio", [1e-5, 1e-4, -1e-3])
def test_approximate_kl_of_a_small_step_is_half_the_squared_log_ratio(log_ratio):
    # Steps at a learning rate of 1e-6 are this small; 1 - 1 in float32 would leave nothing but rounding.
    old = torch.zeros(1, A)
    estimate = approximate_kl(old + log_ratio, old, torch.ones(1, A, dtype=torch.bool)).item()
    assert estimate == pytest.approx(log_ratio**2 / 2, rel=1e-2)


def test_approximate_kl_has_the_mean_of_the_exact_one(generator):
    old, new = (random_logprobs(generator)[:1, :1].double() for _ in range(2))
    # Expectation over the tokens that the old policy draws, by enumeration of all 256.
    estimates = approximate_kl(new[0, 0, :, None], old[0, 0, :, None], torch.ones(V, 1, dtype=torch.bool))
    expected = (old[0, 0].exp() * estimates).sum().item()
    assert expected == pytest.approx(exact_kl(old, new, torch.ones(1, 1)).item())


# behaviour importance: all chunks of 3 tokens over a vocabulary of 4


def mixture_ratios(epsilon: float, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pi_new / behaviour of every executed prefix of `length` tokens, by the code; exact pi_new; exact behaviour."""
    vocabulary, num_tokens, teacher = 4, 3, (2, 0, 3)
    generator = torch.Generator().manual_seed(5)
    old_policy, new_policy = torch.randn(2, num_tokens, vocabulary, generator=generator, dtype=torch.float64).softmax(
        -1
    )
    code, exact_new, exact_behaviour = [], [], []
    for prefix in itertools.product(range(vocabulary), repeat=length):
        chunk = torch.tensor(prefix + (1,) * (num_tokens - length))  # what follows was never executed
        executed = (torch.arange(num_tokens) < length)[None]
        old, new = (p.gather(-1, chunk[:, None]).log().T for p in (old_policy, new_policy))
        matches = (chunk == torch.tensor(teacher))[None]
        code.append(behaviour_log_ratio(new, old, executed, matches, epsilon).item())
        student = math.prod(old_policy[i, v].item() for i, v in enumerate(prefix))
        exact_new.append(math.prod(new_policy[i, v].item() for i, v in enumerate(prefix)))
        exact_behaviour.append(epsilon * (prefix == teacher[:length]) + (1 - epsilon) * student)
    return torch.tensor(code).exp(), torch.tensor(exact_new), torch.tensor(exact_behaviour)


@pytest.mark.parametrize("epsilon", [0.0, 1e-4, 0.3, 0.5, 0.999])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_behaviour_ratio_is_the_exact_mixture_over_executed_prefixes(epsilon, length):
    ratio, new, behaviour = mixture_ratios(epsilon, length)
    torch.testing.assert_close(ratio, new / behaviour, rtol=1e-4, atol=0)
    implied = new / ratio
    assert implied.sum().item() == pytest.approx(1, rel=1e-4)  # a probability distribution over the prefixes
    assert (behaviour * ratio).sum().item() == pytest.approx(1, rel=1e-4)  # importance weights have mean 1


def test_behaviour_ratio_without_a_teacher_is_the_students_joint_ratio(generator, executed):
    new, old = torch.randn(2, B, A, generator=generator)
    ratio = behaviour_log_ratio(new, old, executed, executed, epsilon=0.0)
    torch.testing.assert_close(ratio[:, 0], ((new - old) * executed).sum(-1))


def test_behaviour_at_epsilon_1_is_the_teacher_alone(generator, executed):
    new, old = torch.randn(2, B, A, generator=generator) - 5
    ratio = behaviour_log_ratio(new, old, executed, executed, epsilon=1.0)
    torch.testing.assert_close(ratio[:, 0], (new * executed).sum(-1))
