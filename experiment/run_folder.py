"""A run's folder: configuration and provenance, metrics.jsonl, wandb, log, lock; and how a run stops and ends."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import itertools
import json
import logging
import math
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import torch

from configs.config import TrainConfig, to_dict
from contracts import BadInput, TimeIsUp, first_line, read_json, write_json
from envs.assets import find_pack
from rl.ranks import ALONE, Ranks

log = logging.getLogger(__name__)

LOG_FILE = "train.log"
DISK_FAILS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES}


class Run:
    """A run folder that is open for writing. Only rank 0 writes; on the others records go nowhere."""

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        ranks: Ranks = ALONE,
        wandb_id: str | None = None,
        lock: Any = None,
    ):
        if not folder.is_dir():
            raise BadInput(
                f"rank {ranks.rank} does not see {folder}: --output must lie on a disk that all ranks share"
            )
        self.folder, self.config, self._lock = folder, config, lock
        self.checkpoints = folder / "checkpoints"
        mode = config.run.wandb_mode if ranks.is_main else "disabled"
        self.wandb = WandbLog(mode, folder.name, folder, to_dict(config), wandb_id)
        self._metrics = (folder / "metrics.jsonl").open("ab", buffering=0) if ranks.is_main else None
        self._seconds: dict[str, float] = defaultdict(float)  # spent since the last record
        self._opened = time.monotonic()

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to `time/<part>` of the next record."""
        started = time.perf_counter()
        yield
        self._seconds[f"time/{part}"] += time.perf_counter() - started

    def record(self, global_step: int, update: int, metrics: Mapping[str, float]) -> None:
        """Append one JSON object to metrics.jsonl, flushed to the disk, and hand a copy to wandb."""
        numbers = {"global_step": global_step, "update": update, **metrics, **self._seconds}
        row = {
            key: value if math.isfinite(value) else None for key, value in numbers.items()
        }  # JSON has no NaN
        self._seconds.clear()
        if self._metrics is not None:
            write_all(self._metrics.fileno(), (json.dumps(row) + "\n").encode())
            self.wandb.log(row)

    def check_time(self, ranks: Ranks = ALONE) -> None:
        """Raise TimeIsUp, on all ranks together, when the run has been open for longer than --max-hours."""
        limit = self.config.run.max_hours
        if limit is not None and ranks.from_main(time.monotonic() - self._opened) >= 3600 * limit:
            raise TimeIsUp(f"--max-hours {limit:g} have passed; the run is saved")

    def metrics_bytes(self) -> int:
        return 0 if self._metrics is None else os.fstat(self._metrics.fileno()).st_size

    def close(self, exit_code: int = 0) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self.wandb.finish(exit_code)
        if self._lock is not None:
            self._lock.release()


