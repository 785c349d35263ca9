"""Each question to a policy finds its planted fault, and stays quiet without one."""

import dataclasses

import pytest
import torch

from contracts import BadInput, SelfCheckError
from probes import attention_probe, check_learning, check_logits_path, image_probe, made_up_observation
from tests.fakes import FakePolicy, assert_same_bits, observation, parameters_of
from vla.tokens import token_logprobs

SEEN = observation(0.3, -0.2, 0.9)


def test_a_sound_policy_passes(policy):
    observation = made_up_observation(policy)
    attention_probe(policy, observation)
    image_probe(policy, observation)
    assert "0.0e+00" in check_logits_path(policy, observation, 1.6)
    check_learning(policy, observation, 2)


def test_ignored_images_are_found(policy):
    with torch.no_grad():
        policy.network.projector.fc3.weight.zero_()
    with pytest.raises(BadInput, match="ignores its images"):
        image_probe(policy, made_up_observation(policy))


class ForgetsTheTemperature(FakePolicy):
    """Divides by the temperature when it samples, not when it learns."""

    def act(self, observations, mode="greedy", temperature=1.0, generators=None):
        acted = super().act(observations, mode, temperature, generators)
        return dataclasses.replace(
            acted, logprobs=token_logprobs(self.chunk_logits(observations), acted.tokens, 1)
        )


def test_sampling_and_learning_that_differ_are_found():
    with pytest.raises(SelfCheckError, match="sampling and learning disagree"):
        check_logits_path(ForgetsTheTemperature(), SEEN, 1.6)


class KeepsACopy(FakePolicy):
    """Decides by copies of its parameters, which were zero, as fused layers do, and never renews them."""

    def _logits(self, features):
        logits = super()._logits(features)
        moved = (features[:, None, :] * self.adapter.detach()).sum(-1) + self.bias.detach()
        return logits - moved.view_as(logits)


def test_a_policy_that_follows_its_optimizer_gains_what_the_slope_promises_and_is_left_as_it_was():
    policy = FakePolicy(adapter_scale=0.1)
    before = parameters_of(policy)
    gain = float(check_learning(policy, SEEN, 2).split()[-1])
    assert gain == pytest.approx(0.2, rel=0.05)  # the fake's logits are linear in its parameters
    assert_same_bits(parameters_of(policy), before)
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_old_parameters_and_a_gradient_of_the_wrong_sign_are_found():
    with pytest.raises(SelfCheckError, match=r"brings -?0\.0000"):
        check_learning(KeepsACopy(), SEEN, 2)
    policy = FakePolicy()
    for parameter in policy.parameters():
        parameter.register_hook(torch.neg)
    with pytest.raises(SelfCheckError, match=r"brings -0\.2"):
        check_learning(policy, SEEN, 2)


def test_a_micro_batch_that_does_not_fit_into_a_gpu_is_found():
    policy = FakePolicy()
    policy.device = torch.device("cuda")
    policy.room = 3
    with pytest.raises(BadInput, match="--micro-batch-size"):
        check_learning(policy, SEEN, 4)
