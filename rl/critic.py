"""The critic of `--advantage gae`: predicts the chance of success from the simulator's state.

The state holds true poses and speeds, some 80 numbers, which the policy does not see (asymmetric actor-critic, Pinto et
al. 2018). So a small network learns from a few hundred episodes in a second, whatever the size of the policy. The
values of a rollout come from networks fitted on earlier rollouts only. A critic fitted on the rollout's own outcomes
would predict them, and the advantages would vanish.

Networks fitted on a few episodes predict worse than the task's mean return. So a value is trust * prediction +
(1 - trust) * mean: trust is the slope in a regression of the last rollout's outcomes on the predictions for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.advantages import by_group, centred
from rl.randomness import torch_generator
from rl.trajectory import Trajectory

HALF_LIFE = 75  # an episode's weight halves with this many newer episodes of the same task
FORGET_AFTER = 5 * HALF_LIFE  # episodes that are kept of each task
ENSEMBLE = 3  # number of networks; the mean of their predictions is the value
WIDTH = 128  # of the hidden layers
DROPOUT = 0.1
WEIGHT_DECAY = 0.05
LR = 2e-3
PASSES = 10  # how often a fit draws each remembered decision, on average; old ones by their weight less often
BATCH_SIZE = 256
SMALLEST_STD = 1e-5  # an input that has changed less is taken for a constant
INPUT_LIMIT = 5.0  # standard deviations; further away nothing was learned
LOGIT_LIMIT = 6.0  # logits are clamped to this in the loss: no outcome is certain


@dataclass
class Critic:
    """What the critic has learned: states (T, D) float32 and returns of episodes by task id, the oldest first."""

    episodes: dict[int, list[tuple[Tensor, float]]] = field(default_factory=dict)
    trust: float = 0.0  # weight of the networks' predictions in a value; 0 before it was ever measured

    def remember(self, trajectories: Sequence[Trajectory]) -> None:
        """Add a rollout's episodes, and drop all but the newest FORGET_AFTER of each task."""
        for trajectory in trajectories:
            episodes_of_task = self.episodes.setdefault(trajectory.episode.task_id, [])
            episodes_of_task.append((states_of(trajectory), float(trajectory.success)))
            del episodes_of_task[:-FORGET_AFTER]


class Rows(NamedTuple):
    """Decisions of episodes, one row each."""

    # (N, D) the simulator's states, those of tasks with fewer objects padded with zeros, and the one-hot task
    inputs: Tensor
    task_ids: Tensor  # (N,) int64
    returns: Tensor  # (N,) of their episodes
    weights: Tensor  # (N,) relative to one another


def old_and_new_rows(critic: Critic, trajectories: Sequence[Trajectory]) -> tuple[Rows, Rows]:
    """The remembered decisions, and those of a rollout.

    The weight of a decision is 1 in its task's newest remembered episode, and halves with HALF_LIFE newer ones.
    """
    episodes: list[tuple[int, Tensor, float, float]] = []  # task id, states, return, weight
    for task_id, episodes_of_task in critic.episodes.items():
        ages = reversed(range(len(episodes_of_task)))
        for age, (states, episode_return) in zip(ages, episodes_of_task, strict=True):
            episodes.append((task_id, states, episode_return, 0.5 ** (age / HALF_LIFE)))
    # Old and new become rows together, so that they get the same width and the same one-hot tasks.
    num_old = sum(len(states) for _, states, _, _ in episodes)
    episodes += [(t.episode.task_id, states_of(t), float(t.success), 1.0) for t in trajectories]
    rows = _rows(episodes)
    return Rows(*(column[:num_old] for column in rows)), Rows(*(column[num_old:] for column in rows))


def _rows(episodes: Sequence[tuple[int, Tensor, float, float]]) -> Rows:
    """The rows of episodes: task id, states, return, weight."""
    states = [states_of_episode for _, states_of_episode, _, _ in episodes]
    lengths = torch.tensor([len(states_of_episode) for states_of_episode in states])
    numbers = torch.tensor([(task_id, won, weight) for task_id, _, won, weight in episodes])
    task_ids, returns, weights = numbers.repeat_interleave(lengths, dim=0).unbind(1)
    width = max(states_of_episode.shape[1] for states_of_episode in states)
    padded = [
        F.pad(states_of_episode, (0, width - states_of_episode.shape[1])) for states_of_episode in states
    ]
    one_hot = (task_ids[:, None] == task_ids.unique()).float()
    return Rows(torch.cat([torch.cat(padded), one_hot], dim=1), task_ids.long(), returns, weights)


