"""Adapters in the last blocks alone: what the frozen trunk below them computed is kept, and changes no number."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from configs.config import TrainConfig
from configs.sections import LossConfig, PhaseConfig, UpdateConfig
from contracts import BadInput
from rl.behaviour import Behaviour, decide
from rl.phases import phase_at
from rl.trajectory import Episode, Trajectory, flatten
from rl.update import make_learner, update
from tests.small_checkpoint import generators, load_policy, trained_policy

NUM_BLOCKS = 3  # of the small checkpoint's language model
blocks = pytest.mark.parametrize("trained_blocks", [1, 2, NUM_BLOCKS])


# What is computed


@pytest.mark.parametrize("frozen_weights", ["float32", "bf16"])
def test_states_are_kept_row_by_row_as_they_were_computed(small, observations, frozen_weights):
    policy = trained_policy(small, trained_blocks=2, frozen_weights=frozen_weights)
    kept = policy.act(observations).kept
    for observation, row in zip(observations, kept, strict=True):
        (alone,) = policy.act([observation]).kept
        assert row.dtype == policy.network.dtype
        assert row.untyped_storage().nbytes() == row.nbytes  # without padding and the rest of its batch
        torch.testing.assert_close(alone, row)
    some = policy.chunk_logits(observations, [kept[0], None, None])
    torch.testing.assert_close(some, policy.chunk_logits(observations, kept), rtol=0.02, atol=0.02)


@blocks
def test_gradients_are_those_of_the_whole_network_without_the_lower_adapters(
    small, observations, trained_blocks
):
    policy = trained_policy(small, trained_blocks=trained_blocks)
    whole = load_policy(small)
    matrices = policy.network.adapters.named_matrices()
    with torch.no_grad():
        for name, matrix in whole.network.adapters.named_matrices().items():
            matrix.copy_(matrices.get(name, torch.zeros_like(matrix)))
    kept = policy.act(observations).kept
    gradients = []
    for one, states in ((policy, kept), (whole, None)):
        logits = one.chunk_logits(observations, states)
        logits.log_softmax(-1)[..., 7].sum().backward()
        gradients.append({name: p.grad for name, p in one.named_trainable_parameters() if p.grad is not None})
    top, everything = gradients
    # The projections of the first trained block read the last frozen hidden states, so nothing is left out.
    assert top.keys() == dict(policy.named_trainable_parameters()).keys()
    for name, gradient in top.items():
        torch.testing.assert_close(gradient, everything[name], rtol=1e-4, atol=1e-5)


def test_recomputed_blocks_change_nothing(small, observations):
    policy = trained_policy(small, trained_blocks=2)
    kept = policy.act(observations).kept

    def outputs() -> list[torch.Tensor]:
        policy.network.zero_grad()
        logits = policy.chunk_logits(observations, kept)
        logits.logsumexp(-1).sum().backward()
        gradients = [p.grad.clone() for _, p in policy.named_trainable_parameters()]
        return [logits, policy.act(observations).logprobs, *gradients]

    eager = outputs()
    assert policy.network.num_blocks == 2
    policy.network.recompute_everything()
    assert all(map(torch.equal, outputs(), eager))


# Updates


def played(policy, observations) -> Trajectory:
    """One episode of a decision for each observation, with the randomness of a rollout."""
    behaviour = Behaviour(epsilon_start=0.0, temperature=1.0)
    epsilons = [behaviour.epsilon_start] * len(observations)
    decisions, _ = decide(policy, observations, generators(len(observations)), epsilons, behaviour)
    for decision in decisions:
        decision.executed = policy.chunk_length
    return Trajectory(Episode(0, 0, 0, 0), decisions, success=True, env_steps=8 * len(decisions))


@pytest.mark.parametrize("distils", [True, False])
def test_an_update_runs_the_trunk_for_no_decision_and_learns_the_same(small, observations, distils):
    """Neither for the gradient nor for the teacher's labels or distribution, nor for the statistics at the end."""
    phases = PhaseConfig(warmup=distils, warmup_steps=1, warmup_actor="student", warmup_target="soft")
    config = TrainConfig(
        phases=phases,
        loss=LossConfig(kl_coef=0.1, entropy_coef=0.01),
        update=UpdateConfig(
            n_epochs=2, batch_size=2, micro_batch_size=2, lr=1e-3, warmup_lr=1e-3, warmup_epochs=2
        ),
    )
    learned = []
    for are_kept in (True, False):
        policy = trained_policy(small, trained_blocks=2)
        trajectory = played(policy, observations)
        batch = flatten([trajectory], policy.action_dim)
        assert all(one is two.kept for one, two in zip(batch.kept, trajectory.decisions, strict=True))
        batch = replace(batch, advantages=torch.ones(len(batch)))
        if not are_kept:
            batch = replace(batch, kept=[None] * len(batch))
        runs = count_runs(policy)
        metrics = update(make_learner(policy, config), batch, phase_at(0, phases), config, 0)
        assert metrics["train/optimizer_steps"] == 4
        assert (runs["trunk"] == 0) is are_kept
        learned.append([parameter.detach() for _, parameter in policy.named_trainable_parameters()])
    torch.testing.assert_close(*learned)


def count_runs(policy) -> Counter:
    """Counts the passes of the network's parts from now on."""
    runs: Counter = Counter()
    run = policy._run

    def counted(part, *arguments):
        runs[part] += 1
        return run(part, *arguments)

    policy._run = counted
    return runs


# The teacher


@pytest.mark.parametrize("mode", ["greedy", "median", "l1"])
def test_teacher_and_student_share_the_trunk(small, observations, mode):
    policy = trained_policy(small, trained_blocks=2)
    kept = policy.act(observations).kept
    pretrained = load_policy(small, trained_blocks=2)
    by_teacher = policy.act_as_teacher(observations, mode, kept)
    assert torch.equal(by_teacher.tokens, pretrained.act(observations, mode).tokens)
    assert torch.equal(by_teacher.logprobs, policy.act_as_teacher(observations, mode).logprobs)
    with policy.teacher():
        assert torch.equal(policy.chunk_logits(observations, kept), pretrained.chunk_logits(observations))
    assert not policy.equals_teacher()
    assert pretrained.equals_teacher()


# Files


def test_more_blocks_than_there_are_are_refused(small):
    with pytest.raises(BadInput, match="--trained-blocks 4"):
        load_policy(small, trained_blocks=NUM_BLOCKS + 1)
