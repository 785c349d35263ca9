#!/usr/bin/env python
"""Improve a vision-language-action policy on LIBERO tasks: match its own teacher, hand over, then PPO beyond it.

    python train_grpo.py --task-id 0              # OpenVLA-OFT 7B on libero_spatial task 0, one 24 GB GPU
    python train_grpo.py --preset tiny            # a small policy on a CPU
    python train_grpo.py --resume runs/RUN        # go on after a stop or a crash

`train` is the whole algorithm; its numbered steps are explained in docs/HOW_IT_WORKS.md.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from interrupts import leave_at_once

if __name__ == "__main__":
    leave_at_once("train_grpo.py")  # on Ctrl-C; later main_guard stops in good order

from configs.cli import answer_at_once, main_guard
from configs.cli import parse_command

if __name__ == "__main__":
    answer_at_once(
        "train_grpo.py", parse_command
    )  # --help and wrong flags, before the seconds that the imports below take

from assembly import choose_device, choose_teacher, env_spec, fit_to_memory, load_policy
from configs.config import TrainConfig
from envs.libero import task_info
from envs.pool import make_pool
from findings import Checks
from preflight import check_machine, check_only, check_setup, log_setup, save_model_view
from rl.checkpoints import TrainerState, latest_checkpoint, load_checkpoint, save_checkpoint
from rl.contracts import Pool, TeacherMode
from rl.curriculum import curriculum_metrics, task_preferences
from rl.dynamic_sampling import collect_informative
from rl.ending import until_the_end
from rl.episodes import training_episodes
from rl.learner import Learner, make_learner, set_learning_rate
from rl.learning import estimate_advantages, surrogate_objective
from rl.metrics import rollout_metrics, system_metrics, update_line
from rl.objectives import distillation_objective
from rl.phases import Phase, last_step, phase_at
from rl.progress import progress_bar
from rl.ranks import join_ranks
from rl.report import conclude
from rl.rollout import Randomness, acting_in, batching_of
from rl.run import Run, log_to_terminal, reopen_run, start_run
from rl.selfcheck import check_executed, check_signal, remember_teacher
from rl.shared_rollout import collect_together
from rl.trajectory import flatten
from rl.update import optimise
from rl.validation import evaluate_and_record, evaluation_is_due, fell_below_baseline

log = logging.getLogger("train")


def main(argv: Sequence[str]) -> None:
    """Set up the policy, the simulator and the run folder, check them, train."""
    command = parse_command(argv)
    config = command.config
    if command.check_only:
        check_only(config)
        return
    log_to_terminal()
    checks = Checks()
    check_machine(checks, config)
    ranks = join_ranks(choose_device(config.policy))
    policy = load_policy(config, ranks)
    config = fit_to_memory(config, policy, ranks)
    teacher = choose_teacher(config, policy.action_head is not None)
    spec = env_spec(config.task, policy.num_images)
    tasks = task_info(spec)
    learner = make_learner(policy, config, ranks)

    with make_pool(spec, config.simulator.num_envs, policy.prepare) as pool:
        observation = check_setup(checks, config, policy, pool, tasks)
        if command.resume is None:
            state, run = TrainerState(ranks=ranks.size), start_run(config, argv, ranks)
        else:
            state = load_checkpoint(latest_checkpoint(Path(command.resume)), learner)
            run = reopen_run(Path(command.resume), config, state.metrics_bytes, state.wandb_id, ranks)
        with until_the_end(run, ranks):
            log_setup(config, policy, spec, tasks, teacher, run.folder, checks)
            if command.resume is None:
                state.wandb_id = run.wandb.id
                remember_teacher(run.teacher_file, policy, observation, teacher.mode, write=ranks.is_main)
                if ranks.is_main:
                    save_model_view(run.folder / "first_frame.png", observation, policy)
                save_checkpoint(run.checkpoints, learner, state, config.run.keep_checkpoints)
            train(config, run, learner, pool, state, teacher.mode)
            evaluate_and_record(config, run, learner, pool, state, teacher.mode)
            if ranks.is_main:
                conclude(run)
    ranks.leave()


def train(
    config: TrainConfig, run: Run, learner: Learner, pool: Pool, state: TrainerState, teacher_mode: TeacherMode
) -> None:
    """Warmup, transition and RL, from `state` to the last env step. Saves after every update."""
    policy, ranks, seed, end = learner.policy, learner.ranks, config.run.seed, last_step(config.phases)

    while state.global_step < end:
        # 1. The phase decides who acts and which loss is minimised.
        phase = phase_at(state.global_step, config.phases)
        distilling = phase.phase is Phase.WARMUP

        # 2. Validate teacher and student on held-out initial states.
        if evaluation_is_due(config, state):
            validation = evaluate_and_record(config, run, learner, pool, state, teacher_mode)
            if fell_below_baseline(config, run, learner, state, validation):
                break

        # 3. Roll out whole episodes: the teacher acts, then a mixture, then the student.
        started = time.perf_counter()
        preferred = task_preferences(config, state.task_success)
        episodes = partial(training_episodes, config.task, config.rollout.group_size, seed, state.update, preferred)
        own_steps = config.rollout.n_steps // ranks.size
        with progress_bar(f"update {state.update + 1}: rollout", own_steps, shown=ranks.is_main) as on_steps:
            play = partial(
                collect_together, ranks, policy, pool, acting=acting_in(phase, config, teacher_mode),
                randomness=Randomness(seed, "rollout", state.update), batching=batching_of(config.rollout),
                on_steps=on_steps,
            )  # fmt: skip
            if config.rollout.dynamic_sampling and not distilling:
                collected, trajectories = collect_informative(play, episodes, config.rollout)
            else:
                collected = play(episodes(), n_steps=config.rollout.n_steps)
                trajectories = collected.trajectories
        metrics = rollout_metrics(collected, phase, sum(ranks.gather(pool.restarts))) | curriculum_metrics(preferred)

        # 4. What to minimise: cross-entropy to the teacher, or the clipped surrogate of the advantages.
        if trajectories:
            batch = flatten(trajectories, policy.action_dim)
            check_executed(batch, trajectories, policy.action_dim)
            if distilling:
                objective = distillation_objective(policy, batch, config.phases, config.update.micro_batch, ranks)
            else:
                estimate = estimate_advantages(config, learner, batch, trajectories)
                metrics |= estimate.metrics
                objective = surrogate_objective(config, learner, batch, estimate, phase, state.global_step)

            # 5. Epochs of minibatches over the rollout.
            set_learning_rate(learner, config.update, distilling)
            decisions, shown = config.update.n_epochs * len(batch), ranks.is_main
            with (
                run.timed("update"),
                progress_bar(f"update {state.update + 1}: learning", decisions, shown) as on_decisions,
            ):
                metrics |= optimise(
                    policy, learner.optimizer, batch, objective, config.update, seed, state.update, ranks, on_decisions
                )

        # 6. Record and save: whatever happens now, at most the rollout under way is lost.
        learned_something = distilling or metrics.get("advantage/nonzero_fraction", 0) > 0
        state.absorb(collected, learned_something, config.curriculum.curriculum_alpha)
        is_best = config.evaluation.best_by == "return" and state.improves(state.return_average)
        best = {"return_average": state.return_average} if is_best else None
        run.record(state.global_step, state.update, metrics | system_metrics())
        state.metrics_bytes = run.metrics_bytes()
        with run.timed("checkpoint"):
            save_checkpoint(run.checkpoints, learner, state, config.run.keep_checkpoints, collected.samples, best)
        seconds_to_go = (time.perf_counter() - started) / collected.env_steps * (end - state.global_step)
        log.info(update_line(metrics, collected, phase, state.global_step, end, seconds_to_go))
        check_signal(state.updates_without_signal, config.evaluation.max_updates_without_signal)
        run.check_time(ranks)


if __name__ == "__main__":
    sys.exit(main_guard("train_grpo.py", main))
