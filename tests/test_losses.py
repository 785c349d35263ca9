"""What of the losses the gradients of whole updates (test_gradients.py) do not show: limits, targets, estimates."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from configs.sections import LossConfig
from rl.losses import (
    FIRST_ACTION_TOKEN,
    approx_kl,
    distillation_loss,
    exact_kl,
    surrogate_loss,
)
from rl.trajectory import Batch

B, A, V = 4, 6, 256
EXECUTED = (6, 4, 2, 1)  # tokens of each row


# clipped surrogate


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def executed() -> torch.Tensor:
    return torch.arange(A)[None, :] < torch.tensor(EXECUTED)[:, None]


def test_log_ratios_are_clamped_to_5(monkeypatch):
    monkeypatch.setattr("rl.losses.DUAL_CLIP", 1000.0)  # else its bound is met first
    logratio = torch.tensor([[-40.0], [-6.0], [4.0], [6.0], [1e4]], requires_grad=True)
    one = torch.ones(5, 1, dtype=torch.bool)
    loss, ratio = surrogate_loss(logratio, -torch.ones(5), one, LossConfig())
    assert ratio.flatten().tolist() == pytest.approx([math.exp(v) for v in (-5, -5, 4, 5, 5)])
    loss.sum().backward()
    assert logratio.grad.flatten().tolist() == pytest.approx([0, 0, math.exp(4), 0, 0])


# distillation


def micro_batch(tokens: torch.Tensor, executed: torch.Tensor) -> Batch:
    zeros = torch.zeros(len(tokens), dtype=torch.int64)
    return Batch(
        observations=[None] * len(tokens),
        kept=[None] * len(tokens),
        tokens=tokens,
        executed=executed,
        student_logprobs=torch.zeros(tokens.shape),
        by_teacher=zeros.bool(),
        trajectory=zeros,
        steps_to_end=zeros,
        advantages=zeros,
        weights=executed.sum(-1) * len(tokens) / executed.sum(),
    )


def test_distillation_by_hard_targets_is_the_mean_cross_entropy_over_executed_tokens(generator, executed):
    logits = torch.randn(B, A, V, generator=generator)
    bins = torch.randint(V, (B, A), generator=generator)
    micro = micro_batch(bins + FIRST_ACTION_TOKEN, executed)
    loss, statistics = distillation_loss(logits, micro, "hard")
    expected = F.cross_entropy(logits[executed], bins[executed]).item()
    agreement = (logits.argmax(-1) == bins)[executed].float().mean().item()
    assert loss.item() / B == pytest.approx(expected, rel=1e-6)
    assert statistics["distill/loss"].item() / B == pytest.approx(expected, rel=1e-6)
    assert statistics["distill/accuracy"].item() / B == pytest.approx(agreement, rel=1e-6)


def test_in_the_limit_a_soft_target_is_the_hard_one(generator, executed):
    logits = torch.randn(B, A, V, generator=generator)
    teachers_logits = torch.randn(B, A, V, generator=generator)
    batch = replace(
        micro_batch(teachers_logits.argmax(-1) + FIRST_ACTION_TOKEN, executed),
        teacher_logprobs=(teachers_logits / 1e-5).log_softmax(-1),
    )
    hard, soft = (distillation_loss(logits, batch, kind)[0] for kind in ("hard", "soft"))
    torch.testing.assert_close(soft, hard)


# divergence


def test_approx_kl_is_near_the_exact_one_of_a_small_step(generator):
    old = (2 * torch.randn(1, 1, V, generator=generator)).log_softmax(-1).double()
    new = (old + 0.05 * torch.randn(old.shape, generator=generator)).log_softmax(-1)
    # Expectation over the tokens that the old policy draws, by enumeration of all 256.
    estimates = approx_kl(new[0, 0, :, None], old[0, 0, :, None], torch.ones(V, 1, dtype=torch.bool))
    expected = (old[0, 0].exp() * estimates).sum().item()
    assert expected == pytest.approx(exact_kl(old, new, torch.ones(1, 1)).item(), rel=0.05)


def test_one_token_with_a_large_ratio_does_not_make_up_the_approx_kl():
    """A rollout of 256 decisions of 56 tokens that moved by 0.02 nats, in which one token is 57 times as likely."""
    count = 256 * 56
    logratio = torch.full((1, count), math.sqrt(2 * 0.02))
    logratio[0, 0] = math.log(57)
    estimate = approx_kl(logratio, torch.zeros(1, count), torch.ones(1, count, dtype=torch.bool)).item()
    assert estimate == pytest.approx(0.02, rel=0.03)
