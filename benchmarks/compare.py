r"""Train variants with the same seeds from one start, several at once, and compare them in one table.

    python -m benchmarks.compare FOLDER --start CHECKPOINT --seeds 0 1 2 3 --gpus 2 --at-once 8 \
        --common="--preset tiny --task-id 0 --num-envs 3 --total-steps 100000 --wandb-mode disabled" \
        --variants base="" cap="--max-env-steps 150"
    python -m benchmarks.compare FOLDER --first base

The first command runs train_grpo.py for each variant and seed, in FOLDER/VARIANT/seed_S; runs of one seed begin
together. Ctrl-C or TERM stops it. The same command then continues the unfinished runs from their last checkpoints and
skips the finished ones. The second command writes the table alone, also of metrics.jsonl files from elsewhere
(FOLDER/VARIANT/seed_S.jsonl). benchmarks/paired_runs.py says what is in FOLDER/table.md and table.json. The first
command also packs them, with the small files of all runs, into FOLDER/results.tar.gz.

Runs are comparable in env steps only with equal --num-envs, and in minutes only if the machine is equally busy.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import tyro

from benchmarks.paired_runs import newest_run, write_table
from command_line import main_guard, parse_flags
from contracts import BadInput
from experiment.run_files import CONFIG_FILE, LOG_FILE, METRICS_FILE, read_description, read_metrics
from experiment.stored_run import GREEDY

PROGRAM = (sys.executable, str(Path(__file__).parents[1] / "train_grpo.py"))
OUTPUT_FILE = "output.txt"  # what a run prints
PACKED = (METRICS_FILE, CONFIG_FILE, LOG_FILE, "evaluations")
POLL_S = 0.2
GRACE_S = 30  # that a run has to end after TERM


@dataclass(frozen=True)
class Args:
    """Train variants with the same seeds from one start, several at once, and compare them in one table."""

    folder: tyro.conf.Positional[Path]
    """Folder of the runs and of the table."""
    variants: tuple[str, ...] = ()
    """NAME=FLAGS of each variant: the flags of train_grpo.py that set it apart, if any. The others are compared with
    the first. Without --variants the table alone is written."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """--seed of the runs of each variant."""
    start: str | None = None
    """--checkpoint of all runs (None: what --common leads to)."""
    common: str = ""
    """Flags of all runs, as one string, with an equals sign before it (--common="--preset tiny --task-id 0")."""
    gpus: int = 0
    """GPUs that the runs are divided over (0: every run sees all)."""
    at_once: int = 1
    """Runs at once. With the program taskset each gets CPU cores of its own."""
    horizon: int = 100_000
    """Env steps until which area and minutes are measured."""
    first: str | None = None
    """Variant that the others are compared with (None: the first of --variants, else of the alphabet)."""


@dataclass(frozen=True)
class Job:
    """One training."""

    name: str
    flags: list[str]  # of train_grpo.py, without --output
    folder: Path  # --output

    def command(self) -> list[str]:
        """The flags that begin this training, or continue it from its last checkpoint."""
        run = newest_run(self.folder)
        if run is not None and (run / "checkpoints" / "latest").is_file():
            return ["--resume", str(run)]
        return [*self.flags, "--output", str(self.folder)]

    def is_finished(self) -> bool:
        """Whether the last evaluation is recorded. Raises BadInput if the training was begun with other flags."""
        run = newest_run(self.folder)
        if run is None:
            return False
        description = read_description(run)
        first_flags = description["argv"][:-2]  # without --output
        if first_flags != self.flags:
            raise BadInput(
                f"{run} was begun with {shlex.join(first_flags)}, now {shlex.join(self.flags)}: name another folder"
            )
        metrics = run / METRICS_FILE
        rows = read_metrics(metrics) if metrics.is_file() else []
        total_steps = description["config"]["phases"]["total_steps"]
        return bool(rows) and GREEDY in rows[-1] and rows[-1]["global_step"] >= total_steps


@dataclass(frozen=True)
class Place:
    """The part of the machine that one run at a time uses."""

    cores: list[int]  # empty: all
    gpu: str | None  # None: all


@dataclass(frozen=True)
class Training:
    """A job that is running."""

    job: Job
    place: Place
    process: subprocess.Popen

    def describe_end(self) -> str:
        """Exit code and last line of the output."""
        lines = (self.job.folder / OUTPUT_FILE).read_text(errors="replace").split("\n")
        last_line = next((line for line in reversed(lines) if line.strip()), "")
        return f"{self.job.name}: exit code {self.process.returncode}: {last_line}"


def main(argv: Sequence[str]) -> None:
    compare(parse_flags(Args, argv, prog="python -m benchmarks.compare"), PROGRAM)


def compare(args: Args, program: Sequence[str]) -> None:
    """Run what is to be run, and write the table. `program`: the command line of train_grpo.py without flags.

    Raises KeyboardInterrupt after a signal, and BadInput for wrong flags or if a run ended before its last env step.
    """
    jobs = plan_jobs(args)
    stop = Event()
    if jobs:
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_number, lambda *_: stop.set())
        run_jobs(jobs, find_places(args.at_once, args.gpus), program, stop)
    first = args.first or (args.variants[0].partition("=")[0] if jobs else None)
    print(write_table(args.folder, first, args.horizon), flush=True)
    if jobs:
        pack_results(args.folder)
    if stop.is_set():
        raise KeyboardInterrupt
    unfinished = [job.name for job in jobs if not job.is_finished()]
    if unfinished:
        raise BadInput(
            f"not finished: {', '.join(unfinished)}: see the ends of {args.folder}/*/seed_*/{OUTPUT_FILE}; the same "
            "command continues them"
        )


def plan_jobs(args: Args) -> list[Job]:
    """All trainings, seed by seed, so that a stop leaves whole pairs. Raises BadInput."""
    common = shlex.split(args.common)
    if args.start is not None:
        common = ["--checkpoint", args.start, *common]
    jobs = []
    for seed in args.seeds:
        for variant in args.variants:
            name, equals, flags = variant.partition("=")
            if not equals or not re.fullmatch(r"[\w.-]+", name):
                raise BadInput(
                    f'--variants {variant}: write NAME="FLAGS", the name with letters, digits, ., _ and -'
                )
            folder = args.folder / name / f"seed_{seed}"
            flags_of_job = [*common, *shlex.split(flags), "--seed", str(seed)]
            jobs.append(Job(f"{name}, seed {seed}", flags_of_job, folder))
    return jobs


def find_places(at_once: int, num_gpus: int) -> list[Place]:
    """Divide this process's CPU cores and GPUs into places for `at_once` runs. Raises BadInput if there are too few."""
    has_taskset = shutil.which("taskset") is not None
    cores = sorted(os.sched_getaffinity(0)) if has_taskset else []
    if at_once < 1 or (has_taskset and len(cores) < at_once):
        raise BadInput(f"--at-once {at_once}: from 1 to {len(cores)}, the number of usable CPU cores")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(index) for index in range(num_gpus)] if visible is None else visible.split(",")[:num_gpus]
    if len(gpus) < num_gpus:
        raise BadInput(f"--gpus {num_gpus}: CUDA_VISIBLE_DEVICES={visible} shows only {len(gpus)}")
    places = []
    for i in range(at_once):
        share = cores[i * len(cores) // at_once : (i + 1) * len(cores) // at_once]
        places.append(Place(share, gpus[i % num_gpus] if gpus else None))
    return places


def run_jobs(jobs: Sequence[Job], places: Sequence[Place], program: Sequence[str], stop: Event) -> None:
    """Run the jobs that are not finished, one in each place, until all have ended or `stop` is set.

    Raises BadInput before anything starts.
    """
    waiting = [job for job in jobs if not job.is_finished()]
    print(f"{len(waiting)} of {len(jobs)} runs are to do, {len(places)} at once", flush=True)
    free = list(places)
    running: list[Training] = []
    try:
        while (waiting or running) and not stop.is_set():
            while waiting and free:
                running.append(start(waiting.pop(0), free.pop(0), program))
            stop.wait(POLL_S)
            for training in [training for training in running if training.process.poll() is not None]:
                running.remove(training)
                free.append(training.place)
                print(training.describe_end(), flush=True)
    finally:
        end_all(running)


def start(job: Job, place: Place, program: Sequence[str]) -> Training:
    job.folder.mkdir(parents=True, exist_ok=True)
    command = [*program, *job.command()]
    if place.cores:
        command = ["taskset", "-c", ",".join(map(str, place.cores)), *command]
    environment = {**os.environ} if place.gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": place.gpu}
    with (job.folder / OUTPUT_FILE).open("a") as output:
        # A session of its own, because a terminal and `timeout` signal the whole group, and a second signal kills.
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    print(f"{job.name}: begins ({shlex.join(command)})", flush=True)
    return Training(job, place, process)


def end_all(running: Sequence[Training]) -> None:
    """Send TERM to all, wait until they have ended, and kill those that have not after GRACE_S."""
    for training in running:
        training.process.terminate()
    deadline = time.monotonic() + GRACE_S
    for training in running:
        try:
            training.process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(training.process.pid, signal.SIGKILL)  # its simulators, too
            training.process.wait()
        print(training.describe_end(), flush=True)


def pack_results(folder: Path) -> None:
    """Pack the table and each run's metrics, settings, log and evaluations into results.tar.gz."""
    with tarfile.open(folder / "results.tar.gz", "w:gz") as archive:
        for path in [*folder.glob("table.*"), *folder.glob(f"*/seed_*/{OUTPUT_FILE}")]:
            archive.add(path, arcname=path.relative_to(folder.parent))
        for seed_folder in folder.glob("*/seed_*"):
            run = newest_run(seed_folder)
            for path in [] if run is None else [run / name for name in PACKED if (run / name).exists()]:
                archive.add(path, arcname=path.relative_to(folder.parent))


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.compare", main))
