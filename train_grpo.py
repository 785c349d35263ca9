#!/usr/bin/env python
"""Improve a vision-language-action policy on LIBERO tasks: imitate a frozen teacher, hand over, then train by PPO.

    python train_grpo.py --task-id 0              # OpenVLA-OFT 7B on libero_spatial task 0, one 24 GB GPU
    python train_grpo.py --preset tiny            # a small policy, which needs no GPU
    python train_grpo.py --resume runs/RUN        # go on after a stop or a crash

`train` is the whole algorithm. An episode's only reward is 1 for success. The formulas are in rl/advantages.py and
rl/losses.py; docs/HOW_IT_WORKS.md has more. The program is named after GRPO, which is PPO with --advantage group.

Teacher and student. The teacher is frozen. It is the policy before any training, which takes its likeliest tokens (or
their medians), or the checkpoint's L1 head, which predicts continuous actions (--teacher). The student is the same
network with trainable adapters. Its tokens are sampled at --temperature, and PPO computes its log-probabilities at the
same temperature. A decision is one pass through the network, which gives a chunk of 8 actions.

Phases. The phase depends only on the number of env steps played, never on the success rate. A run stops after the
warmup if the student succeeds far less often than the teacher.
  warmup      the student learns the teacher's distribution, or its tokens, by cross-entropy (--warmup-target). The
              teacher acts; or, with --warmup-actor student (the default if an L1 head teaches), the student acts and
              learns what the teacher would have chosen. Beside an L1 head there is no warmup: see --l1-student
  transition  the teacher makes each decision with probability epsilon, which falls from 1 to 0 over the transition's
              env steps, otherwise the student makes it; the student learns by PPO
  rl          the student acts and learns by PPO
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from command_line import main_guard
from configs.cli import parse_train
from envs.cache import choose_library_caches


def before_imports(argv: Sequence[str]) -> None:
    """Answer --help and wrong flags before the imports below, which take seconds."""
    parse_train(argv)
    choose_library_caches()


# The program runs in two steps, each with the exit codes of `main_guard`: this one, and `main` at the end of the file.
if __name__ == "__main__":
    exit_code = main_guard("train_grpo.py", before_imports, knows_ranks=True)
    if exit_code != 0:
        sys.exit(exit_code)

from configs.config import TrainConfig
from envs.pool import Pool
from experiment.checkpoints import TrainerState, save_checkpoint
from experiment.evaluation import evaluate_and_record, evaluation_is_due, time_left
from experiment.interrupts import interruptible, until_the_end
from experiment.metrics import (
    advantage_metrics,
    rollout_metrics,
    system_metrics,
    update_line,
    why_nothing_was_learned,
)
from experiment.report import conclude
from experiment.run_folder import Run
from experiment.setup import Setup, open_run, save_first_files, set_up
from experiment.terminal import Activity, log_to_terminal, show_progress
from preflight import check_machine, probe
from rl.advantages import estimate_advantages
from rl.behaviour import behaviour_in
from rl.collect import collect
from rl.critic import predict_then_remember
from rl.episode_player import EpisodePlayer
from rl.launcher import ranks_to_start, run_as_ranks
from rl.phases import PhaseState, phase_at, rollout_steps
from rl.randomness import Randomness
from rl.rollout import Rollout
from rl.training_episodes import TrainingEpisodes, task_probabilities
from rl.trajectory import Trajectory, flatten
from rl.update import Learner, number_of_epochs, update
from rl.update_metrics import stop_without_signal

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> None:
    """Read the flags, start the ranks, set up and check a run, and train."""
    command = parse_train(argv)
    log_to_terminal()
    num_ranks = ranks_to_start() if command.config.run.data_parallel else 0
    if num_ranks > 0:
        sys.exit(run_as_ranks([sys.executable, *sys.argv], num_ranks))  # this process only waits for them
    check_machine(command.config, command.resume)
    with set_up(command.config) as setup:
        probe(setup)
        if command.check_only:
            log.info("all checks passed")
        else:
            train_in_folder(setup, command.resume, argv)


def train_in_folder(setup: Setup, resume: str | None, argv: Sequence[str]) -> None:
    """Train in a new run folder, or in the one to `resume`. However training ends, the folder is closed properly."""
    run, state = open_run(setup, resume, argv)
    with interruptible(), until_the_end(run):
        if resume is None:
            save_first_files(setup, run, state)
        train(setup.config, run, setup.learner, setup.pool, state)
        if setup.learner.ranks.is_main:
            conclude(run.folder)


def train(config: TrainConfig, run: Run, learner: Learner, pool: Pool, state: TrainerState) -> None:
    """Run warmup, transition and RL from `state` to the last env step."""
    while state.global_step < config.phases.total_steps:
        update_index = state.updates_done  # counts from 0

        # 1. The phase decides who acts and which loss is minimised. It depends on the env steps alone.
        phase = phase_at(state.global_step, config.phases)

        # 2. At the start, after the warmup and every --eval-interval env steps: evaluate the student, at the start also
        # the teacher, on held-out initial states. Nothing is learned from these episodes.
        if evaluation_is_due(config, state):
            evaluate_and_record(config, run, learner, pool, state)
            run.stop_when_time_is_up()  # --max-hours

        # 3. Play whole episodes, in a fixed order, until they hold about --n-steps env steps. Those that run then play
        # to their ends: dropping them would favour short successes. `rollout` holds all episodes that count:
        # global_step grows by their env steps. Left out are episodes later in the order, which a free simulator had
        # begun already (rl/episode_order.py), and those that no simulator could play.
        # `trajectories` are the episodes to learn from: the whole rollout, or what --dynamic-sampling keeps of it.
        task_shares = task_probabilities(config, state.task_success)  # None without --curriculum
        episodes = TrainingEpisodes(config, update_index, state.drawn, task_shares)
        behaviour = behaviour_in(phase, config, learner.teacher_mode, state.episode_length)
        randomness = Randomness(config.run.seed, "rollout", update_index)
        player = EpisodePlayer(learner.policy, pool, behaviour, randomness, config.model.max_batch)
        n_steps = rollout_steps(state.global_step, config)
        samples_dynamically = config.rollout.dynamic_sampling and not phase.distils
        bounds = config.rollout.group_success_bounds if samples_dynamically else None
        with show_part("rollout", n_steps // learner.ranks.size, "env steps", learner, state) as part:
            rollout, trajectories = collect(player, episodes, n_steps, bounds, learner.ranks, part.advance)
        metrics = rollout_metrics(rollout, phase, task_shares)

        if trajectories:
            # 4. Make a batch with one row per decision. PPO needs each row's advantage, imitation does not. The critic
            # (--advantage gae) predicts values by what it knows of earlier rollouts; then it remembers this one.
            batch = flatten(trajectories, learner.policy.action_dim)
            values, critic_metrics = predict_then_remember(
                learner.critic, trajectories, config.run.seed, update_index
            )
            metrics |= critic_metrics
            if not phase.distils:
                batch = estimate_advantages(batch, trajectories, values, config.loss)
                metrics |= advantage_metrics(batch.advantages)

            # 5. Epochs of minibatches: distillation_loss in the warmup, ppo_loss afterwards (rl/losses.py). There is no
            # replay buffer, but a warmup in which the student acts learns from all its rollouts so far (rl/lessons.py).
            total = number_of_epochs(config.update, phase) * len(batch)
            with run.timed("update"), show_part("learning", total, "decisions", learner, state) as part:
                metrics |= update(learner, batch, phase, config, update_index, part.advance)
            del batch
        rollout.forget_kept_states()

        # 6. Record and save. A crash later loses at most one rollout and its update. Random generators are not saved,
        # because every draw depends only on (seed, update, episode, decision).
        state.count_update(rollout, steps_taken=int(metrics.get("train/optimizer_steps", 0)))
        record_and_save(config, run, learner, state, metrics)
        show_update(config, run, state, phase, rollout, trajectories, metrics)
        stop_without_signal(state.updates_without_signal)  # many updates had nothing to learn from
        run.stop_when_time_is_up()
    if state.evaluated_at != state.global_step:
        evaluate_and_record(config, run, learner, pool, state)


def show_part(
    part: str, total: int, unit: str, learner: Learner, state: TrainerState
) -> AbstractContextManager[Activity]:
    """Show how far a part of the next update is, of `total` env steps or decisions; only rank 0 shows it."""
    return show_progress(f"update {state.updates_done + 1}, {part}", total, unit, learner.ranks.is_main)


def show_update(
    config: TrainConfig,
    run: Run,
    state: TrainerState,
    phase: PhaseState,
    rollout: Rollout,
    trajectories: Sequence[Trajectory],
    metrics: Mapping[str, float],
) -> None:
    """Log the line of an update, with the time left, and the reason if nothing was learned."""
    update_s = rollout.wall_s + metrics.get("train/time_s", 0.0)
    seconds_left = time_left(config, state, rollout, update_s, run.episode_s)
    log.info(update_line(metrics, rollout, phase, state.global_step, config, seconds_left))
    if state.updates_without_signal > 0:
        log.warning(why_nothing_was_learned(rollout, trajectories, config))


def record_and_save(
    config: TrainConfig, run: Run, learner: Learner, state: TrainerState, metrics: Mapping[str, float]
) -> None:
    """Append an update's metrics to the run's record, then save a checkpoint, which stores the record's length.

    A resumed run cuts the record to that length, so that no update is recorded twice.
    """
    run.log_metrics(state.global_step, state.updates_done, {**metrics, **system_metrics()})
    state.metrics_bytes = run.metrics_bytes()
    with run.timed("checkpoint"):
        save_checkpoint(run.checkpoints, learner, state, config.run.keep_checkpoints)


if __name__ == "__main__":
    sys.exit(main_guard("train_grpo.py", main, knows_ranks=True))
