"""The folder of a run: create, lock and write it, and read it back: its settings, its metrics, how far it has come."""

import contextlib
import itertools
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from filelock import FileLock
from typing_extensions import NotRequired

from command_line import PROGRAM_STARTED
from configs.config import TrainConfig, config_from_json
from contracts import (
    BadInput,
    TimeIsUp,
    output_place,
    read_bytes,
    read_fields,
    write_json,
)
from envs.assets import find_pack
from experiment.file_lock import lock_file
from experiment.provenance import Provenance, provenance, simulator_packages
from experiment.terminal import log_to_file
from experiment.wandb_log import WandbLog
from rl.ranks import ALONE, Ranks

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "train.log"
LOCK_FILE = ".lock"
FRAMES_PER_SECOND = 20  # of videos; LIBERO's control rate, so a video plays in real time

GREEDY = "eval/greedy_success"  # every evaluation has it
WALL_TIME = ("rollout/time_s", "time/update", "time/eval", "time/checkpoint")

MetricsRow: TypeAlias = dict[str, float]  # global_step, update and metrics


class RunDescription(Provenance):
    """The contents of config.json: the provenance, and what decides the result of the run."""

    config: dict[str, dict[str, object]]  # settings by section: see configs.config.config_from_json
    looks: str  # name and digest of the assets
    simulator: str  # its packages with their versions
    hub_commit: NotRequired[str | None]  # of the checkpoint, if it came from the hub
    resume_argv: NotRequired[list[list[str]]]  # the command lines that resumed the run; missing if none did


def evaluation_path(folder: Path, env_steps: int) -> Path:
    """The results file of the evaluation of a run after so many env steps."""
    return folder / "evaluations" / f"step_{env_steps}.json"


def video_folder(folder: Path, env_steps: int) -> Path:
    """Where the videos of an evaluation in a run are."""
    return folder / "videos" / f"step_{env_steps}"