def start_run(config: TrainConfig, argv: Sequence[str], ranks: Ranks = ALONE) -> Run:
    """Rank 0 creates a new run folder, all open it. Raises BadInput when it cannot be written, or seen by all."""
    if not ranks.is_main:
        return Run(ranks.from_main(None), config, ranks)
    output, tasks = Path(config.run.output), "-".join(map(str, config.task.task_ids))
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.task.task_suite}-{tasks}-{config.run.name}"
    try:
        output.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):  # two runs may start within one second
            folder = output / (stem if number == 1 else f"{stem}-{number}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                break
        for part in ("checkpoints", "videos", "report"):
            (folder / part).mkdir()
        looks = str(find_pack(config.simulator.assets))
        settings = {"config": to_dict(config), "looks": looks, "ranks": ranks.size}
        write_json(folder / "config.json", settings | provenance(argv))
        log_to_terminal(folder / LOG_FILE)
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(
            f"--output {output}: cannot create a run folder there ({reason}); name another folder"
        ) from None
    lock = only_writer(folder / ".lock", str(folder))
    return Run(ranks.from_main(folder), config, ranks, lock=lock)


def reopen_run(
    folder: Path, config: TrainConfig, metrics_bytes: int, wandb_id: str | None, ranks: Ranks = ALONE
) -> Run:
    """Open the folder of a run that goes on; records after the checkpoint (`metrics_bytes`) are played again.

    Raises BadInput when another program writes it, and for other looks than the run has seen, wherever they lie.
    """
    if not ranks.is_main:
        return Run(folder, config, ranks)
    lock = only_writer(folder / ".lock", f"--resume {folder}: the run")
    looks, stored = str(find_pack(config.simulator.assets)), read_json(folder / "config.json")
    if (seen := stored.get("looks")) != looks:
        raise BadInput(
            f"--resume {folder}: the run has seen assets {seen}, not {looks}: name those with --assets"
        )
    write_json(folder / "config.json", stored | {"config": to_dict(config)})  # what is changed now stays so
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.truncate(min(metrics_bytes, metrics.tell()))
    log_to_terminal(folder / LOG_FILE)
    return Run(folder, config, ranks, wandb_id, lock)


def only_writer(path: Path, what: str) -> filelock.BaseFileLock:
    """Lock the file `path` until released or the process ends. Raises BadInput when another program writes `what`."""
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
    git = [
        "git",
        "describe",
        "--always",
        "--abbrev=40",
        "--exclude=*",
        "--dirty",
    ]  # a commit, with -dirty if changed
    try:
        here = Path(__file__).parent
        commit = subprocess.run(
            git, cwd=here, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    packages = [
        package.metadata for package in importlib.metadata.distributions()
    ]  # each is read and parsed here
    versions = dict(sorted((known["Name"], known["Version"]) for known in packages))
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    gib = [torch.cuda.get_device_properties(i).total_memory / 2**30 for i in range(len(gpus))]
    cpu = {"system": platform.platform(), "processor": platform.machine(), "cpus": os.cpu_count()}
    return {
        "argv": list(argv),
        "git": {"commit": commit.removesuffix("-dirty"), "modified": commit.endswith("-dirty")}
        if commit
        else {},
        "versions": {"python": platform.python_version(), **versions},
        "machine": {**cpu, "gpus": gpus, "gpu_gib": gib},
    }


class TerminalHandler(logging.StreamHandler):
    """Writes to whatever sys.stdout is now: while a bar is shown that is rich's, which puts lines above the bar."""

    stream = property(lambda self: sys.stdout, lambda self, _: None)  # type: ignore[assignment]


def log_to_terminal(*files: Path) -> None:
    """Send the log of rank 0 to the terminal (loading and checks take a minute or two) and to `files`."""
    if os.environ.get("RANK", "0") != "0":
        return
    handlers: list[logging.Handler] = [TerminalHandler(), *map(logging.FileHandler, files)]
    logging.basicConfig(force=True, level=logging.ERROR, format="%(message)s", handlers=handlers)
    logging.raiseExceptions = (
        False  # a terminal that has gone or a full disk costs the line, and no traceback
    )
    for package in ("__main__", "train_grpo", "preflight", "experiment", "rl", "vla"):
        logging.getLogger(package).setLevel(logging.INFO)
    logging.getLogger("envs").setLevel(logging.WARNING)


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
            log.warning("stopped; go on with: python train_grpo.py --resume %s", run.folder)
        problem = disk_problem(reason, run.folder) if isinstance(reason, OSError) else None
        if isinstance(reason, torch.OutOfMemoryError):
            problem = f"out of GPU memory ({first_line(reason)}): lower --micro-batch-size or --max-batch"
        why = problem or "".join(traceback.format_exception(reason)).rstrip()
        if isinstance(
            reason, BadInput | TimeIsUp | SystemExit | KeyboardInterrupt
        ):  # SystemExit: another rank is gone
            why = str(reason) or "interrupted"
        if ranks.is_main:  # the terminal gets it by another way
            with contextlib.suppress(OSError), (run.folder / LOG_FILE).open("a") as file:
                file.write(why + "\n")
        run.close(exit_code=0 if isinstance(reason, TimeIsUp) else 1)
        if problem is not None:
            raise BadInput(problem) from reason
        raise
    run.close()


def disk_problem(error: OSError, run_folder: Path) -> str | None:
    """What the user can do about an error while a run writes, in one line; None when no disk is to blame."""
    if not run_folder.is_dir():
        return (
            f"the run folder {run_folder} is gone, moved or deleted; --resume goes on from where it lies now"
        )
    if error.errno not in DISK_FAILS:  # a missing file is perhaps a bug
        return None
    place = error.filename or run_folder
    return f"{place} cannot be written ({error.strerror}): make room, lower --keep-checkpoints, or see to permissions"


def write_all(descriptor: int, data: bytes) -> None:
    """Write `data` and flush it to the disk; raises OSError now, nothing waits in a buffer."""
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)


class WandbLog:
    """wandb as a copy of metrics.jsonl: it never asks, and what fails there costs one line, never the run."""

    def __init__(self, mode: str, name: str, folder: Path, config: Mapping, run_id: str | None):
        self.id = run_id
        self._run: Any = None
        mode = resolve_mode(mode)
        self._works = mode != "disabled"
        project = os.environ.get("WANDB_PROJECT", "vla-grpo")
        self._do(
            "start",
            lambda: self._start(mode=mode, project=project, name=name, dir=folder, config=dict(config)),
        )

    def _start(self, **options: Any) -> None:
        import wandb

        os.environ.setdefault("HOME", str(Path.home()))  # a container or a service manager may set none
        # Seconds; what is not sent by then stays in the folder.
        settings = wandb.Settings(silent=True, console="off", init_timeout=30, finish_timeout=60)
        wandb.setup(settings)  # silent before there is a run, too: it does not ask for a key
        self._run = wandb.init(**options, id=self.id, resume="allow" if self.id else None, settings=settings)
        self.id = self._run.id
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def log(self, record: Mapping[str, Any]) -> None:
        self._do("log", lambda: self._run.log(dict(record)))

    def video(self, name: str, path: Path, global_step: int, caption: str = "") -> None:
        def send() -> None:
            import wandb

            self._run.log({name: wandb.Video(str(path), caption=caption), "global_step": global_step})

        self._do("log a video", send)

    def finish(self, exit_code: int = 0) -> None:
        self._do("finish", lambda: self._run.finish(exit_code=exit_code))
        self._works = False

    def _do(self, what: str, act: Callable[[], Any]) -> None:
        if not self._works:
            return
        try:
            act()
        except Exception as error:
            self._works = False
            log.warning("wandb could not %s (%s); metrics.jsonl has everything", what, first_line(error))


def resolve_mode(mode: str) -> str:
    """`auto` is what WANDB_MODE says, else online when a wandb login exists on this machine, else offline."""
    if mode != "auto":
        return mode
    netrc = Path(os.environ.get("NETRC", os.path.expanduser("~/.netrc")))
    has_login = bool(os.environ.get("WANDB_API_KEY")) or (
        netrc.is_file() and b"api.wandb.ai" in netrc.read_bytes()
    )
    return os.environ.get("WANDB_MODE") or ("online" if has_login else "offline")
