"""Start the processes that train together on one machine: `--data-parallel`."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch

from command_line import handle_stop_signals
from envs.worker import PR_SET_PDEATHSIG

log = logging.getLogger(__name__)

GRACE_S = 30.0  # after one rank has stopped, how long the others may take to end (closing wandb takes time)


def start_ranks() -> None:
    """Run this command again as one process per visible GPU, and exit with their exit code.

    Returns instead, so that this process trains, if it is one of several ranks already or sees no second GPU.
    """
    if "WORLD_SIZE" in os.environ:
        return
    num_gpus = torch.cuda.device_count()
    if num_gpus > 1:
        sys.exit(run_as_ranks([sys.executable, *sys.argv], num_gpus))
    log.warning("--data-parallel: there is no second GPU, and the run goes on in one process")


def run_as_ranks(command: Sequence[str], size: int) -> int:
    """Run `size` processes of one command and wait for them. Returns the first exit code that is not 0, else 0.

    Each process gets its rank in the environment. Stop signals are passed on to all. When one fails, the others get
    GRACE_S seconds to end; they notice by themselves, unless they hang.
    """
    processes: list[subprocess.Popen] = []
    handle_stop_signals(lambda signal_number, _: _send_to_all(processes, signal_number))
    environment = _environment(size)
    libc = ctypes.CDLL(None)
    for rank in range(size):
        process = subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            # A new session, so that a rank gets Ctrl-C once, from here, and not a second time from the terminal.
            start_new_session=True,
            preexec_fn=partial(libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        processes.append(process)

    failures: list[int] = []
    deadline = 0.0
    while any(process.poll() is None for process in processes):
        if not failures:
            failures = _exit_codes_of_failures(processes)
            deadline = time.monotonic() + GRACE_S
        elif time.monotonic() > deadline:
            _send_to_all(processes, signal.SIGKILL)
        time.sleep(0.1)
    failures = failures or _exit_codes_of_failures(processes)
    return failures[0] if failures else 0


def _send_to_all(processes: Sequence[subprocess.Popen], signal_number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal_number)


def _exit_codes_of_failures(processes: Sequence[subprocess.Popen]) -> list[int]:
    """The exit codes that are not 0, as a shell counts them: 128 + the signal that ended a process."""
    codes = [process.poll() for process in processes]
    return [code if code > 0 else 128 - code for code in codes if code]


def _environment(size: int) -> dict[str, str]:
    """The environment variables that torchrun sets, except those of the rank."""
    with socket.create_server(("127.0.0.1", 0)) as free_port:
        port = free_port.getsockname()[1]
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
