"""Stop a run cleanly: on signals, on exceptions, and with one line for problems that the user can repair."""

import contextlib
import errno
import logging
import os
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from command_line import handle_stop_signals, stop_handlers
from contracts import DISK_ERRORS, BadInput, TimeIsUp, first_line
from experiment.run_files import LOG_FILE
from experiment.run_folder import Run
from experiment.terminal import LOG_TIME

log = logging.getLogger(__name__)

# Why a file of a run could not be written, where it is the user who can repair it.
REPAIRABLE_ERRORS = DISK_ERRORS | {errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOTDIR}


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within this block the first stop signal raises KeyboardInterrupt. A second SIGINT or SIGTERM kills the program.

    A second SIGHUP, SIGUSR1 or SIGXCPU is ignored: a closed terminal may send SIGHUP twice, which does not mean that
    the user wants to kill the program.
    """

    def interrupt(signal_number: int, frame: object) -> None:
        for stop_signal in previous_handlers:
            is_impatient = stop_signal in (signal.SIGINT, signal.SIGTERM)
            signal.signal(stop_signal, signal.SIG_DFL if is_impatient else signal.SIG_IGN)
        for descriptor in terminals:
            if not os.isatty(descriptor):  # it was closed, and writing to it would fail
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        raise KeyboardInterrupt

    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
    previous_handlers = stop_handlers()  # before `interrupt`, which reads it, can be called
    try:
        handle_stop_signals(interrupt)
        yield
    finally:
        for stop_signal, handler in previous_handlers.items():
            signal.signal(stop_signal, handler)


@contextlib.contextmanager
def until_the_end(run: Run) -> Iterator[None]:
    """Close the run at the end of this block, and log the reason if the block ends by an exception.

    All that a run does in its folder happens within this block. Raises BadInput for a problem that the user can repair;
    other exceptions pass through.
    """
    try:
        yield
        # Raises OSError if the folder was deleted after the last checkpoint. Evaluation and report only warn of it.
        run.folder.stat()
    except BaseException as reason:
        if run.ranks.is_main and os.path.exists(run.checkpoints / "latest"):
            log.warning("stopped; go on with: python train_grpo.py --resume %s", run.folder)
        problem = repairable_problem(reason, run.folder)
        if run.ranks.is_main:
            append_reason_to_log(run.folder, reason, problem)
        run.close(exit_code=0 if isinstance(reason, TimeIsUp) else 1)
        if problem is not None:
            raise BadInput(problem) from reason
        raise
    run.close()


def repairable_problem(reason: BaseException, run_folder: Path) -> str | None:
    """One line for the user if the GPU is full or a disk cannot be written; None for every other exception."""
    if isinstance(reason, torch.OutOfMemoryError):
        return f"out of GPU memory ({first_line(reason)}): lower --micro-batch-size or --max-batch"
    if not isinstance(reason, OSError):
        return None
    if not run_folder.is_dir():
        return f"the run folder {run_folder} is gone: if it was moved, continue the run with --resume and its new path"
    if reason.errno not in REPAIRABLE_ERRORS:  # for example a missing file, which may be a bug in the program
        return None
    place = reason.filename or run_folder
    repair = "free disk space, lower --keep-checkpoints, or check the permissions"
    return f"{place} cannot be written ({reason.strerror}): {repair}"


def append_reason_to_log(run_folder: Path, reason: BaseException, problem: str | None) -> None:
    """Append the reason why the run ends to train.log. `main_guard` or Python prints it on the terminal."""
    if problem is not None:
        text = problem
    # SystemExit means that another rank was lost.
    elif isinstance(reason, BadInput | TimeIsUp | SystemExit | KeyboardInterrupt):
        text = str(reason) or "interrupted"
    else:
        text = "".join(traceback.format_exception(reason)).rstrip()
    text = f"{time.strftime(LOG_TIME)}  {text}"
    with contextlib.suppress(OSError), (run_folder / LOG_FILE).open("a") as file:
        file.write(text + "\n")
