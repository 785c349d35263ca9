#!/usr/bin/env python
"""Improve a vision-language-action policy on LIBERO tasks: match its own teacher, hand over, then PPO beyond it.

    python train_grpo.py --task-id 0              # OpenVLA-OFT 7B on libero_spatial task 0, one 24 GB GPU
    python train_grpo.py --preset tiny            # a small policy on a CPU
    python train_grpo.py --resume runs/RUN        # go on after a stop or a crash

`train` is the whole algorithm; its numbered steps are explained in docs/HOW_IT_WORKS.md, its formulas are in
rl/losses.py.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import main_guard
from configs.cli import parse_train
from configs.config import TrainConfig, changed
from contracts import resolve_pointer
from envs.assets import find_pack
from envs.pool import Pool, make_pool
from experiment.metrics import advantage_metrics, rollout_metrics, system_metrics, update_line
from experiment.terminal import log_to_terminal, progress_bar
from rl.phases import phase_at

if TYPE_CHECKING:
    from experiment.checkpoints import TrainerState
    from experiment.run_folder import Run
    from rl.update import Learner

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> None:
    """Set up the ranks, the policy, the simulators and the run folder, check them, train."""
    command = parse_train(argv)  # --help and wrong flags, before the seconds that the imports below take
    config = command.config

    import preflight
    from experiment.checkpoints import TrainerState, latest_checkpoint, load_checkpoint, save_checkpoint
    from experiment.evaluation import evaluate_and_record
    from experiment.report import conclude
    from experiment.run_folder import reopen_run, start_run
    from experiment.stopping import interruptible, until_the_end
    from rl.ranks import join_ranks, start_ranks
    from rl.update import make_learner

    log_to_terminal()
    if config.run.data_parallel:
        start_ranks()
    if command.check_only:
        preflight.check_only(config)
        return
    config, _ = preflight.choose_looks(config)
    checks = preflight.Checks()
    preflight.check_machine(checks, config)
    ranks = join_ranks(config.model.device)
    pinned = {
        "checkpoint": str(config.model.checkpoint),
        "teacher": config.phases.teacher,
    }  # `best` may move on
    config = changed(config, **{name: str(resolve_pointer(Path(path))) for name, path in pinned.items()})
    policy = preflight.load_policy(config.model, config.task.task_suite, config.update, config.run.seed)
    teacher = preflight.load_teacher(config, policy)
    micro_batch_size, _ = preflight.fit_micro_batch(config, policy)
    config = changed(config, micro_batch_size=micro_batch_size)
    (spec, tasks), _ = preflight.find_tasks(config, policy.num_images)
    learner = make_learner(policy, config, ranks, teacher.mode)

    with make_pool(spec, config.simulator.num_envs, policy.prepare, config.simulator.simulators) as pool:
        observation = preflight.check_setup(checks, config, policy, pool)
        if command.resume is None:
            looks = find_pack(config.simulator.assets).looks
            state, run = TrainerState(ranks=ranks.size, looks=looks), start_run(config, argv, ranks)
        else:
            state = load_checkpoint(latest_checkpoint(Path(command.resume)), learner)
            run = reopen_run(Path(command.resume), config, state.metrics_bytes, state.wandb_id, ranks)
        with interruptible(), until_the_end(run):
            preflight.log_setup(config, policy, tasks, teacher, run.folder, checks)
            if command.resume is None:
                state.wandb_id = run.wandb.id
                if ranks.is_main:
                    preflight.save_model_view(run.folder / "first_frame.png", observation, policy)
                save_checkpoint(run.checkpoints, learner, state, config.run.keep_checkpoints)
            train(config, run, learner, pool, state)
            evaluate_and_record(config, run, learner, pool, state)
            if ranks.is_main:
                conclude(run.folder)
    ranks.leave()


def train(config: TrainConfig, run: Run, learner: Learner, pool: Pool, state: TrainerState) -> None:
    """Warmup, transition and RL, from `state` to the last env step. Saves after every update."""
    from experiment.checkpoints import save_checkpoint
    from experiment.evaluation import evaluate_and_record, evaluation_is_due
    from rl.curriculum import (
        informative_rollout,
        perturbation_probabilities,
        task_probabilities,
        training_episodes,
    )
    from rl.ranks import shared_rollout
    from rl.rollout import Randomness, behaviour_in
    from rl.trajectory import flatten
    from rl.update import check_signal, estimate_advantages, update

    policy, ranks, seed, end = learner.policy, learner.ranks, config.run.seed, config.phases.total_steps

    while state.global_step < end:
        # 1. The phase decides who acts and which loss is minimised.
        phase = phase_at(state.global_step, config.phases)

        # 2. Validate teacher and student on held-out initial states.
        if evaluation_is_due(config, state):
            evaluate_and_record(config, run, learner, pool, state)

        # 3. Roll out whole episodes: the teacher acts (or the student already), then a mixture, then the student.
        started = time.perf_counter()
        preferred = task_probabilities(config, state.task_success)
        episodes = partial(
            training_episodes, config.task, config.rollout.group_size, seed, state.update, state.drawn, preferred,
            perturbation_probabilities(config, state.perturbed_success),
        )  # fmt: skip
        own_steps = config.rollout.n_steps // ranks.size
        with progress_bar(f"update {state.update + 1}: rollout", own_steps, shown=ranks.is_main) as on_steps:
            rollout = partial(
                shared_rollout, ranks, policy, pool, behaviour=behaviour_in(phase, config, learner.teacher_mode),
                randomness=Randomness(seed, "rollout", state.update), max_batch=config.model.max_batch,
                on_steps=on_steps,
            )  # fmt: skip
            if config.rollout.dynamic_sampling and not phase.distils:
                played, trajectories = informative_rollout(rollout, episodes, config.rollout)
            else:
                played = rollout(episodes(), n_steps=config.rollout.n_steps)
                trajectories = played.trajectories
        metrics = rollout_metrics(played, phase, preferred)

        if trajectories:
            # 4. Advantages: the return of an episode, or how much better it was than others or than expected.
            batch = flatten(trajectories, policy.action_dim)
            if not phase.distils:
                advantages, of_critic = estimate_advantages(
                    learner, batch, trajectories, config, state.update
                )
                batch = replace(batch, advantages=advantages)
                metrics |= advantage_metrics(advantages) | of_critic

            # 5. Epochs of minibatches: distillation_loss in the warmup, ppo_loss afterwards (rl/losses.py).
            title, decisions = f"update {state.update + 1}: learning", config.update.n_epochs * len(batch)
            with run.timed("update"), progress_bar(title, decisions, shown=ranks.is_main) as on_decisions:
                metrics |= update(learner, batch, phase, config, state.update, on_decisions)

        # 6. Record and save: whatever happens now, at most the rollout under way is lost.
        has_signal = phase.distils or metrics.get("advantage/nonzero_fraction", 0) > 0
        state.count_update(played, has_signal)
        is_best = config.evaluation.best_by == "return" and state.improves(state.return_average)
        best = {"return_average": state.return_average} if is_best else None
        run.record(state.global_step, state.update, metrics | system_metrics())
        state.metrics_bytes = run.metrics_bytes()
        with run.timed("checkpoint"):
            save_checkpoint(run.checkpoints, learner, state, config.run.keep_checkpoints, best)
        seconds_to_go = (time.perf_counter() - started) / played.env_steps * (end - state.global_step)
        log.info(update_line(metrics, played, phase, state.global_step, end, seconds_to_go))
        check_signal(state.updates_without_signal)
        run.check_time()


if __name__ == "__main__":
    sys.exit(main_guard("train_grpo.py", main))
