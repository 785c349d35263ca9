"""What two processes do together, for tests/test_ranks.py: python -m tests.together FOLDER.

Each leaves FOLDER/rank_R.pt; `results(ALONE)` is the same in one process.
"""

from __future__ import annotations

import copy
import math
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from configs.config import (
    EvaluationConfig,
    LossConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    TrainConfig,
    UpdateConfig,
)
from rl.checkpoints import TrainerState, mark_best, restore_best, save_checkpoint
from rl.critic import ValueHead, predict_values
from rl.dynamic_sampling import collect_informative
from rl.episodes import training_episodes
from rl.evaluation import validate
from rl.learner import Learner
from rl.losses import Statistics
from rl.objectives import Objective, policy_objective, teacher_distribution
from rl.ranks import ALONE, Ranks, RanksLost, join_ranks
from rl.rollout import Acting, Randomness
from rl.run import start_run
from rl.selfcheck import SelfCheckError, check_same_parameters
from rl.shared_rollout import collect_together
from rl.trajectory import Decision, Episode, Trajectory, flatten
from rl.update import optimise
from tests.fakes import FakePolicy, FakePool, Script, acted_batch, adamw, parameters_of
from vla.policy import Policy

LENGTHS = (3, 2, 3)
ADVANTAGES = torch.tensor([1.0, 0.0, -2.0, 0.5, 0.0, 0.0, -1.0, 1.5])  # 5 of 8 decisions are active
STUDENT = Acting(epsilon=0.0, temperature=1.0, record_student_logprobs=True)


class GradientsKept(torch.optim.AdamW):
    """AdamW that remembers the gradients of its steps."""

    def __init__(self, policy: FakePolicy | Policy, lr: float = 1e-2):
        super().__init__([p for _, p in policy.named_trainable_parameters()], lr=lr, fused=True)
        self.gradients: list[torch.Tensor] = []

    def step(self) -> None:
        if not self.found_inf:
            self.gradients.append(
                torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"] if p.grad is not None])
            )
        super().step()


def of_one_row_at_most(chunk_logits):
    def limited(observations):
        if len(observations) > 1:
            raise torch.OutOfMemoryError("no memory")
        return chunk_logits(observations)

    return limited


def update_of(ranks: Ranks, objective=None, short_of_memory: int | None = None, **settings) -> dict[str, Any]:
    """Gradients, parameters and metrics of an update of a policy that all ranks have; one rank may lack memory."""
    policy = FakePolicy(adapter_scale=0.2)
    batch = acted_batch(policy, LENGTHS)
    if objective is None:
        objective = policy_objective(policy, batch, ADVANTAGES, LossConfig(), 1.0, 2)
    policy.rows_run = 0
    if ranks.rank == short_of_memory:
        policy.chunk_logits = of_one_row_at_most(policy.chunk_logits)
    optimizer = GradientsKept(policy)
    config = UpdateConfig(**({"n_epochs": 2, "micro_batch_size": 1} | settings))
    metrics = optimise(policy, optimizer, batch, objective, config, seed=0, update=0, ranks=ranks)
    return {
        "gradients": optimizer.gradients,
        "parameters": parameters_of(policy),
        "metrics": {key: value for key, value in metrics.items() if key != "train/time_s"},
        "rows_run": policy.rows_run,
    }


def one_poisoned_row() -> Objective:
    """Row 2 has a gradient of NaN: only the rank that runs it notices by itself."""

    def loss(logits, rows):
        return (logits.logsumexp(-1).mean(-1) * torch.where(rows == 2, math.nan, 1.0)).sum(), Statistics({}, {}, 1)

    return Objective(loss, torch.ones(8, dtype=torch.bool))


def nothing_active() -> Objective:
    return Objective(lambda logits, rows: None, torch.zeros(8, dtype=torch.bool))


def script(task_id: int, init_state: int) -> Script:
    return Script(env_steps=10 + init_state % 7, success=init_state % 3 == 0)


def rollout_of(ranks: Ranks, num_slots: int = 1) -> dict[str, Any]:
    pool = FakePool(script, num_slots)
    episodes = training_episodes(TaskConfig(train_init_states=(0, 40)), 2, seed=0, update=0)
    collected = collect_together(
        ranks, FakePolicy(), pool, episodes, n_steps=120, acting=STUDENT, randomness=Randomness(0, "rollout")
    )
    return {"started": pool.started, "trajectories": [contents(t) for t in collected.trajectories]}