class Run:
    """A run folder that is open for writing. Only rank 0 writes; on other ranks `log_metrics` writes nothing."""

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        ranks: Ranks = ALONE,
        wandb_id: str | None = None,
        lock: FileLock | None = None,
    ):
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.config = config
        self.ranks = ranks
        self.episode_s = 0.0  # seconds for an episode of the last evaluation
        self._lock = lock
        wandb_mode = config.run.wandb_mode if ranks.is_main else "disabled"
        self.wandb = WandbLog(wandb_mode, folder.name, folder, asdict(config), wandb_id)
        self._metrics_file = (folder / METRICS_FILE).open("ab", buffering=0) if ranks.is_main else None
        self._seconds: dict[str, float] = defaultdict(float)  # seconds since the last record, by metric

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Measure this block and add its seconds to the metric `time/<part>` of the next record."""
        started = time.perf_counter()
        yield
        self._seconds[f"time/{part}"] += time.perf_counter() - started

    def log_metrics(self, global_step: int, update_index: int, metrics: Mapping[str, float]) -> None:
        """Append a record to metrics.jsonl, flush it to the disk, and send a copy to wandb. Raises OSError."""
        values = {"global_step": global_step, "update": update_index, **metrics, **self._seconds}
        self._seconds.clear()
        if self._metrics_file is None:
            return
        # JSON has no NaN and no infinity, so they become null.
        row = {key: value if math.isfinite(value) else None for key, value in values.items()}
        write_and_flush(self._metrics_file.fileno(), (json.dumps(row) + "\n").encode())
        self.wandb.log(row)

    def stop_when_time_is_up(self) -> None:
        """Raise TimeIsUp, on all ranks together, if the program has run for --max-hours or longer."""
        limit = self.config.run.max_hours
        if limit is None:
            return
        seconds = self.ranks.from_main(time.perf_counter() - PROGRAM_STARTED)
        if seconds >= 3600 * limit:
            raise TimeIsUp(f"--max-hours {limit:g} have passed; the run is saved")

    def metrics_bytes(self) -> int:
        """Length of metrics.jsonl in bytes; 0 on ranks that do not write it."""
        return 0 if self._metrics_file is None else os.fstat(self._metrics_file.fileno()).st_size

    def close(self, exit_code: int = 0) -> None:
        """Close metrics.jsonl, finish the wandb run with `exit_code` (0: success) and release the lock."""
        if self._metrics_file is not None:
            self._metrics_file.close()
        self.wandb.finish(exit_code)
        if self._lock is not None:
            self._lock.release()


def write_and_flush(descriptor: int, data: bytes) -> None:
    """Write `data` and flush it to the disk. Nothing stays in a buffer, so a failure raises OSError here."""
    while data:
        written = os.write(descriptor, data)
        data = data[written:]
    os.fsync(descriptor)


def start_run(
    config: TrainConfig, argv: Sequence[str], ranks: Ranks = ALONE, hub_commit: str | None = None
) -> Run:
    """Create a run folder on rank 0 and open it on all ranks. hub_commit: of the checkpoint, see `vla.hub`.

    Raises BadInput when the folder cannot be written.
    """
    if not ranks.is_main:
        folder = ranks.from_main(None)
        return Run(folder, config, ranks)
    with output_place(Path(config.run.output), "--output"):
        folder = _create_folder(config)
        description: RunDescription = {
            "config": asdict(config),
            "looks": str(find_pack(config.simulator.assets)),
            "simulator": simulator_packages(),
            "hub_commit": hub_commit,
            **provenance(argv),
        }
        write_json(folder / CONFIG_FILE, description)
        log_to_file(folder / LOG_FILE)
    lock = lock_file(folder / LOCK_FILE, str(folder))
    ranks.from_main(folder)
    return Run(folder, config, ranks, lock=lock)


def _create_folder(config: TrainConfig) -> Path:
    """Create a folder in --output, named after time, suite, tasks and --name. Raises OSError."""
    output = Path(config.run.output)
    output.mkdir(parents=True, exist_ok=True)
    task_ids = config.task.task_ids
    tasks = "-".join(map(str, task_ids)) if len(task_ids) <= 10 else f"{len(task_ids)}_tasks"
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.task.task_suite}-{tasks}-{config.run.name}"
    for attempt in itertools.count(1):  # two runs may start within one second
        folder = output / (stem if attempt == 1 else f"{stem}-{attempt}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    for name in ("checkpoints", "evaluations", "videos", "report"):
        (folder / name).mkdir()
    return folder


def reopen_run(
    folder: Path,
    config: TrainConfig,
    argv: Sequence[str],
    metrics_bytes: int,
    wandb_id: str | None,
    ranks: Ranks = ALONE,
) -> Run:
    """Open the folder of a run that is resumed.

    `metrics_bytes`: length of metrics.jsonl at the checkpoint; later records are cut off. Raises BadInput if another
    program is writing the run, or if assets or simulator differ from those of the run (equal assets may have moved).
    """
    if not ranks.is_main:
        return Run(folder, config, ranks)
    lock = lock_file(folder / LOCK_FILE, f"--resume {folder}: the run")
    description = read_description(folder)
    now = {"looks": str(find_pack(config.simulator.assets)), "simulator": simulator_packages()}
    for part, value in now.items():
        if description.get(part) != value:
            raise BadInput(
                f"--resume {folder}: {part} of the run: {description.get(part)}; now: {value}: give the run its own "
                "(--assets, or the versions of its packages), or start a new run"
            )
    with output_place(folder, "--resume"):
        # A setting that is changed on resume stays changed.
        description["config"] = asdict(config)
        description["resume_argv"] = [*description.get("resume_argv", []), list(argv)]
        write_json(folder / CONFIG_FILE, description)
        log_to_file(folder / LOG_FILE)
        metrics_file = folder / METRICS_FILE
        os.truncate(metrics_file, min(metrics_bytes, len(read_bytes(metrics_file))))
    return Run(folder, config, ranks, wandb_id, lock)


@dataclass(frozen=True)
class StoredRun:
    """The contents of a run folder, finished or not."""

    folder: Path
    config: TrainConfig
    rows: Sequence[MetricsRow]  # of metrics.jsonl
    description: RunDescription

    @property
    def evaluated_steps(self) -> list[int]:
        """The env steps of its evaluations, oldest first."""
        return [int(row["global_step"]) for row in self.rows if GREEDY in row]

    @property
    def is_finished(self) -> bool:
        """Whether the run has had its last evaluation."""
        return self.evaluated_steps[-1:] >= [self.config.phases.total_steps]

    def status(self) -> str:
        """How far the run has come, in one line."""
        state = "Finished" if self.is_finished else "Not finished"
        env_steps = self.rows[-1]["global_step"] if self.rows else 0
        planned = "" if self.is_finished else f" of {self.config.phases.total_steps:,}"
        updates = sum("schedule/phase" in row for row in self.rows)
        hours = sum(row.get(key, 0.0) for row in self.rows for key in WALL_TIME) / 3600
        return f"{state}: {env_steps:,}{planned} env steps, {updates} updates, {hours:.1f} h"


def read_run(folder: Path) -> StoredRun:
    """Read a run folder. Raises BadInput if it is not one, is damaged, or has settings of another version."""
    try:
        description = read_description(folder)
        config = config_from_json(description["config"])
        rows = read_metrics(folder / METRICS_FILE)
    except BadInput as problem:
        raise BadInput(f"{folder} is not a run folder of this version: {problem}") from None
    return StoredRun(folder.resolve(), config, rows, description)


def read_description(folder: Path) -> RunDescription:
    """Read the config.json of a run folder. Raises BadInput."""
    return read_fields(folder / CONFIG_FILE, RunDescription)


def read_metrics(path: Path) -> list[MetricsRow]:
    """Read the records of a metrics.jsonl. Raises BadInput if there is none, or if a record is damaged.

    Values that were not finite (null in the file) are left out, and so is a last line that a kill has cut.
    """
    *lines, _ = read_bytes(path).split(b"\n")  # a whole last line ends with a newline, too
    try:
        # As one list, because then equal names share their memory: a long run is read at every evaluation.
        records = json.loads(b"[" + b",".join(lines) + b"]")
        return [{key: value for key, value in record.items() if value is not None} for record in records]
    except (ValueError, AttributeError) as error:
        raise BadInput(f"{path} is damaged: {error}") from None
