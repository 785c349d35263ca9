"""Readers of run folders, results and training states."""

import json
from contextlib import suppress
from pathlib import Path

from configs.cli import parse_command
from configs.config import TrainConfig
from rl.checkpoints import TrainerState, latest_checkpoint, load_checkpoint, save_checkpoint
from rl.comparison import write_comparison
from rl.eval_plan import Task, make_plan
from rl.learner import make_learner
from rl.report import before_and_after, summary, tables, write_report
from rl.results import PlayedEpisode, Results, Settings, check_comparable, document, read_results, save_results
from rl.run import read_metrics
from rl.selfcheck import SelfCheckError, check_teacher, remember_teacher
from rl.stored_run import changed_settings, read_run
from tests.fuzzing.model_readers import ADAPTER_COPIES, INSTRUCTION, SUITE, Read, small_policy
from tests.stored_runs import ROWS, store, store_episodes
from vla.probes import synthetic_observations


def trainer_state(folder: Path) -> Read:
    policy = small_policy(folder.with_name(f"{folder.name}_base"))
    learner = make_learner(policy, TrainConfig())
    policy.chunk_logits(synthetic_observations(policy, 1)).logsumexp(-1).sum().backward()
    learner.optimizer.step()
    run = folder.with_name(f"{folder.name}_run")
    run.mkdir()
    state = TrainerState(512, 3, 1234, 0, 7, 10, 0.25, return_average=0.5, task_success={0: 0.5}, wandb_id="abc")
    save_checkpoint(run, learner, state, keep=1).rename(folder)
    for name in ADAPTER_COPIES:
        (folder / name).unlink()  # they are not read again

    def read(folder: Path) -> None:
        learner.optimizer.state.clear()
        state = load_checkpoint(folder, learner)
        learner.optimizer.step()
        state.improves(0.5)
        assert min(state.global_step, state.update, state.metrics_bytes) >= 0

    return read


def run_to_resume(folder: Path) -> Read:
    store(folder, ROWS)
    (folder / "checkpoints" / "step_300").mkdir(parents=True)
    (folder / "checkpoints" / "latest").symlink_to("step_300")

    def read(folder: Path) -> None:
        parse_command(["--resume", str(folder)])
        latest_checkpoint(folder)
        read_metrics(folder)

    return read


def stored_run(folder: Path) -> Read:
    _store_whole(folder)

    def read(folder: Path) -> None:
        run = read_run(folder)
        changed_settings(run)
        if run.evaluations:
            before_and_after(run)
            summary(run)
            tables(run)

    return read


def report(folder: Path) -> Read:
    _store_whole(folder)

    def read(folder: Path) -> None:
        run = read_run(folder)
        write_report(run)
        if run.evaluations:
            write_comparison([run, run], folder / "comparison.html")

    return read


def _store_whole(folder: Path) -> None:
    store(folder, ROWS)
    for step, successes in ((0, [True, False, False]), (200, [True, True, False]), (300, [True, True, True])):
        store_episodes(folder, step, student=successes, student_sampled=successes, teacher=successes)


def results(folder: Path) -> Read:
    folder.mkdir()
    settings = Settings("checkpoint", "0" * 64, "sample", 1.0, 0, "bundled", None, "cpu", "float32")
    plan = make_plan([Task(SUITE, 0, "name", INSTRUCTION, 220, 50)], 4, 0, {"protocol": None, "argv": []})
    episodes = [PlayedEpisode(*key, 0, "sample", i % 2 == 0, 50, 7, 1.5, None, None) for i, key in enumerate(plan.keys)]
    save_results(Results(folder / "results.json", settings, episodes), plan)

    def read(folder: Path) -> None:
        before = read_results(folder / "results.json", "--compare-with")
        check_comparable(before, settings, plan)
        json.dumps(document(Results(folder / "now.json", settings, episodes), plan, before)).encode()
        json.dumps(document(before, plan, None)).encode()

    return read


def teacher_probe(folder: Path) -> Read:
    policy = small_policy(folder.with_name(f"{folder.name}_base"))
    folder.mkdir()
    remember_teacher(folder / "teacher_probe.npz", policy, synthetic_observations(policy, 1)[0], "greedy")

    def read(folder: Path) -> None:
        with suppress(SelfCheckError):  # what the file says is not the teacher's answer: that is what it is for
            check_teacher(folder / "teacher_probe.npz", policy, "greedy")

    return read
