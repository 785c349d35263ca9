"""The critic of `--advantage gae`: predicts the chance of success from the simulator's state.

The state holds true poses and speeds, some 80 numbers, which the policy does not see (asymmetric actor-critic, Pinto et
al. 2018). So a small network learns from a few hundred episodes in a second, whatever the size of the policy. The
values of a rollout come from networks fitted on earlier rollouts only. A critic fitted on the rollout's own outcomes
would predict them, and the advantages would vanish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.randomness import torch_generator
from rl.trajectory import Trajectory

HALF_LIFE = 75  # an episode's weight halves with this many newer episodes of the same task
FORGET_AFTER = 5 * HALF_LIFE  # episodes that are kept of each task
ENSEMBLE = 3  # number of networks; the mean of their predictions is the value
WIDTH = 128  # of the hidden layers
DROPOUT = 0.1
WEIGHT_DECAY = 0.05
LR = 2e-3
STEPS = 400  # optimizer steps of a fit
BATCH_SIZE = 256
LOGIT_LIMIT = 6.0  # logits are clamped to this in the loss: no outcome is certain


@dataclass
class Critic:
    """The critic's data: states (T, D) float32 and returns of earlier episodes by task id, the oldest first."""

    episodes: dict[int, list[tuple[Tensor, float]]] = field(default_factory=dict)

    def remember(self, trajectories: Sequence[Trajectory]) -> None:
        """Add a rollout's episodes, and drop all but the newest FORGET_AFTER of each task."""
        for trajectory in trajectories:
            episodes_of_task = self.episodes.setdefault(trajectory.episode.task_id, [])
            episodes_of_task.append((states_of(trajectory), float(trajectory.success)))
            del episodes_of_task[:-FORGET_AFTER]


def states_of(trajectory: Trajectory) -> Tensor:
    """The simulator's state at each of a trajectory's T decisions, (T, D) float32."""
    observations = [d.observation for d in trajectory.decisions if d.observation is not None]
    return torch.stack([torch.as_tensor(observation.state) for observation in observations])


def predict_values(
    critic: Critic, trajectories: Sequence[Trajectory], seed: int, update_index: int
) -> Tensor | None:
    """Predict the chance of success at every decision, (N,), by networks newly fitted on the remembered episodes.

    None if no episode is remembered yet.
    """
    if not critic.episodes:
        return None
    task_ids = sorted({*critic.episodes, *(trajectory.episode.task_id for trajectory in trajectories)})
    old_states = [states for episodes in critic.episodes.values() for states, _ in episodes]
    new_states = [states_of(trajectory) for trajectory in trajectories]
    width = max(states.shape[1] for states in [*old_states, *new_states])

    old_tasks = [task_id for task_id, episodes in critic.episodes.items() for _ in episodes]
    new_tasks = [trajectory.episode.task_id for trajectory in trajectories]
    old_inputs = _inputs(old_states, old_tasks, task_ids, width)
    new_inputs = _inputs(new_states, new_tasks, task_ids, width)
    mean = old_inputs.mean(0)
    std = old_inputs.std(0, unbiased=False) + 1e-3
    networks = _fit_ensemble(critic, (old_inputs - mean) / std, seed, update_index)
    with torch.no_grad():
        inputs = (new_inputs - mean) / std
        return torch.stack([network(inputs)[:, 0].sigmoid() for network in networks]).mean(0)


def _inputs(states: Sequence[Tensor], tasks: Sequence[int], task_ids: Sequence[int], width: int) -> Tensor:
    """The networks' inputs, (N, width + number of tasks): the states of all episodes, and the one-hot task.

    States are padded with zeros to `width`, because tasks with fewer objects have shorter ones.
    """
    rows: list[Tensor] = []
    for episode_states, task_id in zip(states, tasks, strict=True):
        padded = F.pad(episode_states, (0, width - episode_states.shape[1]))
        one_hot = F.one_hot(torch.tensor(task_ids.index(task_id)), len(task_ids)).float()
        rows.append(torch.cat([padded, one_hot.expand(len(padded), -1)], dim=1))
    return torch.cat(rows)


def _fit_ensemble(critic: Critic, inputs: Tensor, seed: int, update_index: int) -> list[nn.Module]:
    """Fit the networks on the remembered states, inputs (N, D) standardised. Newer episodes have larger weights."""
    episodes = [episode for episodes in critic.episodes.values() for episode in episodes]
    lengths = torch.tensor([len(states) for states, _ in episodes])
    returns = torch.tensor([episode_return for _, episode_return in episodes]).repeat_interleave(lengths)
    ages = torch.cat([torch.arange(len(episodes)).flip(0) for episodes in critic.episodes.values()])
    weights = (0.5 ** (ages / HALF_LIFE)).repeat_interleave(lengths)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for small matrices several threads are slower than one
    with torch.random.fork_rng(devices=[]):  # dropout draws from torch's global generator
        torch.manual_seed(torch_generator(seed, "critic", update_index).initial_seed())
        networks = [fit(inputs, returns, weights) for _ in range(ENSEMBLE)]
    torch.set_num_threads(threads)
    return networks


def fit(inputs: Tensor, returns: Tensor, weights: Tensor) -> nn.Module:
    """Train a network whose logit predicts the returns (N,), each 0 or 1, from the inputs (N, D).

    weights (N,): how often a row is drawn into a batch, relative to the others.
    """
    layers: list[nn.Module] = []
    for size in (inputs.shape[1], WIDTH):
        layers += [nn.Linear(size, WIDTH), nn.SiLU(), nn.Dropout(DROPOUT)]
    network = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS)
    for rows in torch.multinomial(weights, STEPS * BATCH_SIZE, replacement=True).split(BATCH_SIZE):
        logits = network(inputs[rows])[:, 0].clamp(-LOGIT_LIMIT, LOGIT_LIMIT)
        loss = F.binary_cross_entropy_with_logits(logits, returns[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval()