def contents(t) -> tuple:
    return t.episode, t.success, t.env_steps, [(d.tokens.tolist(), d.observation.proprio.tolist()) for d in t.decisions]


def sampled_dynamically(ranks: Ranks) -> list:
    def play(episodes, n_steps):
        return collect_together(
            ranks, FakePolicy(), FakePool(script), episodes, n_steps, acting=STUDENT, randomness=Randomness(0, "x")
        )

    config = RolloutConfig(n_steps=60, group_size=2, dynamic_sampling=True, group_success_bounds=(0.5, 1.0))
    episodes = lambda: training_episodes(TaskConfig(train_init_states=(0, 40)), 2, seed=0, update=0)  # noqa: E731
    collected, kept = collect_informative(play, episodes, config)
    return [[contents(t) for t in part] for part in (collected.trajectories, kept)]


def validation_of(ranks: Ranks) -> dict[str, Any]:
    config = TrainConfig(task=TaskConfig(eval_init_states=(40, 45)), evaluation=EvaluationConfig(eval_trials=3))
    pool = FakePool(script)
    validation = validate(FakePolicy(), pool, config, "greedy", None, ranks)
    frames = sum(len(trajectory.frames) for trajectory in validation.played["student"])
    return {"metrics": validation.metrics(), "played": len(pool.started), "frames": frames}


def learned_values(ranks: Ranks) -> list[torch.Tensor]:
    """What is computed once per update, each rank a part of it."""
    policy = FakePolicy(adapter_scale=0.2)
    batch = acted_batch(policy, LENGTHS)
    policy.chunk_outputs = lambda seen: (None, policy.chunk_logits(seen))
    critic = ValueHead(256, seed=0)
    nn.init.ones_(critic.net[-1].weight)
    return [predict_values(policy, critic, batch, 1, ranks), teacher_distribution(policy, batch, 1.0, 1, ranks)]


def results(ranks: Ranks) -> dict[str, Any]:
    return {
        "uneven": update_of(ranks, batch_size=8),
        "one row each": update_of(ranks, batch_size=1),  # rank 1 never has an active row
        "poisoned": update_of(ranks, one_poisoned_row(), batch_size=2, n_epochs=1),
        "drifting": update_of(ranks, batch_size=8, n_epochs=10, target_kl=1e-4),
        "nothing active": update_of(ranks, nothing_active(), batch_size=2),
        "one rank short of memory": update_of(ranks, short_of_memory=1, batch_size=8, micro_batch_size=4),
        "rollout": rollout_of(ranks),
        "rollout of three environments": rollout_of(ranks, num_slots=3),
        "dynamic sampling": sampled_dynamically(ranks),
        "validation": validation_of(ranks),
        "values": learned_values(ranks),
    }


def unreached_parameters(ranks: Ranks) -> list[torch.Tensor | None]:
    """Gradients after the sum of: one that both ranks have, one that only rank 0 has, one that nobody has."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.full((2,), 1.0 + ranks.rank)
    if ranks.is_main:
        parameters[1].grad = torch.full((2,), 5.0)
    ranks.sum_gradients(parameters)
    return [p.grad for p in parameters]


def drift_found(ranks: Ranks) -> str:
    parameter = nn.Parameter(torch.ones(3))
    check_same_parameters([parameter], ranks)
    parameter.data[1] += 2.0**-23 * ranks.rank  # one bit
    try:
        check_same_parameters([parameter], ranks)
    except SelfCheckError as error:
        return str(error)
    return "not found"


def written_by(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Start a run, record, save, mark and restore the best; the files that this rank opened for writing or renamed."""
    touched: list[str] = []

    def watch(event: str, arguments: tuple) -> None:
        writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "shutil.rmtree"):
            touched.append(f"{event} {arguments[0]}")

    policy = FakePolicy()
    learner = Learner(policy, None, adamw(policy), ranks)
    state = TrainerState(ranks=ranks.size, best_score=1.0)
    sys.addaudithook(lambda event, arguments: watch(event, arguments) if watching else None)
    watching = True
    run = start_run(TrainConfig(run=RunConfig(output=str(folder / "runs"), wandb_mode="disabled")), [], ranks)
    run.record(0, 0, {"rank": ranks.rank})
    save_checkpoint(run.checkpoints, learner, state, keep=2)
    mark_best(run.checkpoints, learner, state, {})
    best = restore_best(run.checkpoints, learner).name
    run.close()
    watching = False
    return {"folder": run.folder, "touched": [t for t in touched if str(folder) in t], "best": best}


