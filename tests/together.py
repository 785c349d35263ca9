"""What two processes do together, for tests/test_ranks.py: each calls `main`.

`results` is also what one process does alone. Rank 1 ends as if it were killed; rank 0 finds out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs.config import TrainConfig, changed
from contracts import SelfCheckError
from experiment.episodes import EpisodeKey, Rule
from experiment.evaluator import Conditions, evaluate
from rl.behaviour import Behaviour
from rl.collect import collect
from rl.episode_player import EpisodePlayer
from rl.phases import phase_at
from rl.randomness import Randomness
from rl.ranks import Ranks, RanksLost, join_ranks
from rl.training_episodes import TrainingEpisodes
from rl.update import Learner, update
from tests.fakes import FakePolicy, FakePool, Script, acted_batch, adamw, contents, parameters_of

LENGTHS = (3, 2, 3)
ADVANTAGES = torch.tensor([1.0, 0.0, -2.0, 0.5, 0.0, 0.0, -1.0, 1.5])  # 5 of 8 decisions are active
STUDENT = Behaviour(epsilon_start=0.0, temperature=1.0, record_student_logprobs=True)
WITH_GROUPS = changed(TrainConfig(), train_init_states=(0, 40), eval_init_states=(40, 50), group_size=2)
EPISODES = TrainingEpisodes(WITH_GROUPS, update_index=0, groups_drawn={})


class Poisoned(FakePolicy):
    """May have a gradient of NaN for one observation."""

    poison = None

    def chunk_logits(self, observations, kept=None):
        logits = super().chunk_logits(observations)
        if logits.requires_grad and any(o is self.poison for o in observations):
            logits.register_hook(lambda gradient: gradient * math.nan)
        return logits


def update_of(
    ranks: Ranks, short_of_memory: int | None = None, poisoned: bool = False, **settings
) -> dict[str, Any]:
    """Parameters and metrics of an update of a policy that all ranks have."""
    policy = Poisoned(adapter_scale=0.2)
    batch = replace(acted_batch(policy, LENGTHS), advantages=ADVANTAGES)
    policy.poison = batch.observations[2] if poisoned else None
    if ranks.rank == short_of_memory:
        policy.room = 1
    policy.rows_run = 0
    settings = {"n_epochs": 2, "micro_batch_size": 1, "lr": 1e-2, "desired_kl": None} | settings
    config = changed(TrainConfig(), warmup=False, **settings)
    learner = Learner(policy, None, adamw(policy), ranks)
    metrics = update(learner, batch, phase_at(0, config.phases), config, 0)
    return {
        "parameters": parameters_of(policy),
        "metrics": {key: value for key, value in metrics.items() if key != "train/time_s"},
        "rows_run": policy.rows_run,
    }


def script(task_id: int, init_state: int) -> Script:
    return Script(env_steps=10 + init_state % 7, success=init_state % 3 == 0)


def sampled_dynamically(ranks: Ranks) -> list:
    player = EpisodePlayer(FakePolicy(), FakePool(script), STUDENT, Randomness(0, "rollout"))
    played, kept = collect(player, EPISODES, 60, (0.5, 1.0), ranks)
    return [contents(played.trajectories), contents(kept)]


def evaluation_of(ranks: Ranks) -> dict[str, Any]:
    pool = FakePool(script)
    keys = [EpisodeKey("libero_spatial", 0, False, state, 0) for state in range(30, 45)]
    played = evaluate(FakePolicy(), pool, keys, Rule("sample", 1.0), Conditions(seed=0), ranks)
    return {"episodes": [replace(result, seconds=0) for result in played], "played": len(pool.started)}


def results(ranks: Ranks) -> dict[str, Any]:
    return {
        "uneven": update_of(ranks, batch_size=8),
        "one row each": update_of(ranks, batch_size=1),  # rank 1 never has an active row
        "poisoned": update_of(ranks, poisoned=True, batch_size=2, n_epochs=1),
        "one rank short of memory": update_of(ranks, short_of_memory=1, batch_size=8, micro_batch_size=4),
        "dynamic sampling": sampled_dynamically(ranks),
        "evaluation": evaluation_of(ranks),
    }


def drift_is_found(ranks: Ranks) -> bool:
    """Whether the ranks see that a parameter differs by one bit."""
    parameter = nn.Parameter(torch.ones(3))
    ranks.check_same_parameters([parameter])
    parameter.data[1] += 2.0**-23 * ranks.rank
    return is_raised(SelfCheckError, lambda: ranks.check_same_parameters([parameter]))


def is_raised(kind: type[BaseException], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def main(rank: int, port: int, folder: Path) -> None:
    """Be a rank in a forked process, and write what it has seen into the folder."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    ranks = join_ranks("cpu")
    report = results(ranks)
    report["drift"] = drift_is_found(ranks)
    ranks.gather(None)
    if not ranks.is_main:
        torch.save(report, folder / "rank_1.pt")
        os._exit(9)  # as a kill would
    report["lost"] = is_raised(RanksLost, lambda: ranks.gather("anyone?"))
    torch.save(report, folder / "rank_0.pt")
