"""The loss is the whole vocabulary's cross-entropy, and the diagnosis is right where the answer is known."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vla.sft_loss import action_loss, batch_metrics, diagnose, target_distributions, zero_other_rows
from vla.tokens import FIRST_ACTION_TOKEN

CPU = torch.device("cpu")
VOCABULARY = 32064


@pytest.fixture
def logits_and_targets():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(3, 56, 256, generator=generator)
    return logits, torch.randint(256, (3, 56), generator=generator)


def test_with_one_hot_targets_it_is_the_cross_entropy_of_openvla_oft_over_all_ids():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 56, 8, generator=generator)
    lm_head = nn.Linear(8, VOCABULARY, bias=False)
    with torch.no_grad():
        lm_head.weight.copy_(torch.randn(VOCABULARY, 8, generator=generator))
    zero_other_rows(lm_head)
    targets = torch.randint(256, (2, 56), generator=generator)
    everything = lm_head(hidden)
    expected = F.cross_entropy(everything.flatten(0, 1), targets.flatten() + FIRST_ACTION_TOKEN)
    action_rows = everything[..., FIRST_ACTION_TOKEN : FIRST_ACTION_TOKEN + 256]
    ours = action_loss(action_rows, targets, target_distributions(0, CPU), VOCABULARY)
    torch.testing.assert_close(ours, expected)


def test_soft_targets_are_gaussians_around_the_target_and_leave_the_gripper_one_hot():
    distributions = target_distributions(3.0, CPU)
    torch.testing.assert_close(distributions.sum(-1), torch.ones(7, 256))
    columns = torch.arange(256.0)
    middle = distributions[0, 100]
    assert (middle @ columns).item() == pytest.approx(100)
    assert (middle @ (columns - 100) ** 2).sqrt().item() == pytest.approx(3.0, rel=1e-3)
    assert torch.equal(distributions[6], torch.eye(256))
    assert torch.equal(target_distributions(0, CPU), torch.eye(256).expand(7, -1, -1))


def test_soft_targets_apply_by_action_dimension(logits_and_targets):
    logits, targets = logits_and_targets
    loss = action_loss(logits, targets, target_distributions(2.0, CPU), VOCABULARY)
    total = torch.cat([logits, torch.zeros(3, 56, VOCABULARY - 256)], dim=-1).logsumexp(-1)
    expected = 0.0
    for k in range(56):
        for b in range(3):
            weights = torch.exp(-0.5 * ((torch.arange(256) - targets[b, k]) / 2.0) ** 2)
            if k % 7 == 6:
                weights = F.one_hot(targets[b, k], 256).float()
            expected += total[b, k] - (weights / weights.sum()) @ logits[b, k]
    torch.testing.assert_close(loss, expected / (3 * 56))


def test_a_near_miss_costs_less_than_a_far_one_only_with_soft_targets():
    targets = torch.full((1, 56), 100)
    near, far = (10 * F.one_hot(targets + shift, 256).float() for shift in (1, 50))
    soft, hard = (target_distributions(bins, CPU) for bins in (2.0, 0.0))
    assert action_loss(near, targets, soft, VOCABULARY) < action_loss(far, targets, soft, VOCABULARY) - 1
    torch.testing.assert_close(
        action_loss(near, targets, hard, VOCABULARY), action_loss(far, targets, hard, VOCABULARY)
    )


def test_a_uniform_policy_is_diagnosed_as_one(logits_and_targets):
    _, targets = logits_and_targets
    diagnosis = diagnose([(torch.zeros(3, 56, 256), targets)])
    assert diagnosis.nll == pytest.approx(math.log(256), rel=1e-6)
    assert diagnosis.entropy == pytest.approx([math.log(256)] * 7, rel=1e-5)
    by_dim = targets.unflatten(1, (8, 7)).float()
    assert diagnosis.expected_error == pytest.approx((by_dim - 127.5).abs().mean((0, 1)).tolist(), rel=1e-4)


def test_a_certain_policy_is_diagnosed_by_dimension_and_over_batches(logits_and_targets):
    _, targets = logits_and_targets
    off = torch.zeros(56, dtype=torch.int64)
    off[1::7] = 4  # y is four bins off, all else is right
    found = torch.where(targets + off < 256, targets + off, targets - off)
    logits = 100 * F.one_hot(found, 256).float()
    diagnosis = diagnose([(logits[:1], targets[:1]), (logits[1:], targets[1:])])
    assert diagnosis.accuracy == [1, 0, 1, 1, 1, 1, 1]
    assert diagnosis.argmax_error == pytest.approx([0, 4, 0, 0, 0, 0, 0])
    assert diagnosis.expected_error == pytest.approx([0, 4, 0, 0, 0, 0, 0], abs=1e-3)
    assert diagnosis.entropy == pytest.approx([0] * 7, abs=1e-6)
    assert diagnosis.position_error() == pytest.approx(4 / 3)
    accuracy, error = batch_metrics(logits, targets).tolist()
    assert (accuracy, error) == (pytest.approx(6 / 7), pytest.approx(4 / 3))
    assert diagnosis.table().splitlines()[2].split()[:2] == ["y", "0.0"]
