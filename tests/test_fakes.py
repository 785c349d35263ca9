"""The fakes keep the contracts of what they stand for: otherwise the tests that use them prove nothing."""

import inspect

import pytest

from envs.pool import Pool
from tests.fakes import FakePolicy, FakePool
from vla.policy import Policy


@pytest.mark.parametrize(
    ("fake", "real", "methods"),
    [
        (
            FakePolicy,
            Policy,
            "act act_as_teacher chunk_logits teacher equals_teacher "
            "named_trainable_parameters save_adapter load_adapter make_optimizer",
        ),
        (FakePool, Pool, "reset step ready close"),
    ],
)
def test_methods_take_the_real_arguments(fake, real, methods):
    for method in methods.split():
        taken = inspect.signature(getattr(fake, method)).parameters
        assert list(taken) == list(inspect.signature(getattr(real, method)).parameters), method
