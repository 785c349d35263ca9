"""`--importance behaviour` estimates the exact policy gradient from the mixture that acts in the transition.

With probability epsilon the teacher decides, who always takes action 1; else the student, who draws action 1 of each
token with probability sigmoid(theta). The expected reward and its gradient are sums over the two (or four) chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl.losses import behaviour_log_ratio, chunk_log_ratio, clipped_surrogate

DRAWS = 100_000
NO_CLIP = 1e6
REWARDS = torch.tensor([[1.0, -0.4], [0.3, 0.8]], dtype=torch.float64)  # of a chunk's first and second action
OLD, NEW = (0.4, -0.7), (0.1, -0.2)  # theta of each token when the rollout was collected; after some steps
EPSILONS = [0.2, 0.5, 0.9]


def logprobs(theta: Tensor, actions: Tensor) -> Tensor:
    """(B, A) log-probs of actions 0 or 1 under parameters (B, A) or (A,)."""
    return F.logsigmoid(torch.where(actions == 1, theta, -theta))


def reward(actions: Tensor) -> Tensor:
    """(B,) reward of chunks (B, 1) or (B, 2)."""
    return REWARDS[actions[:, 0], actions[:, -1]]


def exact_gradient(theta: Tensor) -> Tensor:
    """(A,) gradient of the expected reward of the student alone: what PPO means to climb."""
    theta = theta.clone().requires_grad_()
    chunks = torch.tensor(list(itertools.product((0, 1), repeat=len(theta))))
    (logprobs(theta, chunks).sum(-1).exp() * reward(chunks)).sum().backward()
    return theta.grad


def draw_mixture(old: Tensor, epsilon: float, seed: int) -> tuple[Tensor, Tensor]:
    """(B, A) actions and whether each equals the teacher's."""
    generator = torch.Generator().manual_seed(seed)
    students = (torch.rand(DRAWS, len(old), generator=generator) < old.sigmoid()).long()
    by_teacher = torch.rand(DRAWS, 1, generator=generator) < epsilon
    actions = torch.where(by_teacher, 1, students)
    return actions, actions == 1


def gradient_samples(
    log_ratio: Callable[[Tensor, Tensor, Tensor], Tensor], actions: Tensor, old: Tensor, new: Tensor
) -> Tensor:
    """(B, A) gradient of every draw's negative loss; each draw has a copy of the parameters to itself."""
    theta = new.expand(len(actions), -1).clone().requires_grad_()
    executed = torch.ones_like(actions, dtype=torch.bool)
    ratio = log_ratio(logprobs(theta, actions), logprobs(old, actions), executed)
    loss, _, clipped = clipped_surrogate(ratio, reward(actions), executed[:, :1], NO_CLIP)
    assert not clipped.any()
    (-loss.sum()).backward()
    return theta.grad


def standard_errors_off(samples: Tensor, exact: Tensor) -> Tensor:
    """(A,) distance of the Monte-Carlo mean from the exact value, in standard errors."""
    return (samples.mean(0) - exact).abs() / (samples.std(0) / len(samples) ** 0.5)


def parameters(num_tokens: int) -> tuple[Tensor, Tensor]:
    return (torch.tensor(theta[:num_tokens], dtype=torch.float64) for theta in (OLD, NEW))


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_behaviour_importance_is_an_unbiased_estimate_of_the_policy_gradient(num_tokens, epsilon):
    old, new = parameters(num_tokens)
    for seed, theta in enumerate((old, new)):  # the first minibatch, and a later one
        actions, matches = draw_mixture(old, epsilon, seed)
        samples = gradient_samples(
            lambda new, old, executed, matches=matches: behaviour_log_ratio(new, old, executed, matches, epsilon),
            actions, old, theta,
        )  # fmt: skip
        assert (standard_errors_off(samples, exact_gradient(theta)) < 3).all()


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_student_importance_is_biased_towards_what_the_teacher_does(epsilon):
    old, new = parameters(1)
    for seed, theta in enumerate((old, new)):
        actions, _ = draw_mixture(old, epsilon, seed)
        samples = gradient_samples(chunk_log_ratio, actions, old, theta)
        assert (standard_errors_off(samples, exact_gradient(theta)) > 30).all()


def test_student_importance_is_unbiased_where_the_student_acts_alone():
    old, new = parameters(1)
    for seed, theta in enumerate((old, new)):
        actions, _ = draw_mixture(old, 0.0, seed)
        samples = gradient_samples(chunk_log_ratio, actions, old, theta)
        assert (standard_errors_off(samples, exact_gradient(theta)) < 3).all()
