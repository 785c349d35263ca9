"""The learner's optimizer: which learning rate holds when."""

from dataclasses import replace

import pytest

from configs.config import LossConfig, TrainConfig, UpdateConfig
from rl.learner import make_learner, set_learning_rate
from tests.fakes import FakePolicy


@pytest.mark.parametrize(("warmup_lr", "in_warmup"), [(1e-3, 1e-3), (None, 2e-4)])
def test_the_warmup_may_have_a_learning_rate_of_its_own(warmup_lr, in_warmup):
    update = UpdateConfig(lr=2e-4, warmup_lr=warmup_lr)
    learner = make_learner(FakePolicy(), replace(TrainConfig(), update=update))
    for distilling, expected in ((True, in_warmup), (False, 2e-4), (True, in_warmup)):
        set_learning_rate(learner, update, distilling)
        assert learner.optimizer.param_groups[0]["lr"] == expected


def test_the_critics_learning_rate_is_its_own():
    policy = FakePolicy()
    policy.hidden_dim = 4
    learner = make_learner(policy, replace(TrainConfig(), loss=LossConfig(advantage="gae")))
    critics = learner.optimizer.param_groups[1]["lr"]
    set_learning_rate(learner, UpdateConfig(lr=0.5), distilling=False)
    assert learner.optimizer.param_groups[1]["lr"] == critics != 0.5
