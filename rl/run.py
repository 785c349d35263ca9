"""The run folder: configuration and provenance, metrics, log (SPEC section 10)."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from configs.config import TrainConfig, to_dict
from configs.field_types import LARGEST_INT
from errors import BadInput, TimeIsUp
from locks import RUN_LOCK, Lock
from rl.disk import write_all
from rl.progress import LogFile, TerminalHandler
from rl.ranks import ALONE, Ranks
from rl.tensorboard_log import TensorBoardLog
from rl.wandb_log import WandbLog
from untrusted.json_file import as_object, brief, is_finite_number, required
from untrusted.plain_file import read_text

log = logging.getLogger("train")
LARGEST_METRIC = 1e100  # in a record; far beyond all that is measured, and what can be drawn
LOG_FILE = "train.log"
NOISY_LOGGERS = (
    "bitsandbytes", "httpx", "huggingface_hub", "imageio_ffmpeg", "matplotlib", "numba", "OpenGL", "robosuite",
    "tensorboard", "urllib3", "wandb",
)  # fmt: skip


class Run:
    """A run folder that is open for writing. Only rank 0 writes; on the others records go nowhere."""

    def __init__(
        self, folder: Path, config: TrainConfig, wandb_log: WandbLog, is_main: bool = True, lock: Lock | None = None
    ):
        self.folder = folder
        self.config = config
        self.wandb = wandb_log
        self._lock = lock
        self._metrics = (folder / "metrics.jsonl").open("ab", buffering=0) if is_main else None
        wanted = config.run.tensorboard and is_main
        self._tensorboard = TensorBoardLog(wanted, folder, read_metrics(folder) if wanted else [])
        self._seconds: dict[str, float] = {}  # spent since the last record
        self._opened = time.monotonic()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def teacher_file(self) -> Path:
        """Where rl.selfcheck keeps an observation and the teacher's answer to it."""
        return self.folder / "teacher_probe.npz"

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to `time/<part>` of the next record."""
        started = time.perf_counter()
        yield
        key = f"time/{part}"
        self._seconds[key] = self._seconds.get(key, 0.0) + time.perf_counter() - started

    def record(self, global_step: int, update: int, metrics: Mapping[str, float]) -> None:
        """Append one JSON object to metrics.jsonl, flushed to the disk, and hand copies to wandb and TensorBoard."""
        numbers = {"global_step": global_step, "update": update, **metrics, **self._seconds}
        row = {key: value if math.isfinite(value) else None for key, value in numbers.items()}  # JSON has no NaN
        self._seconds = {}
        if self._metrics is None:
            return
        write_all(self._metrics.fileno(), (json.dumps(row) + "\n").encode())
        self.wandb.log(row)
        self._tensorboard.log(row)

    def show(self, name: str, video: Path, global_step: int, caption: str) -> None:
        """Hand a video to wandb and TensorBoard."""
        self.wandb.video(name, video, global_step, caption)
        self._tensorboard.video(name, video, global_step)

    def check_time(self, ranks: Ranks = ALONE) -> None:
        """Raise TimeIsUp, on all ranks together, when the run has been open for longer than --max-hours."""
        limit = self.config.run.max_hours
        if limit is not None and ranks.from_main(time.monotonic() - self._opened) >= 3600 * limit:
            raise TimeIsUp(f"--max-hours {limit:g} have passed; the run is saved")

    def metrics_bytes(self) -> int:
        return 0 if self._metrics is None else os.fstat(self._metrics.fileno()).st_size

    def note(self, text: str) -> None:
        """Add to the run's train.log what the terminal gets by another way: why the run ended."""
        if self._metrics is not None:
            with contextlib.suppress(OSError), (self.folder / LOG_FILE).open("a") as file:
                file.write(text + "\n")

    def close(self, exit_code: int = 0) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self.wandb.finish(exit_code)
        self._tensorboard.finish()
        if self._lock is not None:
            self._lock.release()


def start_run(config: TrainConfig, argv: Sequence[str], ranks: Ranks = ALONE) -> Run:
    """Rank 0 creates a new run folder, all open it. Raises BadInput when it cannot be written, or seen by all."""
    folder, lock = _create(config, argv, ranks.size) if ranks.is_main else (None, None)
    return _open(ranks.from_main(folder), config, ranks, None, lock)


