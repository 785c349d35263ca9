"""A run's folder: configuration and provenance, metrics.jsonl, log, lock; and how a run stops and ends."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import logging
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import torch

from configs.config import TrainConfig, to_dict
from contracts import BadInput, TimeIsUp, first_line, write_json
from rl.ranks import ALONE, Ranks
from rl.wandb_log import WandbLog

log = logging.getLogger("train")

LOCK_FILE, LOG_FILE = ".lock", "train.log"
NOISY_LOGGERS = (
    "filelock", "httpx", "huggingface_hub", "imageio_ffmpeg", "matplotlib", "numba", "OpenGL", "robosuite", "urllib3",
    "wandb",
)  # fmt: skip
GIB = 2**30
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DISK_FAILS = {errno.EROFS, errno.EIO, errno.ESTALE}
REFUSED = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM}  # elsewhere than in the run folder: perhaps a bug
LESS_MEMORY = "lower --micro-batch-size or --max-batch, set --gradient-checkpointing on, or raise --memory-budget"


class Run:
    """A run folder that is open for writing. Only rank 0 writes; on the others records go nowhere."""

    def __init__(self, folder: Path, config: TrainConfig, wandb_log: WandbLog, is_main: bool = True, lock: Any = None):
        self.folder, self.config, self.wandb = folder, config, wandb_log
        self._lock = lock
        self._metrics = (folder / "metrics.jsonl").open("ab", buffering=0) if is_main else None
        self._seconds: dict[str, float] = {}  # spent since the last record
        self._opened = time.monotonic()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def teacher_file(self) -> Path:
        """Where rl.evaluation keeps an observation and the teacher's answer to it."""
        return self.folder / "teacher_probe.npz"

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to `time/<part>` of the next record."""
        started = time.perf_counter()
        yield
        key = f"time/{part}"
        self._seconds[key] = self._seconds.get(key, 0.0) + time.perf_counter() - started

    def record(self, global_step: int, update: int, metrics: Mapping[str, float]) -> None:
        """Append one JSON object to metrics.jsonl, flushed to the disk, and hand a copy to wandb."""
        numbers = {"global_step": global_step, "update": update, **metrics, **self._seconds}
        row = {key: value if math.isfinite(value) else None for key, value in numbers.items()}  # JSON has no NaN
        self._seconds = {}
        if self._metrics is None:
            return
        write_all(self._metrics.fileno(), (json.dumps(row) + "\n").encode())
        self.wandb.log(row)

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
        if self._lock is not None:
            self._lock.release()


def start_run(config: TrainConfig, argv: Sequence[str], ranks: Ranks = ALONE) -> Run:
    """Rank 0 creates a new run folder, all open it. Raises BadInput when it cannot be written, or seen by all."""
    folder, lock = _create(config, argv, ranks.size) if ranks.is_main else (None, None)
    return _open(ranks.from_main(folder), config, ranks, None, lock)


def reopen_run(
    folder: Path, config: TrainConfig, metrics_bytes: int, wandb_id: str | None, ranks: Ranks = ALONE
) -> Run:
    """Open the folder of a run that goes on; records after the checkpoint (`metrics_bytes`) are played again."""
    lock = None
    if ranks.is_main:
        lock = only_writer(folder / LOCK_FILE, f"--resume {folder}: the run")
        try:
            with (folder / "metrics.jsonl").open("a") as metrics:
                metrics.truncate(min(metrics_bytes, metrics.tell()))
            _log_to(folder / LOG_FILE)
        except OSError as error:
            raise BadInput(f"--resume {folder}: the run folder cannot be written ({error.strerror})") from None
    return _open(folder, config, ranks, wandb_id, lock)


def _create(config: TrainConfig, argv: Sequence[str], num_ranks: int) -> tuple[Path, filelock.BaseFileLock]:
    tasks = "-".join(str(i) for i in config.task.task_ids)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.task.task_suite}-{tasks}-{config.run.name}"
    output = Path(config.run.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        folder = _new_folder(output, stem)
        for part in ("checkpoints", "videos", "report"):
            (folder / part).mkdir()
        write_json(folder / "config.json", {"config": to_dict(config), "ranks": num_ranks, **provenance(argv)})
        _log_to(folder / LOG_FILE)
    except OSError as error:
        raise BadInput(
            f"--output {output}: cannot create a run folder there ({error.strerror or error}); name another folder"
        ) from None
    return folder, only_writer(folder / LOCK_FILE, str(folder))


def _new_folder(output: Path, stem: str) -> Path:
    """`output/stem`, or with a number behind it when two runs start within one second."""
    for attempt in range(1, 100):
        folder = output / (stem if attempt == 1 else f"{stem}-{attempt}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise FileExistsError(f"{output / stem} and 98 more exist")


def _open(folder: Path, config: TrainConfig, ranks: Ranks, wandb_id: str | None, lock: Any) -> Run:
    if not folder.is_dir():
        raise BadInput(
            f"rank {ranks.rank} does not see the run folder {folder}: with several machines --output must lie on a "
            "disk that all of them share"
        )
    wandb_mode = config.run.wandb_mode if ranks.is_main else "disabled"
    wandb_log = WandbLog(wandb_mode, config.run.wandb_project, folder.name, folder, to_dict(config), run_id=wandb_id)
    return Run(folder, config, wandb_log, ranks.is_main, lock)


def only_writer(path: Path, what: str) -> filelock.BaseFileLock:
    """Lock the file `path` until it is released or the process ends, however that ends.

    Raises BadInput when another program holds it, and `what` is being written.
    """
    lock = filelock.FileLock(path)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise BadInput(f"{what} is being written by another program: wait for its end, or stop it") from None
    except OSError as error:
        raise BadInput(f"{what}: cannot be written ({error.strerror or error})") from None
    return lock


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


def _git_state() -> dict[str, Any]:
    """Commit and whether the tree differs from it; empty outside a git checkout."""

    def git(*command: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(
            ["git", *command], cwd=here, capture_output=True, text=True, check=True, timeout=10
        ).stdout

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD").strip(), "modified": bool(changes.strip())}
    except (OSError, subprocess.SubprocessError):
        return {}


# the log


class TerminalHandler(logging.StreamHandler):
    """Writes to whatever sys.stdout is now: while a bar is shown that is rich's, which puts lines above the bar."""

    stream = property(lambda self: sys.stdout, lambda self, _: None)  # type: ignore[assignment]


