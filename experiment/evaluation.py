"""When a run is evaluated, who plays, and what is written then."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

from configs.config import TrainConfig
from envs.pool import Pool
from experiment.checkpoints import BEST, TrainerState, save_state, write_pointer
from experiment.episodes import EpisodeKey, EpisodeResult, Rule, group_by_rule, rates_by_rule
from experiment.evaluator import Conditions, evaluate
from experiment.hopeless_runs import check_baseline, check_imitation, warmup_has_ended
from experiment.report import update_report
from experiment.results import Results, settings_of, write_results
from experiment.run_folder import Run
from experiment.statistics import Rates, Successes, rates_by_task
from experiment.stored_run import evaluation_path, video_folder
from rl.phases import end_of_warmup
from rl.rollout import Rollout
from rl.update import Learner

log = logging.getLogger(__name__)


def evaluation_steps(config: TrainConfig) -> list[int]:
    """The env steps from which an evaluation is due: 0, multiples of --eval-interval, and the end.

    So is the warmup's end, if the student is judged there.
    """
    total_steps = config.phases.total_steps
    # A rollout has at least n_steps env steps, so a shorter interval is reached after every rollout, too.
    interval = max(config.evaluation.eval_interval, config.rollout.n_steps)
    multiples = range(0, total_steps, interval)
    steps = {*multiples, total_steps}
    if config.phases.warmup_success_ratio > 0:
        steps.add(min(end_of_warmup(config.phases), total_steps))
    return sorted(steps)


def evaluation_is_due(config: TrainConfig, state: TrainerState) -> bool:
    """Whether env steps have passed one of `evaluation_steps` since the last evaluation."""
    evaluated_at = state.evaluated_at
    if evaluated_at is None:
        return True
    return any(evaluated_at < step <= state.global_step for step in evaluation_steps(config))


def time_left(
    config: TrainConfig, state: TrainerState, rollout: Rollout, update_s: float, episode_s: float
) -> float:
    """Seconds to the end of the run.

    `update_s`: of the last update and its rollout. `episode_s`: of an episode of the last evaluation; 0 before there
    was one, which leaves evaluations out.
    """
    steps_left = max(0, config.phases.total_steps - state.global_step)
    updates_left = math.ceil(steps_left / rollout.env_steps)  # the last rollout is as long as the others
    evaluated_at = -1 if state.evaluated_at is None else state.evaluated_at
    evaluations_left = sum(step > evaluated_at for step in evaluation_steps(config))
    first_state, end_state = config.task.eval_init_states
    starts = len(config.task.task_ids) * (end_state - first_state)
    episodes = starts * (1 + config.evaluation.eval_trials)
    return updates_left * update_s + evaluations_left * episodes * episode_s


def evaluate_and_record(
    config: TrainConfig, run: Run, learner: Learner, pool: Pool, state: TrainerState
) -> None:
    """Evaluate the newest checkpoint, record the result, check it, and mark the checkpoint if it is the best.

    Raises BadInput when the first evaluation, or the one after the warmup, shows that the run cannot learn.
    """
    started = time.perf_counter()
    with run.timed("eval"):
        episodes = play_evaluation(config, learner, pool, state, video_folder(run.folder, state.global_step))
    run.episode_s = (time.perf_counter() - started) / len(episodes)
    rates = count_by_rule(episodes, state)
    metrics = metrics_of(rates, episodes)
    run.log_metrics(state.global_step, state.updates_done, metrics)
    log.info("evaluation after %s env steps: %s", f"{state.global_step:,}", describe(rates, metrics))
    if run.ranks.is_main:
        write_evaluation(config, run, learner, state.global_step, episodes)
        update_report(run.folder)
    if state.evaluated_at is None:
        check_baseline(config, rates)
    if warmup_has_ended(config, state):
        check_imitation(config.phases, rates)
    remember(run, learner, state, rates)


def play_evaluation(
    config: TrainConfig, learner: Learner, pool: Pool, state: TrainerState, videos: Path
) -> list[EpisodeResult]:
    """Play the held-out initial states by every rule; the first episode of each is filmed.

    The student plays greedily and sampled; in the first evaluation also by the medians of its distributions (around an
    L1 head they are the likeliest tokens), and the teacher, which never changes, plays, too. A student that still
    equals its greedy teacher is played for both.
    """
    once = held_out(config, repeats=1)
    plays = {
        Rule("greedy"): once,
        Rule("sample", config.rollout.temperature): held_out(config, config.evaluation.eval_trials),
    }
    if state.evaluated_at is None and not learner.policy.is_laplace:
        plays[Rule("median")] = once
    must_play_teacher = state.teacher is None
    equals_teacher = learner.teacher_mode == "greedy" and learner.policy.equals_teacher()
    if must_play_teacher and not equals_teacher:
        plays[Rule(learner.teacher_mode, actor="teacher")] = once
    conditions = Conditions(config.run.seed, config.model.max_batch, "first", videos)
    episodes = []
    for rule, keys in plays.items():
        episodes += evaluate(learner.policy, pool, keys, rule, conditions, learner.ranks)
    if must_play_teacher and equals_teacher:
        episodes += [replace(result, actor="teacher") for result in episodes if result.mode == "greedy"]
    return episodes


def held_out(config: TrainConfig, repeats: int) -> list[EpisodeKey]:
    """Every held-out initial state of every task, `repeats` times."""
    task = config.task
    starts = product(range(repeats), task.task_ids, range(*task.eval_init_states))
    return [EpisodeKey(task.task_suite, task_id, False, state, repeat) for repeat, task_id, state in starts]


def count_by_rule(episodes: Sequence[EpisodeResult], state: TrainerState) -> Rates:
    """The successes of everyone who played, and of the teacher also where it played in an earlier evaluation."""
    rates: dict[str, Successes] = {}
    if state.teacher is not None:
        rates["teacher"] = Successes(*state.teacher)
    return rates | rates_by_rule(episodes)


def metrics_of(rates: Rates, episodes: Sequence[EpisodeResult]) -> dict[str, float]:
    """Success rates, also by task, and the entropy of the sampled student, under their names in metrics.jsonl."""
    metrics = {f"eval/{name}_success": successes.rate for name, successes in rates.items()}
    for name, played in group_by_rule(episodes).items():
        outcomes = [(result.task_id, result.success) for result in played]
        metrics |= rates_by_task(f"eval/{name}_success", outcomes)
    entropies = [result.entropy for result in episodes if result.entropy is not None]
    if entropies:
        metrics["eval/entropy"] = mean(entropies)
    return metrics


def describe(rates: Rates, metrics: Mapping[str, float]) -> str:
    """The result of an evaluation in one line."""
    parts = [f"{name} {successes}" for name, successes in rates.items()]
    if "eval/entropy" in metrics:
        parts.append(f"entropy {metrics['eval/entropy']:.2f} nats a token")
    return ", ".join(parts)


def write_evaluation(
    config: TrainConfig, run: Run, learner: Learner, global_step: int, episodes: list[EpisodeResult]
) -> None:
    """Write the file of the episodes. Raises OSError."""
    model = replace(config.model, checkpoint=str(run.checkpoints / f"step_{global_step}"))
    settings = settings_of(model, config.simulator, learner.policy, config.run.seed)
    write_results(evaluation_path(run.folder, global_step), Results(settings, {}, episodes))


def remember(run: Run, learner: Learner, state: TrainerState, rates: Rates) -> None:
    """Mark the newest checkpoint if it is the best, and let it remember the evaluation.

    A resumed run then neither repeats the evaluation nor cuts its record.
    """
    state.evaluated_at = state.global_step
    state.teacher = (rates["teacher"].k, rates["teacher"].n)
    is_best = state.best_rate is None or rates["greedy"].rate > state.best_rate
    if is_best:
        state.best_rate = rates["greedy"].rate
    state.metrics_bytes = run.metrics_bytes()
    if learner.ranks.is_main:
        checkpoint = run.checkpoints / f"step_{state.global_step}"
        if is_best:
            write_pointer(run.checkpoints / BEST, checkpoint)
        save_state(checkpoint, learner, state)
