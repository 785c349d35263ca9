"""The three kinds of teacher: the policy as pretrained, the policy with another adapter, another policy."""

from dataclasses import replace

import pytest
import torch

from contracts import BadInput
from tests.small_checkpoint import load_policy, make_small_checkpoint, train_a_little


@pytest.fixture
def policy(small):
    return load_policy(small)


def test_the_pretrained_policy_never_changes(policy, observations):
    pretrained = policy.chunk_logits(observations).detach()
    assert policy.equals_teacher()
    for _ in range(2):
        train_a_little(policy)
        assert not policy.equals_teacher()
        trained = policy.chunk_logits(observations).detach()
        assert not torch.equal(trained, pretrained)
        with torch.no_grad(), policy.teacher():
            assert torch.equal(policy.chunk_logits(observations), pretrained)
            with policy.teacher():
                assert torch.equal(policy.chunk_logits(observations), pretrained)
            assert torch.equal(policy.chunk_logits(observations), pretrained)
        assert torch.equal(policy.chunk_logits(observations), trained)


def test_teacher_between_forward_and_backward_leaves_the_gradient(policy, observations):
    """A KL term to the teacher is computed while the student's graph is alive."""
    gradients = []
    for asks_teacher in (False, True):
        logits = policy.chunk_logits(observations)
        if asks_teacher:
            with torch.no_grad(), policy.teacher():
                policy.chunk_logits(observations)
        parameters = [parameter for _, parameter in policy.named_trainable_parameters()]
        gradients.append(torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True))
    for plain, with_teacher in zip(*gradients, strict=True):
        assert plain is with_teacher is None or torch.equal(plain, with_teacher)


def test_a_trained_adapter_of_the_same_base_teaches_on_the_same_weights(
    small, policy, observations, tmp_path
):
    teacher_policy = load_policy(small, seed=7)
    train_a_little(teacher_policy)
    teacher_policy.save_adapter(tmp_path / "adapter")
    teachers_logits = teacher_policy.chunk_logits(observations).detach()
    train_a_little(policy, step=0.1)
    students_logits = policy.chunk_logits(observations).detach()

    assert policy.use_teacher_adapter(str(tmp_path / "adapter"))
    assert not policy.equals_teacher()
    assert teacher_policy.use_teacher_adapter(str(tmp_path / "adapter"))
    assert teacher_policy.equals_teacher()
    for _ in range(2):
        assert torch.equal(policy.chunk_logits(observations), students_logits)
        with policy.teacher() as teacher, policy.teacher():
            assert teacher is policy
            assert torch.equal(policy.chunk_logits(observations), teachers_logits)
    optimizer = policy.make_optimizer(lr=1e-2, weight_decay=0.01)
    policy.chunk_logits(observations).square().mean().backward()
    optimizer.step()
    assert not torch.equal(policy.chunk_logits(observations), students_logits)
    assert torch.equal(policy.act_as_teacher(observations).tokens, teacher_policy.act(observations).tokens)


@pytest.mark.parametrize("has_other_base", [True, False])
def test_an_adapter_of_another_base_or_rank_teaches_as_another_policy_only(
    small, observations, tmp_path, has_other_base
):
    base = make_small_checkpoint(tmp_path / "other", l1_head=True, seed=5) if has_other_base else small
    teacher_policy = load_policy(base, lora_rank=4 if has_other_base else 2)
    train_a_little(teacher_policy)
    teacher_policy.save_adapter(tmp_path / "adapter")
    student = load_policy(small)
    students_logits = student.chunk_logits(observations).detach()
    assert not student.use_teacher_adapter(str(tmp_path / "adapter"))
    student.use_teacher(load_policy(tmp_path / "adapter"))
    assert not student.equals_teacher()
    assert torch.equal(student.act_as_teacher(observations).tokens, teacher_policy.act(observations).tokens)
    assert torch.equal(student.chunk_logits(observations), students_logits)


def test_a_teacher_of_other_statistics_is_refused(policy, tmp_path):
    """Its tokens mean other actions."""
    teacher = load_policy(make_small_checkpoint(tmp_path / "other", seed=5))
    action = teacher.statistics.action
    teacher.statistics = replace(teacher.statistics, action=replace(action, q01=0.5 * action.q01))
    with pytest.raises(BadInput, match="statistics"):
        policy.use_teacher(teacher)
