"""The folder of a run: create, lock and write it."""

import contextlib
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock

from command_line import PROGRAM_STARTED
from configs.config import TrainConfig
from contracts import TimeIsUp, flush, lock_file, output_place, write_json
from envs.assets import find_pack
from experiment.provenance import provenance, simulator_packages
from experiment.stored_run import CONFIG_FILE, LOCK_FILE, LOG_FILE, METRICS_FILE, RunDescription
from experiment.terminal import log_to_file
from experiment.wandb_log import WandbLog
from rl.ranks import ALONE, Ranks


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
        self._metrics = folder / METRICS_FILE
        if ranks.is_main:
            self._metrics.touch()
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
        if not self.ranks.is_main:
            return
        # JSON has no NaN and no infinity, so they become null.
        row = {key: value if math.isfinite(value) else None for key, value in values.items()}
        with self._metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        flush(self._metrics)
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
        return self._metrics.stat().st_size if self.ranks.is_main else 0

    def close(self, exit_code: int = 0) -> None:
        """Finish the wandb run with `exit_code` (0: success) and release the lock."""
        self.wandb.finish(exit_code)
        if self._lock is not None:
            self._lock.release()


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
