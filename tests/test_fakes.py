"""The fakes keep the contracts of what they stand for: otherwise the tests that use them prove nothing."""

import dataclasses
import inspect
from itertools import product

from envs.env import ChunkResult
from envs.pool import Pool
from tests.fakes import FakePolicy, FakePool, FakeResult
from vla.policy import Policy

POLICY_METHODS = [
    "act",
    "act_as_teacher",
    "teacher_logits",
    "chunk_logits",
    "token_logprobs",
    "teacher",
    "use_teacher",
    "named_trainable_parameters",
    "save_adapter",
    "load_adapter",
    "describe",
    "make_optimizer",
    "equals_teacher",
]
POOL_METHODS = ["reset", "step", "ready", "close"]


def test_methods_take_the_real_arguments():
    for fake, reals, methods in (
        (FakePolicy, [Policy], POLICY_METHODS),
        (FakePool, [Pool], POOL_METHODS),
    ):
        for real, method in product(reals, methods):
            taken, expected = (inspect.signature(getattr(kind, method)).parameters for kind in (fake, real))
            assert list(taken) == list(expected), method


def test_results_have_the_real_fields():
    assert [f.name for f in dataclasses.fields(FakeResult)] == [
        f.name for f in dataclasses.fields(ChunkResult)
    ]
