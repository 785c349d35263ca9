"""The learner's optimizer: which learning rate holds when, and that its memory is taken at the start."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from configs.config import LossConfig, TrainConfig, UpdateConfig
from rl.learner import make_learner, make_moments, make_optimizer, set_learning_rate
from tests.fakes import FakePolicy

PARAMETERS = [torch.linspace(-1, 1, 6).view(2, 3), torch.ones(2)]


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


def test_a_learner_has_its_moments_before_its_first_step():
    """So that want of memory is met where something can give way, not in a step."""
    learner = make_learner(FakePolicy(), TrainConfig())
    moments = {parameter: dict(state) for parameter, state in learner.optimizer.state.items()}
    for _, parameter in learner.policy.named_trainable_parameters():
        assert not any(tensor.any() for tensor in moments[parameter].values())
        parameter.grad = torch.randn_like(parameter)
    learner.optimizer.step()
    for parameter, state in learner.optimizer.state.items():
        assert state["step"] == 1
        assert all(state[name] is tensor for name, tensor in moments[parameter].items())  # none was made anew


def test_with_ready_moments_steps_are_those_of_torchs_adamw():
    """A parameter without gradient stays as it is, too."""
    ready, lazy = ([torch.nn.Parameter(p) for p in deepcopy(PARAMETERS)] for _ in range(2))
    for parameters in (ready, lazy):
        optimizer = make_optimizer([{"params": parameters, "lr": 1e-2}], weight_decay=0.1)
        if parameters is ready:
            make_moments(optimizer)
        for step in range(3):
            parameters[0].grad = torch.sin(step + parameters[0].detach())
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ready, lazy, strict=True))
    assert not torch.equal(ready[0], PARAMETERS[0])
    assert torch.equal(ready[1], PARAMETERS[1])
