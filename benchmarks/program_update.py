"""The program's own update on decisions without a simulator: what `train_grpo.py` does between two rollouts."""

from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu_timing import timed, trainable
from configs.config import LossConfig, UpdateConfig
from contracts import Observation
from rl.learner import make_optimizer
from rl.objectives import policy_objective
from rl.randomness import torch_generator
from rl.trajectory import Batch, Decision, Episode, Trajectory, flatten
from rl.update import optimise
from vla.policy import Policy

AT_ONCE = 8  # observations that are decided together


def acted_batch(policy: Policy, observations: Sequence[Observation]) -> Batch:
    """One trajectory of decisions that the policy samples."""
    trajectory = Trajectory(Episode(index=0, task_id=0, init_state_id=0, group=0))
    for start in range(0, len(observations), AT_ONCE):
        seen = observations[start : start + AT_ONCE]
        generators = [torch_generator(0, "benchmark", start + i) for i in range(len(seen))]
        acted = policy.act(seen, "sample", generators=generators)
        for observation, tokens, logprobs in zip(seen, acted.tokens, acted.logprobs, strict=True):
            trajectory.decisions.append(Decision(observation, tokens, False, logprobs, None, policy.chunk_length))
    return flatten([trajectory], policy.action_dim)


def updating(policy: Policy, batch: Batch, batch_size: int, micro_batch_size: int, lr: float) -> Callable[[], object]:
    """A call of `rl.update.optimise`: an epoch of PPO over the batch, every advantage 1; one optimizer for all."""
    objective = policy_objective(policy, batch, torch.ones(len(batch)), LossConfig(), 1.0, micro_batch_size)
    config = UpdateConfig(n_epochs=1, batch_size=batch_size, micro_batch_size=micro_batch_size, lr=lr)
    optimizer = make_optimizer([{"params": trainable(policy), "lr": lr}], config.weight_decay)
    return lambda: optimise(policy, optimizer, batch, objective, config, seed=0, update=0)


def seconds_of_a_step(policy: Policy, batch: Batch, batch_size: int, micro_batch_size: int, repeats: int) -> float:
    """Median seconds of an optimizer step with everything that belongs to it.

    The learning rate moves nothing that counts: every repetition begins with the policy that has acted.
    """
    update = updating(policy, batch, batch_size, micro_batch_size, lr=1e-15)
    return timed(update, repeats) / (len(batch) / batch_size)