def _create(config: TrainConfig, argv: Sequence[str], num_ranks: int) -> tuple[Path, Lock]:
    tasks = "-".join(str(i) for i in config.task.task_ids)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.task.task_suite}-{tasks}-{config.run.name}"
    output = Path(config.run.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        folder = _new_folder(output, stem)
        for part in ("checkpoints", "videos", "report"):
            (folder / part).mkdir()
        write_json(folder / "config.json", {"config": to_dict(config), "ranks": num_ranks, **provenance(argv)})
        lock = Lock(folder / RUN_LOCK, str(folder))
        _log_to(folder / LOG_FILE)
    except OSError as error:
        raise BadInput(
            f"--output {output}: cannot create a run folder there ({error.strerror or error}); name another folder"
        ) from None
    return folder, lock


def reopen_run(
    folder: Path, config: TrainConfig, metrics_bytes: int, wandb_id: str | None, ranks: Ranks = ALONE
) -> Run:
    """Open the folder of a run that goes on; records after the checkpoint (`metrics_bytes`) are played again."""
    lock = _take_over(folder, metrics_bytes) if ranks.is_main else None
    return _open(folder, config, ranks, wandb_id, lock)


def _take_over(folder: Path, metrics_bytes: int) -> Lock:
    try:
        lock = Lock(folder / RUN_LOCK, f"--resume {folder}: the run")
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.truncate(min(metrics_bytes, metrics.tell()))
        _log_to(folder / LOG_FILE)
    except OSError as error:
        raise BadInput(f"--resume {folder}: the run folder cannot be written ({error.strerror})") from None
    return lock


def _open(folder: Path, config: TrainConfig, ranks: Ranks, wandb_id: str | None, lock: Lock | None) -> Run:
    if not folder.is_dir():
        raise BadInput(
            f"rank {ranks.rank} does not see the run folder {folder}: with several machines --output must lie on a "
            "disk that all of them share"
        )
    wandb_mode = config.run.wandb_mode if ranks.is_main else "disabled"
    wandb_log = WandbLog(wandb_mode, config.run.wandb_project, folder.name, folder, to_dict(config), run_id=wandb_id)
    return Run(folder, config, wandb_log, ranks.is_main, lock)


def provenance(argv: Sequence[str]) -> dict[str, Any]:
    """What a later reader needs to repeat the run: command, commit, versions, machine."""
    packages = [package.metadata for package in importlib.metadata.distributions()]  # each is read and parsed here
    return {
        "argv": list(argv),
        "git": _git_state(),
        "versions": {
            "python": platform.python_version(),
            **dict(sorted((known["Name"], known["Version"]) for known in packages)),
        },
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cpus": os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that readers see the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value, indent=2) + "\n")
        with temporary.open() as written:
            os.fsync(written.fileno())  # else a power cut may leave the new name on an empty file
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk its part would be in the way of what comes next
        raise


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl; a last line that a kill cut short is left out. Raises BadInput for other files."""
    path = folder / "metrics.jsonl"
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        rows.append(_checked_record(row, f"{path}: line {number}"))
    return rows


def _checked_record(row: Any, where: str) -> dict[str, Any]:
    """What `Run.record` writes: env step and update, and finite numbers or null by name."""
    fields = as_object(row, where)
    for name in ("global_step", "update"):
        value = required(fields, name, where)
        if type(value) is not int or not 0 <= value <= LARGEST_INT:
            raise BadInput(f"{where}: {name} is {brief(value)}, expected a whole number")
    for name, value in fields.items():
        if value is not None and (not is_finite_number(value) or abs(value) > LARGEST_METRIC):
            raise BadInput(f"{where}: {brief(name)} is {brief(value)}, expected a number or null")
    return fields


def _new_folder(output: Path, stem: str) -> Path:
    """`output/stem`, or with a number behind it when two runs start within one second."""
    for attempt in range(1, 100):
        folder = output / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{output / stem} and 98 more exist")


def log_to_terminal() -> None:
    """Send the log of rank 0 to the terminal, until there is a run folder: loading and checks take a minute or two."""
    if os.environ.get("RANK", "0") == "0":
        _log_to()


def _log_to(*files: Path) -> None:
    logging.basicConfig(
        force=True,
        level=logging.INFO,
        format="%(message)s",
        handlers=[TerminalHandler(), *map(LogFile, files)],
    )
    for noisy in NOISY_LOGGERS:
        logging.getLogger(noisy).setLevel(logging.ERROR)


def _git_state() -> dict[str, Any]:
    """Commit and whether the tree differs from it; empty outside a git checkout."""
    here = Path(__file__).parent
    try:
        commit, changes = (
            subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit.strip(), "modified": bool(changes.strip())}
