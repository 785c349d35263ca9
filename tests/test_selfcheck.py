"""Each self-check is seen to fire on a planted fault, and to stay quiet without one."""

import dataclasses

import pytest
import torch

from configs.config import UpdateConfig
from errors import BadInput
from rl.objectives import Objective
from rl.selfcheck import (
    SelfCheckError,
    check_executed,
    check_learning,
    check_logits_path,
    check_signal,
    check_teacher,
    remember_teacher,
)
from rl.trajectory import flatten
from rl.update import optimise
from tests.fakes import ACTION_DIM, FakePolicy, acted_batch, adamw, observation, parameters_of, trajectory

SEEN = observation(0.3, -0.2, 0.9)


class ForgetsTheTemperature(FakePolicy):
    """Divides by the temperature when it samples, not when it learns."""

    def act(self, observations, mode="greedy", temperature=1.0, generators=None):
        acted = super().act(observations, mode, temperature, generators)
        return dataclasses.replace(
            acted, logprobs=FakePolicy.token_logprobs(self._logits(observations), acted.tokens, 1)
        )


class WithDropout(FakePolicy):
    """Leaves dropout on in the learning pass."""

    def chunk_logits(self, observations):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return torch.nn.functional.dropout(super().chunk_logits(observations), 0.1, training=True)


def test_equal_paths_pass():
    assert "0.0e+00" in check_logits_path(FakePolicy(), SEEN, 1.6, torch.float32)


@pytest.mark.parametrize("fault", [ForgetsTheTemperature, WithDropout])
def test_sampling_and_learning_that_differ_are_found(fault):
    with pytest.raises(SelfCheckError, match="sampling and learning disagree"):
        check_logits_path(fault(), SEEN, 1.6, torch.float32)


class KeepsACopy(FakePolicy):
    """Decides by copies of its parameters, as fused layers do, and forgets to renew those of the last rows' device."""

    def __init__(self, fresh_rows):
        super().__init__(adapter_scale=0.1)
        self.fresh_rows = fresh_rows
        self.old = [parameter.detach().clone() for parameter in self.parameters()]

    def _logits(self, observations):
        fresh = super()._logits(observations)
        own = self.adapter, self.bias
        moved = [new.detach() - old for new, old in zip(own, self.old, strict=True)]
        features = torch.tensor([o.proprio.tolist() for o in observations])
        stale = fresh - ((features[:, None, :] * moved[0]).sum(-1) + moved[1]).view_as(fresh)
        return torch.cat([fresh[: self.fresh_rows], stale[self.fresh_rows :]])


def test_a_policy_that_follows_its_optimizer_gains_what_the_slope_promises_and_is_left_as_it_was():
    policy = FakePolicy(adapter_scale=0.1)
    before = parameters_of(policy)
    found = float(check_learning(policy, [SEEN] * 2).split()[-1])
    assert found == pytest.approx(0.2, rel=0.05)  # the fake's logits are linear in its parameters
    assert all(torch.equal(new, old) for new, old in zip(parameters_of(policy), before, strict=True))
    assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize("fresh_rows", [0, 2])
def test_a_policy_or_a_device_that_keeps_old_parameters_is_found(fresh_rows):
    assert "brings 0.2" in check_learning(KeepsACopy(3), [SEEN] * 3)
    with pytest.raises(SelfCheckError, match=r"brings 0\.0000 to .*does not follow its parameters"):
        check_learning(KeepsACopy(fresh_rows), [SEEN] * 3)


def test_a_gradient_of_the_wrong_sign_is_found():
    policy = FakePolicy()
    policy.adapter.register_hook(torch.neg)
    policy.bias.register_hook(torch.neg)
    with pytest.raises(SelfCheckError, match=r"brings -0\.2"):
        check_learning(policy, [SEEN])


def test_teacher_that_stays_passes_whatever_the_student_does(tmp_path):
    policy = FakePolicy()
    remember_teacher(tmp_path / "probe.npz", policy, SEEN, "greedy")
    with torch.no_grad():
        policy.adapter += 1.0
        policy.bias += 1.0
    check_teacher(tmp_path / "probe.npz", policy, "greedy")


def test_teacher_that_moves_is_found(tmp_path):
    policy = FakePolicy()
    remember_teacher(tmp_path / "probe.npz", policy, SEEN, "greedy")
    policy.base.neg_()
    with pytest.raises(SelfCheckError, match="the teacher has moved"):
        check_teacher(tmp_path / "probe.npz", policy, "greedy")


def test_right_mask_of_executed_tokens_passes():
    trajectories = [trajectory(3, last_executed=1), trajectory(1)]
    check_executed(flatten(trajectories, ACTION_DIM), trajectories, ACTION_DIM)


@pytest.mark.parametrize("shift", [-1, 1])
def test_mask_that_is_off_by_one_action_is_found(shift):
    trajectories = [trajectory(3, last_executed=2)]
    trajectories[0].decisions[-1].executed += shift
    with pytest.raises(SelfCheckError, match="mask of executed tokens is wrong"):
        check_executed(flatten(trajectories, ACTION_DIM), trajectories, ACTION_DIM)


def test_nan_in_one_gradient_costs_its_step_and_nothing_else():
    policy = FakePolicy()
    batch = acted_batch(policy, (2, 2))
    calls = []

    def loss(logits, rows):
        from rl.losses import Statistics

        calls.append(len(calls))
        value = logits.square().mean() * (float("nan") if len(calls) == 2 else 1.0)
        return value, Statistics({}, {}, len(rows))

    config = UpdateConfig(n_epochs=1, batch_size=1, micro_batch_size=1)
    before = parameters_of(policy)
    metrics = optimise(policy, adamw(policy), batch, Objective(loss, torch.ones(4, dtype=torch.bool)), config, 0, 0)
    assert (metrics["train/skipped_steps"], metrics["train/optimizer_steps"]) == (1, 3)
    after = parameters_of(policy)
    assert all(torch.isfinite(p).all() for p in after)
    assert not torch.equal(before[0], after[0])


def test_run_without_a_learning_signal_is_stopped_at_the_limit():
    check_signal(9, 10)
    with pytest.raises(BadInput, match="no learning signal"):
        check_signal(10, 10)
