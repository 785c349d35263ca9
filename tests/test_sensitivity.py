"""How far a decision moves when an input is replaced."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl.sensitivity import decision_changes, kl_divergence, log_probabilities
from tests.fakes import FakePolicy, observation

SEEN = observation(0.3, -0.2, 0.9)
OTHER = observation(-0.5, 0.1, 0.4)


class ReadsTheRobotState(FakePolicy):
    """The fake's logits are a function of the robot state alone."""


class ReadsTheImage(FakePolicy):
    """Its logits are scaled by the first pixel."""

    info = SimpleNamespace(uses_proprio=False)

    def chunk_logits(self, observations, kept=None):
        brightness = torch.tensor([float(seen.images.flat[0]) for seen in observations])
        return brightness[:, None, None] * super().chunk_logits(observations)


def with_pixel(seen, value):
    return seen.__class__(np.full_like(seen.images, value), seen.proprio, seen.instruction)


def test_the_divergence_is_that_of_the_closed_form():
    before = torch.tensor([[[0.5, 0.5]], [[0.5, 0.5]]]).log()
    after = torch.tensor([[[0.9, 0.1]], [[0.5, 0.5]]]).log()
    expected = (0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)) / 2  # the second decision is the same
    assert kl_divergence(before, after) == pytest.approx(expected)


def test_log_probabilities_do_not_depend_on_the_batch_size():
    policy = ReadsTheRobotState()
    whole = log_probabilities(policy, [SEEN, OTHER, SEEN], batch_size=2)
    assert torch.equal(whole, log_probabilities(policy, [SEEN, OTHER, SEEN], batch_size=1))
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones(whole.shape[:2]))


def test_a_policy_that_does_not_look_is_moved_by_the_robot_state_alone():
    changes = decision_changes(ReadsTheRobotState(), SEEN, [OTHER, with_pixel(SEEN, 200)], "something else")
    assert changes.pop("another robot state") > 0.1
    assert set(changes) == {"another image", "a black image", "another instruction"}
    assert set(changes.values()) == {0.0}


def test_a_policy_that_looks_is_moved_by_images_and_the_largest_change_counts():
    policy = ReadsTheImage()
    bright = with_pixel(SEEN, 2)
    near = decision_changes(policy, bright, [with_pixel(SEEN, 1)], None)
    both = decision_changes(policy, bright, [bright, with_pixel(SEEN, 1)], None)
    assert near == both
    assert set(near) == {"another image", "a black image"}
    assert 0 < near["another image"] < near["a black image"]
