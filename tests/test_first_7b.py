"""What a volunteer's script measures and the page that it writes, with made-up files and a made-up nvidia-smi."""

import getpass
import json
import os
import platform
import subprocess
from pathlib import Path

import pytest

from benchmarks.first_7b import facts_of_machine, measure, watched_gpu
from benchmarks.first_7b_report import ROW_HEADS, STEPS, table, write_page
from configs.presets import PRESETS, PUBLIC_CHECKPOINTS
from configs.stored import to_dict
from contracts import BadInput, read_json
from envs.tasks import TaskInfo
from experiment.results import Results, make_plan, save_results
from tests.stored_runs import evaluation, store, store_outcomes, update

PROJECT = Path(__file__).resolve().parents[1]
MIB_OF_4090 = 24564


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A 4090 whose used MiB are written by `gpu(used)`, for a made-up nvidia-smi."""
    folder = tmp_path / "bin"
    folder.mkdir()
    values = folder / "values"
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$3" = --id=1 ] || exit 9\n. {values}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")

    def set_used(used: int) -> None:
        values.write_text(
            f"""case $1 in
            *=memory.used) echo {used};;
            *=memory.total,memory.used) echo {MIB_OF_4090}, {used};;
            *) echo NVIDIA GeForce RTX 4090, 570.1, {MIB_OF_4090}, 450.00;;
            esac
            """
        )

    set_used(300)
    return set_used


def test_the_peak_is_the_most_memory_of_the_visible_gpu(gpu):
    with watched_gpu() as memory:
        for used in (9000, 23000, 5000):
            gpu(used)
            memory.sample()
    assert (memory.total, memory.at_start, memory.peak) == (MIB_OF_4090, 300, 23000)


def test_a_command_keeps_its_exit_code_its_lines_and_its_earlier_part(gpu, tmp_path):
    file = tmp_path / "run.json"
    assert measure(file, ["sh", "-c", "echo one; echo two; exit 3"]) == 3
    first = read_json(file)
    assert first["printed"] == ["one", "two"]
    assert first["gpu"] == {"total": MIB_OF_4090, "at_start": 300, "peak": 300}
    file.write_text(json.dumps({**first, "seconds": 1000, "gpu": {**first["gpu"], "peak": 20000}}))
    assert measure(file, ["true"]) == 0
    assert read_json(file)["seconds"] >= 1000
    assert read_json(file)["gpu"]["peak"] == 20000


def test_without_a_gpu_there_is_no_peak(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "no such GPU")
    assert measure(tmp_path / "run.json", ["true"]) == 0
    assert read_json(tmp_path / "run.json")["gpu"] is None


def test_the_facts_of_a_machine_name_neither_user_nor_host(gpu):
    facts = facts_of_machine()
    assert facts["gpu"]["name"] == "NVIDIA GeForce RTX 4090"
    assert facts["gpu"]["memory.total"] == str(MIB_OF_4090)
    values = json.dumps(facts).split('"')
    for private in (platform.node(), getpass.getuser(), str(Path.home())):
        assert private not in values


# The page.

SETTINGS = {
    "checkpoint": "/home/alice/models/my7b",
    "weights": "89abcdef",
    "mode": "greedy",
    "temperature": None,
    "seed": 0,
    "assets": "official (0123abcd)",
    "bddl_sha256": None,
    "device": "cuda",
    "frozen_weights": "bf16",
}
# How every episode was played, which the page does not show.
PLAYED = {
    "seed": 0,
    "mode": "greedy",
    "env_steps": 80,
    "decisions": 10,
    "seconds": 2.0,
    "error": None,
    "video": None,
}
TASKS = {"libero_spatial": [TaskInfo(0, "task_0", "do it", 220, 50)]}
MACHINE = {
    "system": "Debian",
    "processor": "Some CPU",
    "cpus": 16,
    "main_gib": 62.5,
    "versions": {"python": "3.11", "torch": "2.15"},
    "cuda": "13.0",
    "git": {"commit": "0123abcd", "modified": False},
    "gpu": {"name": "NVIDIA GeForce RTX 4090", "driver_version": "570.1"},
    "gpu_gib": [23.64],
}
MEASURED = {
    "seconds": 3600,
    "gpu": {"total": MIB_OF_4090, "at_start": 512, "peak": 20480},
    "printed": ["act 1: 19 ms", "loaded /home/alice/models/my7b"],
}


def save_evaluation(path: Path, outcomes: str, training: dict | None = None) -> None:
    """A results file with one episode an initial state: 1 for a success, 0 for a failure."""
    plan = make_plan(TASKS, len(outcomes), 0, {"training": training})
    episodes = {
        key: {**key._asdict(), **PLAYED, "success": outcome == "1"}
        for key, outcome in zip(plan.keys, outcomes, strict=True)
    }
    save_results(Results(path, SETTINGS, episodes), plan)


def training_on(train_init_states) -> dict:
    config = to_dict(PRESETS["tiny"])
    config["task"]["train_init_states"] = train_init_states
    return {"env_steps": 12345, "hours": 1.5, "gpu_hours": 1.5, "config": config}


@pytest.fixture
def folder(tmp_path) -> Path:
    """What scripts/first_7b.sh leaves behind when all has gone well."""
    folder = tmp_path / "first_7b"
    folder.mkdir()
    for step in STEPS:
        (folder / f"{step}.log").write_text("all well\n")
    (folder / "check.log").write_text("ok  a\nwarning  looks  1.0 s  see /home/alice/assets\n")
    (folder / "machine.json").write_text(json.dumps(MACHINE))
    for step in ("speed", "memory", "run"):
        (folder / f"{step}.json").write_text(json.dumps(MEASURED))
    save_evaluation(folder / "start.json", "0000110000")
    save_evaluation(folder / "end.json", "1111111100", training_on("fresh"))
    rates = {"rollout/env_steps_per_s": 80.0, "train/epochs": 2, "train/zero_advantage_fraction": 0.5}
    rows = [
        evaluation(0, teacher=9, greedy=8, sampled=4),
        update(100, 0, **rates),
        update(200, 2, **rates, **{"system/gpu_mem_gb": 17.5}),
        evaluation(200, teacher=9, greedy=12, sampled=10),
    ]
    run = store(folder / "runs" / "R", rows)
    store_outcomes(run, 0, teacher=[True], student=[False], student_sampled=[False])
    store_outcomes(run, 200, student=[True], student_sampled=[False])
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest").write_text("step_200")
    return folder


def cells(page: str) -> dict[str, str]:
    """The row of the page's first table, by the heads of its columns."""
    heads, _, row = page.split("\n\n")[1].splitlines()
    return dict(zip(heads[2:-2].split(" | "), row[2:-2].split(" | "), strict=True))