def log_to_terminal() -> None:
    """Send the log of rank 0 to the terminal, until there is a run folder: loading and checks take a minute or two."""
    if os.environ.get("RANK", "0") == "0":
        _log_to()


def _log_to(*files: Path) -> None:
    handlers: list[logging.Handler] = [TerminalHandler(), *map(logging.FileHandler, files)]
    logging.basicConfig(force=True, level=logging.INFO, format="%(message)s", handlers=handlers)
    logging.raiseExceptions = False  # a terminal that has gone or a full disk costs the line, and no traceback
    for noisy in NOISY_LOGGERS:
        logging.getLogger(noisy).setLevel(logging.ERROR)


# the end


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within this block the first SIGINT or SIGTERM raises KeyboardInterrupt, a second one kills the program."""

    def stop(number: int, frame: object) -> None:
        for again in before:
            signal.signal(again, signal.SIG_DFL)
        raise KeyboardInterrupt

    heeded = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def until_the_end(run: Run, ranks: Ranks) -> Iterator[None]:
    """Everything that happens in a run's folder happens in this block. Raises BadInput for what the user can repair."""
    try:
        yield
        run.folder.stat()  # deleted in the last minutes, when what is written may fail?
    except BaseException as reason:
        if os.path.exists(run.checkpoints / "latest"):
            log.warning("stopped; go on with: %s train_grpo.py --resume %s", ranks.launcher, run.folder)
        problem = disk_problem(reason, run.folder) if isinstance(reason, OSError) else None
        if isinstance(reason, torch.OutOfMemoryError):
            problem = f"out of GPU memory ({first_line(reason)}): {LESS_MEMORY}"
        if isinstance(reason, BadInput | TimeIsUp | SystemExit | KeyboardInterrupt):  # SystemExit: another rank is gone
            run.note(str(reason) or "interrupted")
        else:
            run.note(problem or "".join(traceback.format_exception(reason)).rstrip())
        run.close(exit_code=0 if isinstance(reason, TimeIsUp) else 1)
        if problem is not None:
            raise BadInput(problem) from reason
        raise
    run.close()


def disk_problem(error: OSError, run_folder: Path) -> str | None:
    """What the user can do about an error while a run writes, in one line; None when no disk is to blame."""
    path = Path(error.filename) if isinstance(error.filename, str) else run_folder
    is_ours = path.is_relative_to(run_folder)
    if error.errno not in NO_ROOM | DISK_FAILS | (REFUSED if is_ours else set()):
        return None
    if is_ours and not os.path.isdir(run_folder):
        return (
            f"the run folder {run_folder} is gone: it was moved or deleted while the run was writing to it, so the run "
            "stopped; --resume goes on from where it lies now"
        )
    is_saved = os.path.exists(run_folder / "checkpoints" / "latest")
    then = "the newest checkpoint is whole, --resume goes on from it" if is_saved else "nothing was saved yet"
    reason = error.strerror or os.strerror(error.errno)
    if error.errno in NO_ROOM:
        free = shutil.disk_usage(run_folder).free / GIB
        return f"no room for {path} ({reason}; {free:.2f} GiB are free): make room, lower --keep-checkpoints; {then}"
    return f"{path} cannot be written ({reason}): see to its disk and permissions; {then}"


def write_all(descriptor: int, data: bytes) -> None:
    """Write `data` and flush it to the disk; what fails raises OSError now, and nothing waits in a buffer."""
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)
