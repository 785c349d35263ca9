"""The critic of `--advantage gae`: the chance of success, by the state of the simulator, learned from past rollouts.

It sees what the policy cannot (asymmetric actor-critic, Pinto et al. 2018): true poses and speeds, some 80 numbers. So
a few hundred episodes teach a small network in a second, whatever the size of the policy. Values of a rollout come from
the rollouts before it alone: fitted on its own outcomes, they would explain away what its advantages should teach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.rollout import torch_generator
from rl.trajectory import Trajectory

HALF_LIFE = 75  # episodes of the same task after which one counts half
FORGET_AFTER = 5 * HALF_LIFE
ENSEMBLE = 3  # networks, whose mean is the value
WIDTH, DROPOUT, WEIGHT_DECAY, LR = 128, 0.1, 0.05, 2e-3
STEPS, BATCH_SIZE = 400, 256
LOGIT_LIMIT = 6.0  # no state is lost or won for certain


@dataclass
class Critic:
    """What is remembered of earlier episodes, by task: their states (T, D) float32 and returns, the oldest first."""

    episodes: dict[int, list[tuple[Tensor, float]]] = field(default_factory=dict)

    def remember(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            of_task = self.episodes.setdefault(trajectory.episode.task_id, [])
            of_task.append((states_of(trajectory), float(trajectory.success)))
            del of_task[:-FORGET_AFTER]


def states_of(trajectory: Trajectory) -> Tensor:
    """(T, D) float32, of its decisions."""
    observations = [d.observation for d in trajectory.decisions if d.observation is not None]
    return torch.stack([torch.as_tensor(observation.state) for observation in observations])


def predict_values(
    critic: Critic, trajectories: Sequence[Trajectory], seed: int, update: int
) -> Tensor | None:
    """(N,) chance of success at every decision, by networks fitted anew on what is remembered; None before that."""
    episodes = [(task_id, *episode) for task_id, of_task in critic.episodes.items() for episode in of_task]
    if not episodes:
        return None
    tasks = sorted({*critic.episodes, *(t.episode.task_id for t in trajectories)})
    new = [(t.episode.task_id, states_of(t)) for t in trajectories]
    width = max(
        states.shape[1] for states in [*(states for _, states, _ in episodes), *(states for _, states in new)]
    )

    def inputs(task_id: int, states: Tensor) -> Tensor:
        """(T, width + tasks): states of tasks with fewer objects are shorter."""
        which = F.one_hot(torch.tensor(tasks.index(task_id)), len(tasks)).float()
        return torch.cat([F.pad(states, (0, width - states.shape[1])), which.expand(len(states), -1)], dim=1)

    seen = torch.cat([inputs(task_id, states) for task_id, states, _ in episodes])
    lengths = torch.tensor([len(states) for _, states, _ in episodes])
    returns = torch.tensor([outcome for *_, outcome in episodes]).repeat_interleave(lengths)
    ages = torch.cat([torch.arange(len(of_task)).flip(0) for of_task in critic.episodes.values()])
    weights = (0.5 ** (ages / HALF_LIFE)).repeat_interleave(lengths)
    asked = torch.cat([inputs(task_id, states) for task_id, states in new])
    mean, std = seen.mean(0), seen.std(0) + 1e-3
    seen, asked = (seen - mean) / std, (asked - mean) / std
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these are small products: more threads wait for one another
    with torch.random.fork_rng(devices=[]):  # dropout draws from torch's own generator
        torch.manual_seed(torch_generator(seed, "critic", update).initial_seed())
        networks = [fit(seen, returns, weights) for _ in range(ENSEMBLE)]
    torch.set_num_threads(threads)
    with torch.no_grad():
        return torch.stack([network(asked)[:, 0].sigmoid() for network in networks]).mean(0)


def fit(states: Tensor, returns: Tensor, weights: Tensor) -> nn.Module:
    """A network whose logit tells the return, 0 or 1, of (N, D) states; rows are drawn by `weights` (N,)."""
    layers: list[nn.Module] = []
    for size in (states.shape[1], WIDTH):
        layers += [nn.Linear(size, WIDTH), nn.SiLU(), nn.Dropout(DROPOUT)]
    network = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS)
    for rows in torch.multinomial(weights, STEPS * BATCH_SIZE, replacement=True).split(BATCH_SIZE):
        logits = network(states[rows])[:, 0].clamp(-LOGIT_LIMIT, LOGIT_LIMIT)
        loss = F.binary_cross_entropy_with_logits(logits, returns[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval()
