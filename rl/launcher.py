"""Start the processes that train together on one machine: `--data-parallel`."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from functools import partial

from command_line import handle_stop_signals
from envs.worker import PR_SET_PDEATHSIG
from vla.device import count_gpus

log = logging.getLogger(__name__)

GRACE_S = 30.0  # after one rank has stopped, how long the others may take to end (closing wandb takes time)


def ranks_to_start() -> int:
    """How many ranks this process should start: one for each visible GPU.

    0, so that this process trains, if it is one of several ranks already or sees no second GPU.
    """
    if "WORLD_SIZE" in os.environ:
        return 0
    num_gpus = count_gpus()
    if num_gpus > 1:
        return num_gpus
    log.warning("--data-parallel: there is no second GPU, and the run goes on in one process")
    return 0


def run_as_ranks(command: Sequence[str], size: int) -> int:
    """Run `size` processes of one command and wait for them. Returns the first exit code that is not 0, else 0.

    Stop signals are passed on to all. When one process fails, the others notice by themselves; those that hang are
    killed after GRACE_S seconds.
    """
    processes: list[subprocess.Popen] = []
    handle_stop_signals(lambda signal_number, _: _send_to_all(processes, signal_number))
    with socket.create_server(("127.0.0.1", 0)) as free_port:
        port = free_port.getsockname()[1]
    for rank in range(size):
        processes.append(_start_rank(command, rank, size, port))
    while _exit_code(processes) == 0 and any(process.poll() is None for process in processes):
        time.sleep(0.1)
    exit_code = _exit_code(processes)
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return exit_code


def _start_rank(command: Sequence[str], rank: int, size: int, port: int) -> subprocess.Popen:
    """Start a process with the environment variables that torchrun sets."""
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    return subprocess.Popen(
        command,
        env=environment,
        # A new session, so that a rank gets Ctrl-C once, from here, and not a second time from the terminal.
        start_new_session=True,
        preexec_fn=partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL),
    )


def _send_to_all(processes: Sequence[subprocess.Popen], signal_number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal_number)


def _exit_code(processes: Sequence[subprocess.Popen]) -> int:
    """The first exit code that is not 0, as a shell counts it: 128 + the signal that ended a process; else 0."""
    failed = [process.returncode for process in processes if process.poll()]
    if not failed:
        return 0
    return failed[0] if failed[0] > 0 else 128 - failed[0]
