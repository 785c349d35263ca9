"""Kill programs 20 times and let them go on: nothing stays behind, and results are those of a run that nothing stops.

    python -m benchmarks.kills                            # on a CPU: 20 kills, then half an hour of a run under kills
    python -m benchmarks.kills --minutes 0 --programs sft merge
    python -m benchmarks.kills --programs --minutes 5     # the run alone

The kills are those of KILLS, each before a certain call of a function, in the real program with the bundled policy and
the real simulator. Going on means --resume of a run, and the same command again of every other program. Then a run
plays and learns for --minutes, while its simulators are killed and stopped: its main memory, open files and threads
must not grow after the second quarter. Prints a line for each; the exit code is 1 if any is wrong.
"""

import importlib
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from benchmarks.background import repeated_beside
from benchmarks.watch import Sample, Watch
from configs.presets import TINY_CHECKPOINT
from contracts import read_json

PROJECT = Path(__file__).resolve().parents[1]
# Environment variable by which a program's processes are found; its value is the folder.
MARK = "VLA_GRPO_KILLS"
DIE = "die"  # first argument of this module as the program that is to be killed
END_S = 10.0  # time that the processes of a killed program have to end
SAMPLE_EVERY_S = 0.5
HARM_EVERY_S = 60.0  # longer than an episode, which is given up after its third fault
MAX_MORE_FILES_OR_THREADS = 2  # that a run may have later than at first
MAX_GROWTH = 1.10  # of a run's memory, as a factor
# What differs between two runs of the same computation.
TIMING_FIELDS = ("time/", "rollout/time_s", "rollout/env_steps_per_s", "train/time_s", "system/", "seconds")

Program = Literal["train", "eval", "demos", "sft", "merge"]


@dataclass(frozen=True)
class Args:
    programs: tuple[Program, ...] = ("train", "eval", "demos", "sft", "merge")
    """Programs to kill."""
    minutes: float = 30.0
    """Minutes of the run under kills; 0: none."""
    keep: Path | None = None
    """Folder for all that the programs write (None: a temporary one)."""


@dataclass(frozen=True)
class Kill:
    """A program is killed before the `count`-th call of a function, named as module:attribute."""

    program: Program
    moment: str
    function: str
    count: int = 1
    signal_name: str = "SIGKILL"


KILLS = (
    Kill("train", "first evaluation", "envs.pool:Pool.step", 3),
    Kill("train", "rollout", "envs.pool:Pool.step", 20),
    Kill("train", "rollout, by SIGTERM", "envs.pool:Pool.step", 24, "SIGTERM"),
    Kill("train", "update", "torch.optim:AdamW.step", 3),
    Kill("train", "update, by SIGTERM", "torch.optim:AdamW.step", 3, "SIGTERM"),
    Kill("train", "metrics line", "experiment.run_folder:write_and_flush", 3),
    Kill("train", "checkpoint", "torch:save", 3),
    Kill("train", "checkpoint's pointer", "experiment.checkpoints:write_pointer", 3),
    Kill("train", "report", "experiment.report:write_report"),
    Kill("eval", "episode", "envs.pool:Pool.step", 5),
    Kill("eval", "results file", "experiment.results:save_results", 3),
    Kill("demos", "first episode", "envs.worker:ProcessWorker.receive"),
    Kill("demos", "third episode", "envs.worker:ProcessWorker.receive", 3),
    Kill("demos", "third episode, by SIGTERM", "envs.worker:ProcessWorker.receive", 3, "SIGTERM"),
    Kill("sft", "step", "torch.optim:AdamW.step", 10),
    Kill("sft", "later step, by SIGTERM", "torch.optim:AdamW.step", 20, "SIGTERM"),
    Kill("sft", "weights", "vla.weights:save_file"),
    Kill("merge", "weights", "vla.weights:save_file"),
    Kill("merge", "comparison", "vla.policy:Policy.load", 2),
    Kill("merge", "comparison, by SIGTERM", "vla.policy:Policy.load", 2, "SIGTERM"),
)


# --------------------------------------------------------------------------------------------- programs that are killed


