"""The fakes keep the contracts of what they stand for: otherwise the tests that use them prove nothing."""

import dataclasses
import inspect
from itertools import product

import torch

from envs.libero import ChunkResult
from envs.pool import Pool, WorkerPool
from tests.fakes import FakePolicy, FakePool, FakeResult, random_observations
from vla.policy import Policy

POLICY_METHODS = [
    "act", "act_as_teacher", "chunk_logits", "token_logprobs", "teacher", "learn_from", "named_trainable_parameters",
    "save_adapter", "load_adapter", "describe", "watch", "recompute_everything",
]  # fmt: skip


POOL_METHODS = ["reset", "step", "ready", "close"]


def test_methods_take_the_real_arguments():
    for fake, reals, methods in ((FakePolicy, [Policy], POLICY_METHODS), (FakePool, [Pool, WorkerPool], POOL_METHODS)):
        for real, method in product(reals, methods):
            taken, expected = (inspect.signature(getattr(kind, method)).parameters for kind in (fake, real))
            assert list(taken) == list(expected), method


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
