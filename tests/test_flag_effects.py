"""No flag of train_grpo.py is without effect: each is changed alone, and the run differs where the table says."""

from __future__ import annotations

import shutil
from dataclasses import fields

import pytest

import train_grpo
from configs.cli import Command
from configs.config import SECTIONS
from tests.flag_world import FADING, Case, World, run_in
from tests.small_checkpoint import make_small_checkpoint

RL = "--no-warmup --n-steps 32 --total-steps 32"
WARMUP = "--warmup-only"
TRANSITION = "--warmup-steps 0 --transition-steps 64 --n-steps 64 --total-steps 64"
GAE = f"{RL} --advantage gae"
TASKS = "--no-warmup --n-steps 32 --total-steps 64 --task-ids 0 1 --curriculum"
SIMULATORS = f"{RL} --num-envs 3"
TINY = f"{RL} --max-env-steps 16 --eval-init-states 40 41 --eval-trials 1 --wandb-mode disabled --allow-zero-baseline"
OPTIONAL = {"tensorboard": "tensorboard", "rerun": "rerun", "load_in_4bit": "bitsandbytes"}  # flag -> package


CASES = [
    Case("--preset tiny", "train/epochs", TINY),
    Case("--check-only", "files"),
    # task
    Case("--task-suite libero_goal", "log: task 0          open the middle drawer"),
    Case("--task-ids 3 4", "started", RL),
    Case("--bddl-file own.bddl", "ended: BDDL file not found: own.bddl"),
    Case("--train-init-states 5 6", "started", RL),
    Case("--eval-init-states 40 42", "eval/teacher_success_n", RL),
    Case("--max-env-steps 6", "rollout/episode_length", RL),
    Case("--num-envs 3", "batches", f"{RL} --patience-ms 10000"),
    Case("--assets nowhere", "ended: nowhere is no LIBERO asset folder", RL),
    # policy
    Case("--checkpoint {another}", "train/entropy", RL),
    Case("--unnorm-key bridge_orig", "ended: bridge_orig", RL),
    Case("--device cuda", "ended: no CUDA GPU is visible", RL),
    Case("--dtype bfloat16", "train/entropy", RL),
    Case("--load-in-4bit", "train/entropy", RL),
    Case("--data-parallel", "log: --data-parallel: there is one device (cpu)", RL),
    Case("--lora-rank 4", "train/grad_norm", RL),
    Case("--lora-alpha 64", "train/grad_norm", RL),
    Case("--compile on", "compiled", RL),
    Case("--gradient-checkpointing on", "recomputed", RL),
    Case("--memory-budget 3", "ended: --memory-budget", RL),
    Case("--temperature 3", "train/entropy", RL),
    Case("--teacher l1", "ended: ships no action head"),
    # phases
    Case("--no-warmup", "schedule/phase"),
    Case("--warmup-steps 64", "schedule/phase"),
    Case("--transition-steps 128", "rollout/epsilon"),
    Case("--total-steps 32", "global_step"),
    Case("--warmup-only", "schedule/phase"),
    Case("--distill-target sharpened", "distill/loss", WARMUP),
    Case("--distill-temperature 0.1", "distill/loss", f"{WARMUP} --distill-target sharpened"),
    Case("--distill-student-temperature 3", "distill/loss", WARMUP),
    Case("--importance behaviour", "train/ratio_max", TRANSITION),
    # rollout
    Case("--n-steps 16", "rollout/trajectories", RL),
    Case("--group-size 2", "started", RL),
    Case("--dynamic-sampling", "rollout/trajectories", f"{RL} --group-size 2"),
    Case("--group-success-bounds 0 1", "rollout/trajectories", f"{RL} --group-size 2 --dynamic-sampling"),
    Case("--max-extra-steps 0", "rollout/trajectories", f"{RL} --group-size 2 --dynamic-sampling"),
    Case("--max-batch 1", "batches", SIMULATORS),
    Case("--patience-ms 10000", "batches", SIMULATORS),
    # loss
    Case("--advantage batch", "advantage/min", RL),
    Case("--discount 0.5", "advantage/mean", RL),
    Case("--ratio-level token", "train/ratio_max", RL),
    Case("--clip-high 1e-6", "train/clip_fraction", RL),
    Case("--kl-coef 0.5", "train/teacher_kl", RL),
    Case("--entropy-coef 0.5", "train/grad_norm", RL),
    Case("--aggregation trajectory", "train/policy_loss", RL),
    # critic
    Case("--gae-lambda 0.1", "advantage/mean", GAE),
    Case("--value-lr 0.01", "train/value_loss", GAE),
    Case("--value-coef 5", "train/grad_norm", f"{GAE} --critic-through-backbone"),
    Case("--value-clip 1e-6", "train/value_loss", GAE),
    Case("--value-warmup-steps 64", "weights", GAE),
    Case("--critic-through-backbone", "train/grad_norm", GAE),
    # curriculum
    Case("--curriculum", "curriculum/probability_task_0", TASKS.replace(" --curriculum", "")),
    Case("--curriculum-alpha 0.1", "curriculum/probability_task_0", TASKS),
    Case("--curriculum-temperature 0.01", "curriculum/probability_task_0", TASKS),
    Case("--curriculum-floor 0.9", "curriculum/probability_task_0", TASKS),
    # update
    Case("--n-epochs 1", "train/epochs", RL),
    Case("--batch-size 2", "train/optimizer_steps", RL),
    Case("--micro-batch-size 1", "batches", RL),
    Case("--lr 0.01", "train/lr", RL),
    Case("--warmup-lr 0.01", "train/lr", WARMUP),
    Case("--weight-decay 0.5", "weights", RL),
    Case("--max-grad-norm 1e-3", "train/gradient_spikes", RL),
    Case("--target-kl 1e-9", "train/epochs", RL),
    # evaluation
    Case("--eval-interval 32", "eval/gap"),
    Case("--eval-trials 2", "eval/student_sampled_success_n", RL),
    Case("--no-allow-zero-baseline", "ended: lies on action tokens", RL),
    Case("--stop-if-below-baseline", "schedule/phase", f"--eval-init-states {FADING} {FADING + 1} --eval-interval 32"),
    Case("--max-updates-without-signal 1", "ended: no learning signal", f"{RL} --max-env-steps 2"),
    Case("--best-by return", "best", RL),
    # run
    Case("--name other", "files", RL),
    Case("--output elsewhere", "files", RL),
    Case("--seed 1", "weights", RL),
    Case("--keep-checkpoints 1", "files"),
    Case("--max-hours 1e-9", "ended: --max-hours 1e-09 have passed"),
    Case("--wandb-mode offline", "wandb", RL),
    Case("--wandb-project other", "wandb", f"{RL} --wandb-mode offline"),
    Case("--tensorboard", "files", RL),
    Case("--rerun", "files", RL),
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a training command line; {one} and {another} are checkpoints."""
    folder = tmp_path_factory.mktemp("flags")
    names = {"one": 0, "another": 1}
    checkpoints = {name: make_small_checkpoint(folder / name, num_images=1, seed=seed) for name, seed in names.items()}
    world = World(folder)
    base = "--preset smoke --checkpoint {one} --eval-interval 1000"
    return lambda flags: world.run(train_grpo, f"{base} {flags}".format(**checkpoints).split())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.flag)
def test_a_changed_flag_makes_the_difference_of_the_table(case, run):
    if case.flag in OPTIONAL:
        pytest.importorskip(OPTIONAL[case.flag], reason=f"an optional package that {case.changed} needs is missing")
    before, after = run(case.given), run(f"{case.given} {case.changed}")
    assert before.part(case.seen) != after.part(case.seen)
    if case.flag != "preset":  # which stands for many
        changed = {name for name, value in after.part("config").items() if before.part("config")[name] != value}
        assert changed == {case.flag}


@pytest.mark.parametrize("given", [RL, WARMUP, TASKS])
def test_without_a_changed_flag_there_is_no_difference(given, run):
    before, after = run(given), run(f" {given} --seed 0")
    names = {name for row in before.rows for name in row if "/" in name}
    metrics = {name for name in names if not any(part in name for part in ("time", "per_s", "system/"))}
    for part in metrics | {case.seen for case in CASES}:
        assert before.part(part) == after.part(part), part


def test_resume_goes_on_in_the_folder_of_the_run(run, tmp_path):
    before = run(RL)
    (folder,) = before.home.glob("runs/*")
    copied = shutil.copytree(folder, tmp_path / "copied", symlinks=True)
    after = run_in(tmp_path, train_grpo, ["--resume", str(copied), "--total-steps", "64"])
    assert before.part("train/epochs") == [None, 2, None]  # evaluation, update, evaluation
    assert after.part("train/epochs") == [None, 2, 2, None]
    assert after.part("global_step")[:2] == before.part("global_step")[:2]


def test_every_flag_has_its_case():
    flags = {field.name for section in SECTIONS.values() for field in fields(section)}
    flags |= {field.name for field in fields(Command)} - {"config"}
    assert {case.flag for case in CASES} | {"resume"} == flags
