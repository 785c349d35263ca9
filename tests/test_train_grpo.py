"""`train` on fakes: all phases in one run, and a run that was resumed is the run that went straight on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import train_grpo
from configs.config import (
    EvaluationConfig,
    PhaseConfig,
    RolloutConfig,
    RunConfig,
    SimulatorConfig,
    TaskConfig,
    TrainConfig,
    UpdateConfig,
)
from rl.checkpoints import TrainerState, latest_checkpoint, load_checkpoint, save_checkpoint
from rl.evaluation import remember_teacher
from rl.run import Run, reopen_run, start_run
from rl.update import make_learner
from tests.fakes import FakePolicy, FakePool, Script, observation, parameters_of

NOT_REPEATABLE = ("time", "per_s", "system/")


def config(folder: Path, total_steps: int, warmup_actor: str) -> TrainConfig:
    return TrainConfig(
        task=TaskConfig(task_ids=(0, 1)),
        simulator=SimulatorConfig(assets="lowpoly"),
        phases=PhaseConfig(warmup_actor=warmup_actor, warmup_steps=100, transition_steps=100, total_steps=total_steps),
        rollout=RolloutConfig(n_steps=40, curriculum=True, physics="fast"),
        update=UpdateConfig(n_epochs=2, batch_size=4, micro_batch_size=2, lr=1e-3),
        evaluation=EvaluationConfig(eval_interval=150),
        run=RunConfig(output=str(folder), wandb_mode="disabled"),
    )


def trained(folder: Path, total_steps: int, actor: str, resume: bool = False) -> tuple[Path, FakePolicy]:
    """The run folder and the policy at `total_steps`; with `resume` of the one run in the folder."""
    settings, policy = config(folder, total_steps, actor), FakePolicy(adapter_scale=0.1)
    learner = make_learner(policy, settings)
    if resume:
        (run_folder,) = folder.iterdir()
        state = load_checkpoint(latest_checkpoint(run_folder), learner)
        run: Run = reopen_run(run_folder, settings, state.metrics_bytes, state.wandb_id)
    else:
        state, run = TrainerState(), start_run(settings, [])
        remember_teacher(run.teacher_file, policy, observation(0.1, 0.2, 0.3), "greedy")
        save_checkpoint(run.checkpoints, learner, state, settings.run.keep_checkpoints)
    script = lambda task, start: Script(5 + (7 * start + 3 * task) % 17, success=(start * 5 + task) % 3 == 0)  # noqa: E731
    pool = FakePool(script, num_slots=2, order_seed=1)
    train_grpo.train(settings, run, learner, pool, state)
    is_held_out = [start >= 40 for _, start in pool.started]
    assert [physics == "exact" for physics in pool.physics] == is_held_out  # evaluations are exact whatever trains
    run.close()
    return run.folder, policy


def records(folder: Path) -> list[dict]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in row.items() if not any(part in k for part in NOT_REPEATABLE)} for row in rows]


@pytest.mark.parametrize("actor", ["teacher", "student"])
def test_a_run_goes_through_all_phases_and_resumed_it_is_the_same_to_the_bit(tmp_path, actor):
    folder, straight = trained(tmp_path / "straight", 400, actor)
    rows = records(folder)
    assert {row["schedule/phase"] for row in rows if "schedule/phase" in row} == {0, 1, 2}
    assert {"distill/loss", "train/first_ratio_error", "advantage/mean", "eval/gap"} <= set().union(*rows)

    in_warmup = {row["rollout/teacher_fraction"] for row in rows if row.get("schedule/phase") == 0}
    assert in_warmup == {float(actor == "teacher")}

    trained(tmp_path / "resumed", 60, actor)
    again, resumed = trained(tmp_path / "resumed", 400, actor, resume=True)
    assert records(again) == rows
    assert all(torch.equal(a, b) for a, b in zip(parameters_of(resumed), parameters_of(straight), strict=True))
