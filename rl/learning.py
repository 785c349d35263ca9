"""From a rollout to the objective of its update in the phases that learn from returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from configs.config import TrainConfig
from rl.advantages import LIMIT, decision_advantages
from rl.critic import explained_variance, gae, predict_values, with_critic
from rl.learner import Learner
from rl.metrics import advantage_metrics, trajectory_returns
from rl.objectives import Objective, policy_objective
from rl.phases import Phase, PhaseState, phase_lengths
from rl.trajectory import Batch, Trajectory


@dataclass(frozen=True)
class Estimate:
    """Advantages of a rollout's decisions, and the critic's values where there is one."""

    advantages: Tensor  # (N,)
    values: Tensor | None  # (N,) before the update
    metrics: dict[str, float]


def estimate_advantages(
    config: TrainConfig, learner: Learner, batch: Batch, trajectories: Sequence[Trajectory]
) -> Estimate:
    """Advantages by the configured rule; with a critic, generalised advantage estimates."""
    if learner.critic is None:
        returns, groups = trajectory_returns(trajectories)
        advantages = decision_advantages(
            config.loss.advantage, returns, groups, batch.trajectory, batch.steps_to_end, config.loss.discount
        )
        return Estimate(advantages, None, advantage_metrics(advantages))
    values = predict_values(learner.policy, learner.critic, batch, config.update.micro_batch, learner.ranks)
    advantages = gae(values, batch, trajectories, config.loss.discount, config.critic.gae_lambda).clamp(-LIMIT, LIMIT)
    fit = {"train/explained_variance": explained_variance(values, advantages + values)}
    return Estimate(advantages, values, advantage_metrics(advantages) | fit)


def surrogate_objective(
    config: TrainConfig, learner: Learner, batch: Batch, estimate: Estimate, phase: PhaseState, global_step: int
) -> Objective:
    """The clipped surrogate of the estimated advantages, with the value loss where there is a critic."""
    exact_mixture = phase.phase is Phase.TRANSITION and config.phases.importance == "behaviour"
    objective = policy_objective(
        learner.policy,
        batch,
        estimate.advantages,
        config.loss,
        config.rollout.temperature,
        config.update.micro_batch,
        behaviour_epsilon=phase.epsilon if exact_mixture else None,
        ranks=learner.ranks,
    )
    if learner.critic is None or estimate.values is None:
        return objective
    value_only = global_step < phase_lengths(config.phases)[0] + config.critic.value_warmup_steps
    targets = estimate.advantages + estimate.values
    return with_critic(
        objective, learner.policy, learner.critic, config.critic, estimate.values, targets, value_only=value_only
    )
