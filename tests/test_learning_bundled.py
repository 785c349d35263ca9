"""PPO improves the bundled policy: one real rollout in LIBERO and one update make its successes likelier.

Judged by log-probs, not by new episodes, which a few seconds could not play enough of.
"""

from __future__ import annotations

import torch

from configs.config import changed
from configs.presets import PRESETS
from envs.env import EnvSpec
from envs.pool import make_pool
from rl.advantages import estimate_advantages
from rl.behaviour import behaviour_in
from rl.episode_order import PlayAll
from rl.episode_player import EpisodePlayer
from rl.phases import phase_at
from rl.randomness import Randomness
from rl.ranks import ALONE
from rl.rollout import play_rollout
from rl.trajectory import Batch, Episode, flatten
from rl.update import make_learner, update
from tests.small_checkpoint import BUNDLED
from vla.load_options import LoadOptions
from vla.policy import Policy
from vla.tokens import token_logprobs

EPISODES = [Episode(index, 0, None, index, seed=index) for index in range(4)]


@torch.no_grad()
def chunk_logprobs(policy: Policy, batch: Batch, temperature: float) -> torch.Tensor:
    """The mean log-prob of the executed tokens of each decision, (N,)."""
    logprobs = token_logprobs(policy.chunk_logits(batch.observations), batch.tokens, temperature)
    return (logprobs * batch.executed).sum(-1) / batch.executed.sum(-1)


def test_an_update_makes_the_actions_of_successes_likelier_and_not_those_of_failures():
    config = changed(
        PRESETS["tiny"], warmup=False, advantage="absolute", n_epochs=2, batch_size=8, micro_batch_size=8
    )
    temperature = config.rollout.temperature
    policy = Policy.load(str(BUNDLED), LoadOptions(task_suite="libero_spatial", device="cpu"))
    learner = make_learner(policy, config)
    phase = phase_at(0, config.phases)
    behaviour = behaviour_in(phase, config, "greedy", episode_length=100)
    spec = EnvSpec("libero_spatial", (0,), num_images=1, assets="lowpoly", max_env_steps=120)
    with make_pool(spec, num_envs=2) as pool:
        player = EpisodePlayer(policy, pool, behaviour, Randomness(0, "rollout"))
        trajectories = play_rollout(player, PlayAll(EPISODES, ALONE)).trajectories
    batch = estimate_advantages(flatten(trajectories, policy.action_dim), trajectories, None, config.loss)
    is_success = batch.advantages > 0
    assert is_success.any()
    assert not is_success.all()

    before = chunk_logprobs(policy, batch, temperature)
    update(learner, batch, phase, config, update_index=0)
    gain = chunk_logprobs(policy, batch, temperature) - before
    assert gain[is_success].mean() > 0.02
    assert gain[is_success].mean() > gain[~is_success].mean() + 0.02
