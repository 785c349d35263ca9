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

from configs.cli import answer_at_once, main_guard, parse_command

if __name__ == "__main__":
    answer_at_once(
        "train_grpo.py", parse_command
    )  # --help and wrong flags, before the seconds that the imports below take

import torch

from configs.config import TrainConfig
from envs.libero import task_info
from envs.pool import InlinePool, WorkerPool, make_pool
from preflight import check_init_states, choose_teacher, env_spec, load_policy, log_setup
from rl.advantages import decision_advantages
from rl.checkpoints import TrainerState, latest_checkpoint, load_checkpoint, mark_best, save_checkpoint
from rl.dynamic_sampling import collect_informative
from rl.episodes import training_episodes
from rl.evaluation import check_baseline, validate
from rl.metrics import advantage_metrics, rollout_metrics, system_metrics, trajectory_returns, update_line
from rl.objectives import distillation_objective, policy_objective
from rl.phases import Phase, last_step, phase_at
from rl.progress import progress_bar
from rl.report import plot_curves
from rl.rollout import Acting, Randomness, collect
from rl.run import Run, reopen_run, start_run
from rl.trajectory import flatten
from rl.update import optimise
from rl.video import write_video
from vla.policy import Policy

log = logging.getLogger("train")


def main(argv: Sequence[str]) -> None:
    """Set up the policy, the simulator and the run folder, then train."""
    command = parse_command(argv)
    config = command.config
    policy = load_policy(config)
    spec = env_spec(config.task, policy.num_images)
    tasks = task_info(spec)
    check_init_states(config.task, tasks)
    teacher = choose_teacher(config, policy.action_head is not None)
    parameters = [parameter for _, parameter in policy.named_trainable_parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.update.lr, weight_decay=config.update.weight_decay)

    if command.resume is None:
        state, run = TrainerState(), start_run(config, argv)
        state.wandb_id = run.wandb.id
        save_checkpoint(run.checkpoints, policy, optimizer, state, config.run.keep_checkpoints)
    else:
        folder = Path(command.resume)
        state = load_checkpoint(latest_checkpoint(folder), policy, optimizer)
        run = reopen_run(folder, config, state.metrics_bytes, state.wandb_id)
    log_setup(run, policy, spec, tasks, teacher, state)
    try:
        with make_pool(spec, config.task.num_envs) as pool:
            train(config, run, policy, optimizer, pool, state, teacher_mode=teacher[0])
            outcome = evaluate_and_record(config, run, policy, pool, state, teacher_mode=teacher[0])
    except BaseException:
        log.info("stopped; go on with: python train_grpo.py --resume %s", run.folder)
        run.close(exit_code=1)
        raise
    log.info("done: %s", outcome)
    log.info("curves %s, videos %s", plot_curves(run.folder, config), run.folder / "videos")
    run.close()


def train(
    config: TrainConfig,
    run: Run,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    pool: InlinePool | WorkerPool,
    state: TrainerState,
    teacher_mode: str,
) -> None:
    """Warmup, transition and RL, from `state` to the last env step. Saves after every update."""
    end, seed, temperature = last_step(config.phases), config.run.seed, config.policy.temperature
    started, started_at = time.perf_counter(), state.global_step

    while state.global_step < end:
        # 1. The phase decides who acts and which loss is minimised.
        phase = phase_at(state.global_step, config.phases)
        distilling = phase.phase is Phase.WARMUP
        exact_mixture = phase.phase is Phase.TRANSITION and config.phases.importance == "behaviour"

        # 2. Validate teacher and student on held-out initial states.
        if evaluation_is_due(config, state):
            evaluate_and_record(config, run, policy, pool, state, teacher_mode)

        # 3. Roll out whole episodes: the teacher acts, then a mixture, then the student.
        acting = Acting(phase.epsilon, temperature, teacher_mode, "sample", not distilling, exact_mixture)
        episodes = partial(training_episodes, config.task, config.rollout.group_size, seed, state.update)
        with progress_bar(f"update {state.update + 1}: rollout", config.rollout.n_steps) as on_steps:
            randomness = Randomness(seed, "rollout", state.update)
            play = partial(collect, policy, pool, acting=acting, randomness=randomness, on_steps=on_steps)
            if config.rollout.dynamic_sampling and not distilling:
                collected, trajectories = collect_informative(play, episodes, config.rollout)
            else:
                collected = play(episodes(), n_steps=config.rollout.n_steps)
                trajectories = collected.trajectories
        metrics = rollout_metrics(collected, phase, pool.restarts)

        # 4. What to minimise: cross-entropy to the teacher, or the clipped surrogate of the advantages.
        if trajectories:
            batch = flatten(trajectories, policy.action_dim)
            if distilling:
                objective = distillation_objective(policy, batch, config.phases, config.update.micro_batch_size)
            else:
                returns, groups = trajectory_returns(trajectories)
                advantages = decision_advantages(
                    config.loss.advantage, returns, groups, batch.trajectory, batch.steps_to_end, config.loss.discount
                )
                metrics |= advantage_metrics(advantages)
                objective = policy_objective(
                    policy,
                    batch,
                    advantages,
                    config.loss,
                    temperature,
                    config.update.micro_batch_size,
                    behaviour_epsilon=phase.epsilon if exact_mixture else None,
                )

            # 5. Epochs of minibatches over the rollout.
            metrics |= optimise(policy, optimizer, batch, objective, config.update, seed, state.update)

        # 6. Record and save: whatever happens now, at most the rollout under way is lost.
        state.global_step += collected.env_steps
        state.update += 1
        state.absorb_returns([trajectory.success_return for trajectory in collected.trajectories])
        run.record(state.global_step, state.update, metrics | system_metrics())
        state.metrics_bytes = run.metrics_bytes()
        save_checkpoint(run.checkpoints, policy, optimizer, state, config.run.keep_checkpoints)
        if config.evaluation.best_by == "return":
            mark_best(run.checkpoints, state, state.return_average, {"return_average": state.return_average})
        pace = (time.perf_counter() - started) / (state.global_step - started_at)
        log.info(update_line(metrics, collected, phase, state.global_step, end, pace * (end - state.global_step)))


def evaluation_is_due(config: TrainConfig, state: TrainerState) -> bool:
    """At step 0 and whenever env steps pass a multiple of eval_interval."""
    interval = config.evaluation.eval_interval
    return state.evaluated_at is None or state.global_step // interval > state.evaluated_at // interval


def evaluate_and_record(
    config: TrainConfig, run: Run, policy: Policy, pool: InlinePool | WorkerPool, state: TrainerState, teacher_mode: str
) -> str:
    """Validate, record, keep the best checkpoint, write videos; stops the run on a hopeless baseline (BadInput)."""
    validation = validate(policy, pool, config, teacher_mode, state.teacher)
    first = state.evaluated_at is None
    state.evaluated_at, state.teacher_k, state.teacher_n = state.global_step, validation.teacher.k, validation.teacher.n
    run.record(state.global_step, state.update, validation.metrics())
    if config.evaluation.best_by == "evaluation":
        mark_best(run.checkpoints, state, validation.student.interval[0], validation.metrics())
    for actor, frames in validation.frames.items():
        path = run.folder / "videos" / f"{actor}-step_{state.global_step}.mp4"
        write_video(path, frames)
        run.wandb.video(f"video/{actor}", path, state.global_step)
    log.info("step %d  evaluation: %s", state.global_step, validation)
    if first:
        check_baseline(config, validation)
    return str(validation)


if __name__ == "__main__":
    sys.exit(main_guard("train_grpo.py", main))
