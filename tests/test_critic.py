"""The critic: GAE against a slow sum, the clipped value loss by hand, and when it leaves the policy alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.config import CriticConfig, LossConfig, PhaseConfig, TrainConfig, UpdateConfig
from rl.losses import ValueHead, explained_variance, gae, value_loss
from rl.phases import phase_at
from rl.trajectory import flatten
from rl.update import Learner, predict_values, update
from tests.fakes import ACTION_DIM, FakePolicy, acted_batch, parameters_of, trajectory

HIDDEN = 5


class PolicyWithHidden(FakePolicy):
    """Adds hidden states (B, A, HIDDEN) that depend on the trainable bias."""

    hidden_dim = HIDDEN

    def chunk_outputs(self, observations):
        logits = self.chunk_logits(observations)
        return logits, logits[..., :HIDDEN] * 0.1


def slow_gae(values, rewards, discount, gae_lambda):
    """Equation 16 of Schulman et al. 2016 as a double sum over one episode."""
    n = len(values)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + discount * following[t] - values[t] for t in range(n)]
    return [sum((discount * gae_lambda) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=4),
    discount=st.floats(0.5, 1.0),
    gae_lambda=st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
def test_gae_is_the_sum_of_discounted_errors_within_each_episode(lengths, discount, gae_lambda, seed):
    trajectories = [trajectory(n, success, index=i, group=i) for i, (n, success) in enumerate(lengths)]
    batch = flatten(trajectories, ACTION_DIM)
    values = torch.rand(len(batch), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected, start = [], 0
    for n, success in lengths:
        rewards = [0.0] * (n - 1) + [float(success)]
        expected += slow_gae(values[start : start + n].tolist(), rewards, discount, gae_lambda)
        start += n
    found = gae(values, batch, trajectories, discount, gae_lambda)
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("predicted", "target", "loss", "gradient"),
    [
        (0.1, 1.0, 0.5 * 0.9**2, -0.9),  # inside the clip
        (0.9, 1.0, 0.5 * 0.8**2, 0.0),  # beyond it towards the target: the clipped error is larger
        (0.9, -1.0, 0.5 * 1.9**2, 1.9),  # beyond it and away: the plain error is larger
    ],
)
def test_value_loss_counts_the_worse_of_the_clipped_and_the_plain_error(predicted, target, loss, gradient):
    micro = replace(flatten([trajectory(1)], ACTION_DIM), values=torch.zeros(1), advantages=torch.tensor([target]))
    value = torch.tensor([predicted], requires_grad=True)
    found = value_loss(value, micro, 0.2)
    found.backward()
    assert (found.item(), value.grad.item()) == pytest.approx((loss, gradient))


def test_explained_variance():
    returns = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(torch.full((4,), 0.5), returns) == pytest.approx(0.0)
    assert explained_variance(1 - returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(4)) == 0.0


def critic_update(value_only=False, n_epochs=3, no_advantage=False):
    """Whether the policy moved, its values before, and the critic's error after an update with returns of 1 and 0."""
    policy = PolicyWithHidden()
    batch = acted_batch(policy, (3, 3))
    critic = ValueHead(HIDDEN, seed=0)
    values = predict_values(policy, critic, batch, 2)
    targets = torch.zeros(6) if no_advantage else (batch.trajectory == 0).float()
    batch = replace(batch, values=values, advantages=targets - values)
    config = TrainConfig(
        loss=LossConfig(advantage="gae", ratio_level="token"),
        phases=PhaseConfig(warmup=False),
        critic=CriticConfig(value_clip=10.0, value_warmup_steps=8 if value_only else 0),
        update=UpdateConfig(n_epochs=n_epochs, batch_size=6, micro_batch_size=1, lr=1e-2),
    )
    before = parameters_of(policy)
    groups = [{"params": list(policy.parameters())}, {"params": list(critic.parameters())}]
    learner = Learner(policy, critic, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True))
    update(learner, batch, phase_at(7, config.phases), config, number=0)
    error = (predict_values(policy, critic, batch, 2) - targets).abs().mean().item()
    moved = any(not torch.equal(a, b) for a, b in zip(before, parameters_of(policy), strict=True))
    return moved, values, error


def test_first_values_are_zero_and_the_critic_learns_the_returns():
    _, values, error = critic_update(value_only=True, n_epochs=40)
    assert values.tolist() == [0.0] * 6
    assert error < 0.2


def test_the_policy_moves_unless_only_values_are_learnt_or_no_advantage_is_there_although_weights_decay():
    assert critic_update()[0]
    assert not critic_update(value_only=True)[0]
    assert not critic_update(no_advantage=True)[0]
