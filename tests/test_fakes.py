"""The fakes keep the contracts of what they stand for: otherwise the tests that use them prove nothing."""

import dataclasses
import inspect

import pytest
import torch

from envs.libero import ChunkResult
from envs.pool import Pool, WorkerPool
from tests.fakes import FakePolicy, FakePool, FakeResult, random_observations
from vla.policy import Policy

POLICY_METHODS = [
    "act", "act_as_teacher", "chunk_logits", "token_logprobs", "teacher", "learn_from", "named_trainable_parameters",
    "save_adapter", "load_adapter", "describe", "watch", "recompute_everything",
]  # fmt: skip


@pytest.mark.parametrize("method", POLICY_METHODS)
def test_policy_methods_take_the_real_arguments(method):
    assert list(inspect.signature(getattr(FakePolicy, method)).parameters) == list(
        inspect.signature(getattr(Policy, method)).parameters
    )


@pytest.mark.parametrize("real", [Pool, WorkerPool])
@pytest.mark.parametrize("method", ["reset", "step", "ready", "close"])
def test_pool_methods_take_the_real_arguments(real, method):
    assert list(inspect.signature(getattr(FakePool, method)).parameters) == list(
        inspect.signature(getattr(real, method)).parameters
    )


def test_results_have_the_real_fields():
    assert [f.name for f in dataclasses.fields(FakeResult)] == [f.name for f in dataclasses.fields(ChunkResult)]


def test_the_teacher_ignores_training_and_the_student_does_not():
    policy, observations = FakePolicy(), random_observations(2)
    with policy.teacher():
        before = policy.chunk_logits(observations)
    with torch.no_grad():
        policy.bias.normal_()
    with policy.teacher():
        assert torch.equal(policy.chunk_logits(observations), before)
    assert not torch.equal(policy.chunk_logits(observations), before)