def command_of(program: Program, folder: Path, inputs: Path) -> list[str]:
    """What follows `python`. A program writes into `folder`; `inputs` holds what others have written undisturbed."""
    task = ["--task-suite", "libero_spatial", "--task-ids", "0", "--num-envs", "2"]
    steps = ["--steps", "24", "--warmup-steps", "0", "--log-every", "8", "--batch-size", "2"]
    if program == "train":
        return ["train_grpo.py", "--preset", "smoke", "--num-envs", "2", "--output", str(folder / "runs")]
    if program == "eval":
        flags = ["--checkpoint", TINY_CHECKPOINT, "--trials", "6", "--max-env-steps", "24"]
        return ["eval.py", *flags, "--out", str(folder / "results.json"), *task]
    if program == "demos":
        return ["-m", "workshop.demos", "--out", str(folder / "demos"), "--episodes", "4", *task]
    if program == "sft":
        flags = ["--demos", str(inputs / "demos" / "demos"), "--init", TINY_CHECKPOINT, "--holdout", "0"]
        return ["-m", "workshop.sft", *flags, "--out", str(folder / "sft"), "--device", "cpu", *steps]
    adapter = only_run(inputs / "train") / "checkpoints" / "latest"
    flags = ["--adapter", str(adapter), "--out", str(folder / "merged"), "--device", "cpu"]
    return ["-m", "vla.merge", *flags]


def start(command: Sequence[str], folder: Path) -> subprocess.Popen:
    """Begin `python COMMAND`. Its output is added to FOLDER.log; its temporary files are in FOLDER/tmp."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, MARK: str(folder), "TMPDIR": str(folder / "tmp")}
    with folder.with_name(f"{folder.name}.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=PROJECT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def run(command: Sequence[str], folder: Path) -> int:
    """The exit code of `python COMMAND`."""
    return start(command, folder).wait()


def run_and_die(kill: Kill, command: Sequence[str]) -> None:
    """Be the program, and send the signal to this process when the moment of `kill` has come."""
    module_name, _, path = kill.function.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for owner_name in owners:
        owner = getattr(owner, owner_name)
    function = getattr(owner, name)
    calls = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == kill.count:
            signal.raise_signal(signal.Signals[kill.signal_name])
        return function(*args, **kwargs)

    setattr(owner, name, dying)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        runpy.run_path(command[0], run_name="__main__")


def problems_after(kill: Kill, folder: Path, inputs: Path) -> list[str]:
    """Kill a program, let it go on, and list what is wrong."""
    command = command_of(kill.program, folder, inputs)
    died = run(["-m", "benchmarks.kills", DIE, json.dumps(vars(kill)), *command], folder)
    expected = -signal.SIGKILL if kill.signal_name == "SIGKILL" else 130
    problems = [] if died == expected else [f"exit code {died} in place of {expected}"]
    survivors = survivors_of(folder)
    if survivors:
        problems.append(f"{len(survivors)} process(es) outlive it")
    if kill.program == "train" and list((folder / "runs").glob("*/checkpoints/latest")):
        command = ["train_grpo.py", "--resume", str(only_run(folder))]
    again = run(command, folder)
    if again != 0:
        return [*problems, f"exit code {again} when it goes on"]
    straight = inputs / kill.program
    if results_of(kill.program, folder) != results_of(kill.program, straight):
        problems.append("other results")
    more = files_of(folder) - files_of(straight)
    fewer = files_of(straight) - files_of(folder)
    if more or fewer:
        problems.append(f"left behind: {sorted(more)[:3]}, missing: {sorted(fewer)[:3]}")
    return problems


def survivors_of(folder: Path) -> list[int]:
    """Processes that still carry the folder's mark after END_S."""
    deadline = time.monotonic() + END_S
    marked = marked_processes(folder)
    while marked and time.monotonic() < deadline:
        time.sleep(0.1)
        marked = marked_processes(folder)
    return marked


def marked_processes(folder: Path) -> list[int]:
    """The processes whose environment has the folder's mark."""
    marked = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={folder}".encode() in environ.read_bytes().split(b"\0"):
                marked.append(int(environ.parent.name))
    return marked


def only_run(folder: Path) -> Path:
    (run_folder,) = (folder / "runs").iterdir()
    return run_folder


