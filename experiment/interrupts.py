"""End a run cleanly: on Unix signals, on exceptions, and with one line for problems that the user can repair."""

import contextlib
import logging
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from command_line import handle_stop_signals, stop_handlers
from contracts import DISK_ERRORS, BadInput, TimeIsUp, first_line
from experiment.report import update_report
from experiment.run_folder import Run
from experiment.stored_run import LOG_FILE
from experiment.terminal import LOG_TIME

log = logging.getLogger(__name__)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within this block the first stop signal raises KeyboardInterrupt. A second SIGINT or SIGTERM kills the program.

    A second SIGHUP, SIGUSR1 or SIGXCPU is ignored: a closed terminal may send SIGHUP twice, which does not mean that
    the user wants to kill the program.
    """
    previous_handlers = stop_handlers()  # before `interrupt`, which reads it, can be called

    def interrupt(signal_number: int, frame: object) -> None:
        for stop_signal in previous_handlers:
            is_impatient = stop_signal in (signal.SIGINT, signal.SIGTERM)
            signal.signal(stop_signal, signal.SIG_DFL if is_impatient else signal.SIG_IGN)
        raise KeyboardInterrupt

    def interrupt_again(swallowed: "sys.UnraisableHookArgs") -> None:
        """Python swallows what is raised in a destructor or at a fork: there a stop signal would have no effect."""
        if swallowed.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        else:
            previous_hook(swallowed)

    previous_hook = sys.unraisablehook
    previous_alarm = signal.signal(signal.SIGALRM, interrupt)
    try:
        sys.unraisablehook = interrupt_again
        handle_stop_signals(interrupt)
        yield
    finally:
        sys.unraisablehook = previous_hook
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_alarm)
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
    except BaseException as reason:
        problem = repairable_problem(reason, run.folder)
        if run.ranks.is_main:
            if (run.checkpoints / "latest").exists():
                if isinstance(reason, TimeIsUp | KeyboardInterrupt):
                    update_report(run.folder)  # it was last written after an evaluation
                if "--resume" not in str(reason):  # else it says itself whether that helps
                    log.warning(
                        "stopped; go on with: python train_grpo.py --resume %s", shlex.quote(str(run.folder))
                    )
            append_to_log(run.folder, problem or describe(reason))
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
    if reason.errno not in DISK_ERRORS:  # for example a missing file, which may be a bug in the program
        return None
    place = reason.filename or run_folder
    return f"{place} cannot be written ({reason.strerror}): free disk space, or lower --keep-checkpoints"


def describe(reason: BaseException) -> str:
    """Why a run ends: one line, or for a fault the traceback."""
    # SystemExit means that another rank was lost.
    if isinstance(reason, BadInput | TimeIsUp | SystemExit | KeyboardInterrupt):
        return str(reason) or "interrupted"
    return "".join(traceback.format_exception(reason)).rstrip()


def append_to_log(run_folder: Path, text: str) -> None:
    """Append a text to train.log alone: `main_guard` or Python prints it on the terminal."""
    with contextlib.suppress(OSError), (run_folder / LOG_FILE).open("a") as file:
        file.write(f"{time.strftime(LOG_TIME)}  {text}\n")
