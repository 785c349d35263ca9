"""The two kinds of teacher: the policy as pretrained, and as it was when training began from an adapter."""

import torch

from tests.small_checkpoint import every_kind, load_policy, train_a_little


@every_kind
def test_the_pretrained_policy_never_changes(small, observations, kind):
    policy = load_policy(small, **kind)
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


def test_a_policy_that_starts_from_an_adapter_is_its_own_teacher_as_it_was(policy, observations):
    train_a_little(policy)
    teachers_logits = policy.chunk_logits(observations).detach()
    policy.freeze_as_teacher()
    assert policy.equals_teacher()
    train_a_little(policy, step=0.1)
    students_logits = policy.chunk_logits(observations).detach()
    assert not policy.equals_teacher()
    for _ in range(2):
        assert torch.equal(policy.chunk_logits(observations), students_logits)
        with policy.teacher(), policy.teacher():
            assert torch.equal(policy.chunk_logits(observations), teachers_logits)
    optimizer = policy.make_optimizer(lr=1e-2, weight_decay=0.01)
    policy.chunk_logits(observations).square().mean().backward()
    optimizer.step()
    assert not torch.equal(policy.chunk_logits(observations), students_logits)
    with policy.teacher():
        assert torch.equal(policy.chunk_logits(observations), teachers_logits)