def files_of(folder: Path) -> set[str]:
    """Names of all files below a folder, also hidden and temporary ones; a run's own name is left out."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {"/".join(["runs", *name.split("/")[2:]]) if name.startswith("runs/") else name for name in names}


def results_of(program: Program, folder: Path) -> object:
    """What must not depend on a kill, in a form that can be compared."""
    if program == "train":
        rows = map(json.loads, (only_run(folder) / "metrics.jsonl").read_text().splitlines())
        latest = (only_run(folder) / "checkpoints" / "latest").read_text().strip()
        return [without_durations(row) for row in rows], weights(only_run(folder) / "checkpoints" / latest)
    if program == "eval":
        return [without_durations(episode) for episode in read_json(folder / "results.json")["episodes"]]
    if program == "demos":
        return {path.name: arrays(path) for path in sorted((folder / "demos").rglob("*.npz"))}
    return weights(folder / ("sft" if program == "sft" else "merged"))


def without_durations(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not name.startswith(TIMING_FIELDS)}


def weights(folder: Path) -> dict[str, bytes]:
    """The bits of every tensor, by file and name."""
    import torch
    from safetensors.torch import load_file

    return {
        f"{path.name} {name} {tensor.dtype}": tensor.flatten().view(torch.uint8).numpy().tobytes()
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def arrays(path: Path) -> dict[str, bytes]:
    with np.load(path, allow_pickle=False) as stored:
        return {name: stored[name].tobytes() for name in stored.files}


def kill_and_compare(programs: Sequence[Program], work: Path) -> bool:
    """Make the straight runs, then all kills of `programs`. Returns whether everything was right."""
    inputs = work / "straight"
    # Program -> the one whose output it reads.
    needs: dict[Program, Program] = {"sft": "demos", "merge": "train"}
    needed = [needs[program] for program in programs if program in needs]
    for program in dict.fromkeys([*needed, *programs]):
        code = run(command_of(program, inputs / program, inputs), inputs / program)
        if code != 0:
            print(f"{program}: exit code {code} without any kill, see {inputs / program}.log")
            return False
    kills = [kill for kill in KILLS if kill.program in programs]
    right = 0
    for kill_index, kill in enumerate(kills):
        started = time.monotonic()
        problems = problems_after(kill, work / f"kill_{kill_index}", inputs)
        right += not problems
        verdict = "; ".join(problems) or "nothing left behind, the same results"
        print(f"{kill.program:6} {kill.moment:28} {time.monotonic() - started:5.0f} s  {verdict}", flush=True)
    print(f"{right} of {len(kills)} kills are right", flush=True)
    return right == len(kills)


# --------------------------------------------------------------------------------------------------- a run under kills


def soak(minutes: float, folder: Path) -> bool:
    """Train for some minutes while simulators are killed. Returns whether nothing grows and nothing is left."""
    # No optimizer step moves this policy far, so that it goes on to succeed now and then.
    command = [
        *("train_grpo.py", "--preset", "smoke", "--num-envs", "2", "--output", str(folder / "runs")),
        *("--max-hours", str(minutes / 60), "--total-steps", "100000000", "--n-steps", "880", "--no-warmup"),
        *("--max-env-steps", "220", "--eval-interval", "20000", "--lr", "1e-7", "--desired-kl", "None"),
    ]
    process = start(command, folder)
    watch = Watch(
        process.pid,
        lambda: [pid for pid in marked_processes(folder) if pid != process.pid],
        HARM_EVERY_S,
    )
    started = time.monotonic()
    with repeated_beside(watch.sample_and_harm, SAMPLE_EVERY_S):
        process.wait()
    duration = time.monotonic() - started
    survivors = survivors_of(folder)
    rows = [json.loads(line) for line in (only_run(folder) / "metrics.jsonl").read_text().splitlines()]
    replayed = sum(row.get("rollout/errors", 0) for row in rows)
    print(
        f"a run of {duration:.0f} s, {len(rows)} records, {watch.kills} simulators killed, {replayed:.0f} episodes "
        f"played again: exit code {process.returncode}, {len(survivors)} processes left"
    )
    leftovers = [path.name for path in (folder / "tmp").iterdir()]
    if leftovers:
        print(f"temporary files left: {leftovers[:5]}")
    return stays_flat(watch.samples) and process.returncode == 0 and not survivors and not leftovers


def stays_flat(samples: Sequence[Sample]) -> bool:
    """Print and compare what a process takes in the second quarter of its time, and later."""
    quarter = len(samples) // 4  # the first one is the start
    early = samples[quarter : 2 * quarter]
    late = samples[2 * quarter :]
    # Files and threads come and go with every video and checkpoint, so their medians are compared.
    peak = [max(sample.memory_mib for sample in part) for part in (early, late)]
    files = [statistics.median(sample.files for sample in part) for part in (early, late)]
    threads = [statistics.median(sample.threads for sample in part) for part in (early, late)]
    print(
        f"in the second quarter, and later: main memory at most {peak[0]:.0f} and {peak[1]:.0f} MiB, files "
        f"{files[0]:.0f} and {files[1]:.0f}, threads {threads[0]:.0f} and {threads[1]:.0f}"
    )
    more = max(files[1] - files[0], threads[1] - threads[0])
    return peak[1] <= MAX_GROWTH * peak[0] and more <= MAX_MORE_FILES_OR_THREADS


def main(args: Args) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        work = (args.keep or Path(scratch)).absolute()
        work.mkdir(parents=True, exist_ok=args.keep is None)
        is_right = not args.programs or kill_and_compare(args.programs, work)
        if args.minutes > 0:
            is_right = soak(args.minutes, work / "soak") and is_right
    return 0 if is_right else 1


if __name__ == "__main__":
    if sys.argv[1:2] == [DIE]:
        run_and_die(Kill(**json.loads(sys.argv[2])), sys.argv[3:])
    else:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