def spread_out(folder: Path, dtype: torch.dtype, recomputing: bool, ranks: Ranks) -> dict[str, Any]:
    """A small policy whole and the same with its base spread over the ranks: pairs of what should be equal."""
    whole, cut = (Policy.load(str(folder / "small"), task_suite="libero_spatial", dtype=dtype) for _ in range(2))
    cut.shard(torch.device("cpu"))
    for policy in (whole, cut):
        policy.recompute(policy.network.num_blocks if recomputing else 0)
        generator = torch.Generator().manual_seed(1)
        for _, parameter in policy.named_trainable_parameters():
            with torch.no_grad():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    seen = [seen_by(whole, seed) for seed in range(3)]
    tokens = torch.cat([whole.act([one]).tokens for one in seen])
    with cut.keeping_step():  # rank 0 acts once, rank 1 three times
        acted = torch.cat([cut.act([one]).tokens for one in seen[: 1 + 2 * ranks.rank]])
    with whole.teacher(), cut.teacher():
        teachers = whole.act(seen).tokens, cut.act(seen).tokens
    gradients = gradients_of(whole, seen, tokens, ALONE), gradients_of(cut, seen, tokens, ranks)
    after_backward = own_part(cut)
    if ranks.is_main:
        cut.save_adapter(folder / f"adapter {dtype}")
    ranks.wait_for_all()
    whole.load_adapter(folder / f"adapter {dtype}")
    with torch.no_grad():
        reloaded = whole.chunk_logits(seen), cut.chunk_logits(seen)
    return {
        "acted": (acted, tokens[: len(acted)]),
        "teacher": teachers,
        "gradients": gradients,
        "reloaded": reloaded,
        "own part": (after_backward, own_part(cut)),
        "types of the trained": {type(parameter) for _, parameter in cut.named_trainable_parameters()},
    }


def own_part(policy: Policy) -> tuple[int, int]:
    """Frozen numbers of a transformer block: those on this rank, and all."""
    frozen = [p for p in policy.network.language_model.model.layers[0].parameters() if not p.requires_grad]
    own = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in frozen)
    return own, sum(p.numel() for p in frozen)


def seen_by(policy: Policy, seed: int) -> SimpleNamespace:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 255, (policy.num_images, 64, 64, 3), dtype=np.uint8)
    return SimpleNamespace(images=images, proprio=rng.normal(size=8), instruction="pick up the bowl", prepared=False)


def gradients_of(policy: Policy, seen: list, tokens: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
    """Of two optimizer steps, on minibatches of 2 and 1 rows of which 3 in all are active."""
    with torch.no_grad():
        old = torch.cat([policy.token_logprobs(policy.chunk_logits([o]), t[None], 1.0)
                         for o, t in zip(seen, tokens, strict=True)])  # fmt: skip
    decisions = [Decision(o, t, False, p, None, 8) for o, t, p in zip(seen, tokens, old, strict=True)]
    batch = flatten([Trajectory(Episode(0, 0, 0, 0), decisions)], policy.action_dim)
    ranks = replace(ranks, shard_base=ranks.size > 1)
    objective = policy_objective(policy, batch, torch.tensor([1.0, 0.5, -1.0]), LossConfig(), 1.0, 1, ranks=ranks)
    optimizer = GradientsKept(policy, lr=1e-3)
    config = UpdateConfig(n_epochs=1, batch_size=2, micro_batch_size=1)
    optimise(policy, optimizer, batch, objective, config, seed=0, update=0, ranks=ranks)
    return optimizer.gradients


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    ranks = join_ranks(torch.device("cpu"), patience=timedelta(minutes=5))
    found = results(ranks)
    found["unreached"] = unreached_parameters(ranks)
    found["drift"] = drift_found(ranks)
    found["written"] = written_by(ranks, folder)
    found["sharded"] = spread_out(folder, torch.float32, False, ranks)
    found["sharded, bfloat16"] = spread_out(folder, torch.bfloat16, True, ranks)
    ranks.wait_for_all()
    if not ranks.is_main:
        torch.save(found, folder / "rank_1.pt")
        os._exit(9)  # as a kill would
    try:
        ranks.gather(copy.copy("anyone?"))
    except RanksLost as lost:
        found["lost"] = (str(lost), lost.code)
    torch.save(found, folder / "rank_0.pt")


if __name__ == "__main__":
    main()