def test_the_row_has_start_and_end_on_the_same_states(folder):
    row = cells(write_page(folder))
    assert row["policy"] == "my7b"
    assert row["greedy before"].startswith("2/10 = 20 %")
    assert row["greedy after"].startswith("8/10 = 80 %")
    # Six won and none lost: two-sided, 2 / 2 ** 6.
    assert row["on the same states"].startswith("+60 points")
    assert row["on the same states"].endswith("p = 0.031")
    assert row["env steps"] == "12,345"
    assert row["hours, GPU-hours"] == "1.50, 1.50"
    assert row["hardware"] == "NVIDIA GeForce RTX 4090"


def test_the_page_has_what_was_measured(folder):
    page = write_page(folder)
    for fact in (
        "6 won and 0 lost",
        "act 1: 19 ms",
        "peak of the whole GPU 20.00 of 23.99 GiB, of which 0.50 were in use before",
        "gpu_gib: [23.64]",
        "peak of tensors 17.5 GiB",
        # (80 env steps/s x 3 s) / 8 decisions, half of them twice, in 2 s
        "80 env steps/s of rollouts, 15.0 samples/s of updates, 2 epochs",
        "| 200 | 9/20 | 12/20 | 10/20 |",
        "trained on 0 of these states",
    ):
        assert fact in page


def test_states_that_were_trained_on_are_told_apart(folder):
    save_evaluation(folder / "end.json", "1111111100", training_on([0, 6]))
    page = write_page(folder)
    assert "trained on 6 of these states. On the others: 0/4 = 0 % [0, 49] before, 2/4 = 50 %" in page


def test_no_path_and_no_user_is_on_the_page(folder):
    config = read_json(folder / "runs/R/config.json")
    config["argv"] = ["--checkpoint", "/home/alice/models/my7b", "--output", "~/alice", "--lr=/alice"]
    (folder / "runs/R/config.json").write_text(json.dumps(config))
    (folder / "memory.log").rename(folder / "memory.unfinished")
    (folder / "memory.unfinished").write_text("fault: '/home/alice/x' | (/alice)\n\n")
    page = write_page(folder)
    assert "alice" not in page
    assert "not finished: fault: 'PATH' / (PATH)" in page
    assert "12/20" in page  # a slash alone is no path


@pytest.mark.parametrize("num_done", range(len(STEPS)))
def test_whatever_is_there_becomes_a_page(folder, num_done):
    """A step that failed is on the page with its last line, and those after it as not reached."""
    missing = list(STEPS)[num_done:]
    for step in missing:
        (folder / f"{step}.log").unlink()
        (folder / f"{step}.json").unlink(missing_ok=True)
    if "run" in missing:
        (folder / "runs/R/checkpoints/latest").unlink()
    (folder / f"{missing[0]}.unfinished").write_text("begun\nout of memory\n")
    page = write_page(folder)
    assert page.count("out of memory") == 1
    assert page.count("not reached") == len(missing) - 1
    assert (cells(page)["greedy after"] == "-") == ("end" in missing)


def test_the_page_has_the_form_of_the_community_results():
    head = table([ROW_HEADS])
    assert head in (PROJECT / "docs" / "COMMUNITY_RESULTS.md").read_text()


def test_the_default_checkpoint_is_the_one_with_published_results(folder):
    checkpoint = PUBLIC_CHECKPOINTS["libero_spatial"]
    results = read_json(folder / "start.json")
    results["settings"]["checkpoint"] = checkpoint
    (folder / "start.json").write_text(json.dumps(results))
    page = write_page(folder)
    assert cells(page)["policy"] == checkpoint
    assert "what others report" in page


def test_only_a_folder_becomes_a_page(tmp_path):
    from benchmarks.first_7b_report import main

    with pytest.raises(BadInput):
        main([str(tmp_path / "missing")])


@pytest.mark.skipif(not (PROJECT / ".venv").exists(), reason="the script runs in .venv")
def test_the_script_plays_nothing_again_when_every_step_is_done(folder):
    environment = {**os.environ, "FIRST_7B": str(folder)}
    checkpoint = str(PROJECT / "checkpoints" / "tiny-libero-spatial")
    script = [str(PROJECT / "scripts" / "first_7b.sh"), checkpoint, "--max-hours", "1"]
    finished = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    assert finished.stdout.count("done before") == len(STEPS)
    assert (folder / "result.md").read_text() == write_page(folder)