def states_of(trajectory: Trajectory) -> Tensor:
    """The simulator's state at each of a trajectory's T decisions, (T, D) float32."""
    observations = [d.observation for d in trajectory.decisions if d.observation is not None]
    return torch.stack([torch.as_tensor(observation.state) for observation in observations])


def predict_then_remember(
    critic: Critic | None, trajectories: Sequence[Trajectory], seed: int, update_index: int
) -> tuple[Tensor | None, dict[str, float]]:
    """The chance of success at every decision of a rollout, (N,), and a metric of how good these values are.

    Afterwards the critic remembers the rollout's outcomes. Without a critic, and in the first rollout, values are None.
    """
    if critic is None:
        return None, {}
    values = None
    metrics: dict[str, float] = {}
    if critic.episodes:
        old, new = old_and_new_rows(critic, trajectories)
        predictions = predict_success(old, new, seed, update_index)
        values = critic.trust * predictions + (1 - critic.trust) * _mean_returns(old, new.task_ids)
        metrics["train/explained_variance"] = explained_variance(values, new.returns)
        critic.trust = regression_slope(predictions, new.returns, new.task_ids)
    critic.remember(trajectories)
    return values, metrics


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant; 0 for constant returns."""
    variance = returns.var(unbiased=False)
    if variance == 0:
        return 0.0
    return (1 - (returns - values).var(unbiased=False) / variance).item()


def regression_slope(predictions: Tensor, returns: Tensor, task_ids: Tensor) -> float:
    """The slope within [0, 1] of the regression of returns on predictions, all (N,), both centred within each task."""
    predictions = by_group(centred, predictions, task_ids)
    returns = by_group(centred, returns, task_ids)
    variance = predictions.square().mean()
    if variance == 0:
        return 0.0
    return ((predictions * returns).mean() / variance).clamp(0, 1).item()


def _mean_returns(remembered: Rows, task_ids: Tensor) -> Tensor:
    """The mean return of the remembered decisions of each task in `task_ids` (N,); of all of them for a new task."""
    means = torch.empty(len(task_ids))
    for task_id in task_ids.unique():
        rows = remembered.task_ids == task_id
        if not rows.any():
            rows = torch.ones_like(rows)
        weights = remembered.weights[rows]
        means[task_ids == task_id] = (weights * remembered.returns[rows]).sum() / weights.sum()
    return means


def predict_success(old: Rows, new: Rows, seed: int, update_index: int) -> Tensor:
    """Predict the chance of success at every new decision, (N,), by networks newly fitted on the old ones."""
    mean = old.inputs.mean(0)
    std = old.inputs.std(0, unbiased=False)
    # The weights of an input that never changed are still random; a tiny std would make it huge where it does change
    # now, as in a new task.
    std = torch.where(std < SMALLEST_STD, 1.0, std + 1e-3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for small matrices several threads are slower than one
    with torch.random.fork_rng(devices=[]):  # dropout draws from torch's global generator
        torch.manual_seed(torch_generator(seed, "critic", update_index).initial_seed())
        inputs = ((old.inputs - mean) / std).clamp(-INPUT_LIMIT, INPUT_LIMIT)
        networks = [fit(inputs, old.returns, old.weights) for _ in range(ENSEMBLE)]
    torch.set_num_threads(threads)
    new_inputs = ((new.inputs - mean) / std).clamp(-INPUT_LIMIT, INPUT_LIMIT)
    with torch.no_grad():
        return torch.stack([network(new_inputs)[:, 0].sigmoid() for network in networks]).mean(0)


def fit(inputs: Tensor, returns: Tensor, weights: Tensor) -> nn.Module:
    """Train a network whose logit predicts the returns (N,), each 0 or 1, from the inputs (N, D).

    weights (N,): how often a row is drawn into a batch, relative to the others. Their sum is the amount of data, to
    which the number of steps is proportional: in 400 steps the networks learned 25 episodes by heart.
    """
    steps = math.ceil(PASSES * weights.sum().item() / BATCH_SIZE)
    layers: list[nn.Module] = []
    for size in (inputs.shape[1], WIDTH):
        layers += [nn.Linear(size, WIDTH), nn.SiLU(), nn.Dropout(DROPOUT)]
    network = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps)
    for rows in torch.multinomial(weights, steps * BATCH_SIZE, replacement=True).split(BATCH_SIZE):
        logits = network(inputs[rows])[:, 0].clamp(-LOGIT_LIMIT, LOGIT_LIMIT)
        loss = F.binary_cross_entropy_with_logits(logits, returns[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval()
