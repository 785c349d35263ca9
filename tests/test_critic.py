"""The critic: GAE against a slow sum, the clipped value loss by hand, and when it leaves the policy alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.config import CriticConfig, LossConfig, UpdateConfig
from rl.critic import ValueHead, clipped_value_loss, explained_variance, gae, predict_values, with_critic
from rl.learner import Learner
from rl.objectives import policy_objective
from rl.trajectory import flatten
from rl.update import optimise
from tests.fakes import ACTION_DIM, NUM_TOKENS, FakePolicy, acted_batch, parameters_of, trajectory

HIDDEN = 5


class PolicyWithHidden(FakePolicy):
    """Adds hidden states (B, A, HIDDEN) that depend on the trainable bias."""

    hidden_dim = HIDDEN
    device = torch.device("cpu")

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


def test_gae_with_lambda_one_and_zero_values_is_the_discounted_return():
    trajectories = [trajectory(3, success=True)]
    batch = flatten(trajectories, ACTION_DIM)
    assert gae(torch.zeros(3), batch, trajectories, 0.9, 1.0).tolist() == pytest.approx([0.81, 0.9, 1.0])


def test_value_loss_counts_the_worse_of_the_clipped_and_the_plain_error():
    old, target = torch.zeros(3), torch.tensor([1.0, 1.0, -1.0])
    predicted = torch.tensor([0.1, 0.9, 0.9])
    # inside the clip; beyond it towards the target (clipped error is larger); beyond it away (plain error is larger)
    expected = [0.5 * 0.9**2, 0.5 * 0.8**2, 0.5 * 1.9**2]
    assert clipped_value_loss(predicted, old, target, 0.2).tolist() == pytest.approx(expected)


def test_value_beyond_the_clip_towards_its_target_gets_no_gradient():
    predicted = torch.tensor([0.9], requires_grad=True)
    clipped_value_loss(predicted, torch.zeros(1), torch.ones(1), 0.2).sum().backward()
    assert predicted.grad.item() == 0.0


def test_explained_variance():
    returns = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(torch.full((4,), 0.5), returns) == pytest.approx(0.0)
    assert explained_variance(1 - returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(4)) == 0.0


def critic_update(value_only, through_backbone=False, n_epochs=40):
    """Policy before and after, and the critic's fit, of one update with alternating returns."""
    policy = PolicyWithHidden()
    batch = acted_batch(policy, (3, 3))
    critic = ValueHead(HIDDEN, seed=0)
    values = predict_values(policy, critic, batch, 2)
    targets = (batch.trajectory == 0).float()
    advantages = targets - values
    config = CriticConfig(critic_through_backbone=through_backbone, value_clip=10.0)
    objective = with_critic(
        policy_objective(policy, batch, advantages, LossConfig(advantage="gae"), 1.0, 2),
        policy, critic, config, values, targets, value_only=value_only,
    )  # fmt: skip
    before = parameters_of(policy)
    groups = [{"params": list(policy.parameters()), "lr": 1e-2}, {"params": list(critic.parameters()), "lr": 1e-2}]
    learner = Learner(policy, critic, torch.optim.AdamW(groups, weight_decay=0.0, fused=True))
    optimise(
        policy,
        learner.optimizer,
        batch,
        objective,
        UpdateConfig(n_epochs=n_epochs, batch_size=6, micro_batch_size=1),
        0,
        0,
    )
    error = (predict_values(policy, critic, batch, 2) - targets).abs().mean().item()
    moved = any(not torch.equal(a, b) for a, b in zip(before, parameters_of(policy), strict=True))
    return moved, values, error


def test_first_values_are_zero_and_the_critic_learns_the_returns():
    _, values, error = critic_update(value_only=True)
    assert values.tolist() == [0.0] * 6
    assert error < 0.2


def test_value_only_update_leaves_the_policy_bit_identical():
    moved, _, _ = critic_update(value_only=True, n_epochs=3)
    assert not moved


def test_value_only_means_so_even_through_the_backbone():
    moved, _, _ = critic_update(value_only=True, through_backbone=True, n_epochs=3)
    assert not moved


def test_value_loss_reaches_the_policy_only_when_asked():
    policy = PolicyWithHidden()
    batch = acted_batch(policy, (3,))
    critic = ValueHead(HIDDEN, seed=0)
    torch.nn.init.ones_(critic.net[-1].weight)
    for through_backbone in (False, True):
        objective = with_critic(
            policy_objective(policy, batch, torch.zeros(3), LossConfig(advantage="gae"), 1.0, 2),
            policy, critic, CriticConfig(critic_through_backbone=through_backbone), torch.zeros(3), torch.ones(3),
            value_only=False,
        )  # fmt: skip
        policy.zero_grad()
        objective.loss(policy.chunk_outputs(batch.observations), torch.arange(3))[0].backward()
        reached = policy.bias.grad is not None and bool(policy.bias.grad.any())
        assert reached is through_backbone


def test_full_update_moves_the_policy():
    moved, _, _ = critic_update(value_only=False, n_epochs=3)
    assert moved


def test_value_head_is_a_function_of_its_seed_and_leaves_the_global_generator_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    a, b, c = ValueHead(HIDDEN, 0), ValueHead(HIDDEN, 0), ValueHead(HIDDEN, 1)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(a.net[1].weight, b.net[1].weight)
    assert not torch.equal(a.net[1].weight, c.net[1].weight)
    assert a(torch.ones(2, NUM_TOKENS, HIDDEN)).shape == (2,)


def test_update_without_a_non_zero_advantage_leaves_the_policy_bit_identical_although_weights_decay():
    policy = PolicyWithHidden()
    batch = acted_batch(policy, (3,))
    critic = ValueHead(HIDDEN, seed=0)
    objective = with_critic(
        policy_objective(policy, batch, torch.zeros(3), LossConfig(advantage="gae"), 1.0, 2),
        policy, critic, CriticConfig(), torch.zeros(3), torch.zeros(3), value_only=False,
    )  # fmt: skip
    before = parameters_of(policy)
    groups = [{"params": list(policy.parameters())}, {"params": list(critic.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)
    optimise(policy, optimizer, batch, objective, UpdateConfig(n_epochs=2, micro_batch_size=1), 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters_of(policy), strict=True))
