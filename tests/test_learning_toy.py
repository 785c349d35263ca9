"""The program's own rollouts, losses and updates really learn: on a task that takes a second.

EPISODE env steps, at each of which one of 3 actions is right. An episode in which all were is a success. Chunks have 2
actions, so every episode ends inside its second chunk. One setting for all seeds and all advantages.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from configs.config import TrainConfig, changed
from contracts import Observation
from rl.advantages import estimate_advantages
from rl.behaviour import Behaviour, behaviour_in
from rl.collect import collect
from rl.critic import predict_then_remember
from rl.episode_order import PlayAll
from rl.episode_player import EpisodePlayer
from rl.phases import phase_at
from rl.randomness import Randomness
from rl.ranks import ALONE
from rl.rollout import Rollout, play_rollout
from rl.teacher_choice import settle_warmup
from rl.training_episodes import TrainingEpisodes
from rl.trajectory import Episode, flatten
from rl.update import Learner, make_learner, update
from tests.fakes import BINS, FakePool, Playing, Script, ToyPolicy, observation

CONTEXTS = 2  # kinds of initial states
EPISODE = 3  # env steps
CHUNK = 2  # actions
FEATURES = CONTEXTS * 2  # one-hot: context and decision number
SEEDS = range(2)
UPDATES = 10
ADVANTAGES = ("absolute", "group", "batch", "gae")


def pretrained_policy(seed: int) -> ToyPolicy:
    """Somewhat better than chance at the task: the right action has a logit of about 0.7 above the others."""
    base = 0.3 * torch.randn(FEATURES, CHUNK, len(BINS), generator=torch.Generator().manual_seed(seed))
    for context in range(CONTEXTS):
        for env_step in range(EPISODE):
            decision, position = divmod(env_step, CHUNK)
            base[2 * context + decision, position, right_choice(context, env_step)] += 0.7
    return ToyPolicy(base, chunk_length=CHUNK, action_dim=1)


def right_choice(context: int, env_step: int) -> int:
    """Index into BINS of the action that the task wants."""
    return (context + 2 * env_step) % len(BINS)


class ToyPool(FakePool):
    """The task in 16 environments."""

    def __init__(self):
        super().__init__(lambda *_: Script(EPISODE, success=True), num_slots=16)

    def _execute(self, now: Playing, actions: np.ndarray) -> None:
        for action in actions[:, 0]:
            right = BINS[right_choice(now.init_state_id % CONTEXTS, now.env_steps)]
            now.success &= action == right / 128 - 1
            now.env_steps += 1

    def _observe(self, now: Playing) -> Observation:
        context = now.init_state_id % CONTEXTS
        return observation(*np.eye(FEATURES)[2 * context + now.env_steps // CHUNK])


def settings(seed: int, advantage: str = "absolute", **changes: object) -> TrainConfig:
    """Updates on 32 episodes of a toy, in groups of 8."""
    return changed(
        TrainConfig(),
        seed=seed,
        train_init_states=(0, 40),
        eval_init_states=(40, 50),
        n_steps=32 * EPISODE,
        group_size=8,
        advantage=advantage,
        ratio_level="chunk" if advantage == "absolute" else "token",
        batch_size=16,
        micro_batch_size=16,
        lr=0.05,
        warmup_lr=0.05,
        desired_kl=None,
        **({"warmup": False} | changes),
    )


def one_update(config: TrainConfig, learner: Learner, pool: ToyPool, update_index: int) -> dict[str, float]:
    """Steps 1 and 3 to 5 of `train`; returns the metrics of the update."""
    phase = phase_at(update_index * config.rollout.n_steps, config.phases)
    episodes = TrainingEpisodes(config, update_index, groups_drawn={})
    behaviour = behaviour_in(phase, config, learner.teacher_mode, episode_length=EPISODE)
    player = EpisodePlayer(
        learner.policy, pool, behaviour, Randomness(config.run.seed, "rollout", update_index)
    )
    _, trajectories = collect(player, episodes, config.rollout.n_steps, bounds=None)
    batch = flatten(trajectories, learner.policy.action_dim)
    if not phase.distils:
        values, _ = predict_then_remember(learner.critic, trajectories, config.run.seed, update_index)
        batch = estimate_advantages(batch, trajectories, values, config.loss)
    return update(learner, batch, phase, config, update_index)


def play_sampled(policy: ToyPolicy, seed: int, episodes: int = 200) -> Rollout:
    behaviour = Behaviour(epsilon_start=0.0, temperature=1.0)
    starts = [Episode(i, 0, i % CONTEXTS, i) for i in range(episodes)]
    player = EpisodePlayer(policy, ToyPool(), behaviour, Randomness(seed, "evaluation"))
    return play_rollout(player, PlayAll(starts, ALONE))


def success(policy: ToyPolicy, seed: int) -> float:
    trajectories = play_sampled(policy, seed).trajectories
    return sum(t.success for t in trajectories) / len(trajectories)


@cache
def success_of_the_pretrained(seed: int) -> float:
    return success(pretrained_policy(seed), seed)


# policy gradient


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_every_advantage_raises_sampled_success_from_below_40_to_above_90_percent(advantage, seed):
    config = settings(seed, advantage)
    learner = make_learner(pretrained_policy(seed), config)
    for update_index in range(UPDATES):
        one_update(config, learner, ToyPool(), update_index)
    after = success(learner.policy, seed)

    assert success_of_the_pretrained(seed) < 0.4
    assert after > 0.9


# warmup


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("actor", ["teacher", "student"])
def test_in_the_warmup_the_student_comes_to_choose_what_its_teacher_would(actor, seed):
    config = settle_warmup(settings(seed, warmup=True, warmup_steps=10**6, warmup_actor=actor), "greedy")
    learner = make_learner(pretrained_policy(seed), config)
    student = learner.policy
    with torch.no_grad():  # Its teacher, which has no adapter, chooses what the student likes least.
        student.adapter.copy_(-2 * student.base)
    seen = flatten(play_sampled(student, seed).trajectories, student.action_dim)

    def agreement() -> float:
        same = student.act(seen.observations).tokens == student.act_as_teacher(seen.observations).tokens
        return same[seen.executed].float().mean().item()

    assert agreement() == 0
    metrics = [one_update(config, learner, ToyPool(), update_index) for update_index in range(UPDATES)]
    assert agreement() == pytest.approx(metrics[-1]["distill/accuracy"]) == 1
