"""Several trainings at once, with a small program in place of train_grpo.py: places, stop, continuation, results."""

import json
import os
import signal
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.compare import Args, compare, find_places
from contracts import BadInput

# Plays two updates and a last evaluation. With --stop-parent it asks the parent to stop after the first update, and
# waits for its own end; a resumed run goes on after that. With --fail it ends at once.
STAND_IN = """
import json, os, signal, sys
from pathlib import Path

def write(env_steps, **metrics):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"global_step": env_steps, **metrics}) + "\\n")

def update(env_steps):
    write(env_steps, **{"rollout/success_rate": 0.5, "rollout/trajectories": 50, "rollout/time_s": 1.0})

flags = sys.argv[1:]
if "--fail" in flags:
    sys.exit("nothing works")
if "--resume" in flags:
    run = Path(flags[flags.index("--resume") + 1])
else:
    run = Path(flags[flags.index("--output") + 1], f"run-{os.getpid()}")
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "latest").write_text("step_0")
    machine = {"system": "", "processor": "", "cpus": 1, "gpus": []}
    settings = {"phases": {"total_steps": 100}}
    description = {"argv": flags, "git": {}, "versions": {}, "machine": machine, "config": settings}
    (run / "config.json").write_text(json.dumps(description))
    place = {"cores": sorted(os.sched_getaffinity(0)), "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}
    (run / "place.json").write_text(json.dumps(place))
    update(60)
    if "--stop-parent" in flags:
        os.kill(os.getppid(), signal.SIGTERM)
        signal.pause()
update(120)
write(120, **{"eval/student_success": 0.8, "eval/student_success_k": 40, "eval/student_success_n": 50})
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    return [sys.executable, str(path)]


@pytest.fixture(autouse=True)
def _signal_handlers():
    """Restore pytest's handlers, which `compare` replaces."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def runs(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/seed_*/*/config.json"))


def records(run: Path) -> list[int]:
    """Env steps of all records."""
    return [json.loads(line)["global_step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_every_variant_runs_with_every_seed_and_a_second_call_runs_nothing(tmp_path, program, capsys):
    folder = tmp_path / "runs"
    args = Args(
        folder,
        variants=("base=", "cap=--cap 1.5"),
        seeds=(3, 4),
        start="START",
        common="--task-id 0",
        horizon=100,
    )
    compare(args, program)
    assert len(runs(folder)) == 4
    for run in runs(folder):
        variant, seed = run.parts[-3], run.parts[-2].removeprefix("seed_")
        cap = ["--cap", "1.5"] if variant == "cap" else []
        begun_with = json.loads((run / "config.json").read_text())["argv"]
        assert begun_with[:-2] == ["--checkpoint", "START", "--task-id", "0", *cap, "--seed", seed]
    table = (folder / "table.md").read_text()
    assert table.count("40/50") == 4
    compare(args, program)
    assert [records(run) for run in runs(folder)] == [[60, 120, 120]] * 4
    assert capsys.readouterr().out.count("begins") == 4


def test_term_stops_all_runs_and_the_same_command_continues_them(tmp_path, program):
    folder = tmp_path / "runs"
    args = Args(folder, variants=("base=", "slow=--stop-parent"), seeds=(0,), horizon=100)
    with pytest.raises(KeyboardInterrupt):
        compare(args, program)
    (stopped,) = folder.glob("slow/seed_0/*/metrics.jsonl")
    assert records(stopped.parent) == [60]
    compare(args, program)
    assert records(stopped.parent) == [60, 120, 120]
    assert len(runs(folder)) == 2


def test_a_run_that_fails_does_not_stop_the_others_and_is_named(tmp_path, program, capsys):
    args = Args(tmp_path / "runs", variants=("bad=--fail", "base="), seeds=(0, 1), first="base", horizon=100)
    with pytest.raises(BadInput, match="bad, seed 0, bad, seed 1"):
        compare(args, program)
    assert len(runs(args.folder)) == 2
    assert "exit code 1: nothing works" in capsys.readouterr().out


def test_the_packed_results_give_the_same_table_elsewhere(tmp_path, program):
    folder = tmp_path / "runs"
    compare(Args(folder, variants=("base=", "other=--x"), seeds=(0,), horizon=100), program)
    with tarfile.open(folder / "results.tar.gz") as archive:
        archive.extractall(tmp_path / "elsewhere", filter="data")
    copy = tmp_path / "elsewhere" / "runs"
    assert not list(copy.glob("*/*/*/checkpoints"))
    expected = (copy / "table.md").read_text()
    compare(Args(copy, first="base", horizon=100), program)
    assert (copy / "table.md").read_text() == expected == (folder / "table.md").read_text()


def test_other_flags_in_the_same_folder_are_refused_before_anything_starts(tmp_path, program):
    folder = tmp_path / "runs"
    compare(Args(folder, variants=("base=",), seeds=(0,), horizon=100), program)
    with pytest.raises(BadInput, match="--lr 1"):
        compare(Args(folder, variants=("new=", "base=--lr 1"), seeds=(0,), horizon=100), program)
    assert len(runs(folder)) == 1


@pytest.mark.parametrize("variant", ["base", "a/b=--lr 1", "=--lr 1"])
def test_a_variant_needs_a_name_that_can_name_a_folder(tmp_path, program, variant):
    with pytest.raises(BadInput, match="--variants"):
        compare(Args(tmp_path, variants=(variant,)), program)


def test_places_share_no_core_and_take_turns_in_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8, 18)))
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/taskset")
    places = find_places(at_once=3, num_gpus=2)
    assert [place.cores for place in places] == [[8, 9, 10], [11, 12, 13], [14, 15, 16, 17]]
    assert [place.gpu for place in places] == ["4", "6", "4"]
    for at_once, num_gpus in ((11, 1), (0, 1), (2, 4)):
        with pytest.raises(BadInput):
            find_places(at_once, num_gpus)


def test_a_run_sees_only_its_place(tmp_path, program, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    at_once = min(2, len(os.sched_getaffinity(0)))
    compare(Args(tmp_path, ("a=", "b="), seeds=(0,), gpus=2, at_once=at_once, horizon=100), program)
    places = [json.loads((run / "place.json").read_text()) for run in runs(tmp_path)]
    expected = find_places(at_once, num_gpus=2)
    for place in places:
        assert any(place["gpu"] == other.gpu for other in expected)
        assert any(other.cores in ([], place["cores"]) for other in expected)
