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

log = logging.getLogger(__name__)

GRACE_S = 30.0  # for the other ranks to end by themselves (closing wandb takes time) after one has stopped
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent dies


def start_ranks() -> None:
    """Run this very command once for each visible GPU, and exit. A process that is a rank already goes on."""
    if "WORLD_SIZE" in os.environ:
        return
    num_gpus = torch.cuda.device_count()
    if num_gpus > 1:
        sys.exit(run_as_ranks([sys.executable, *sys.argv], num_gpus))
    log.warning("--data-parallel: there is no second GPU, and the run goes on in one process")


def run_as_ranks(command: Sequence[str], size: int) -> int:
    """Run `size` processes of one command, each told its rank. Returns the first exit code that is not 0."""
    processes: list[subprocess.Popen] = []

    def send_to_all(signal_number: int, frame: object = None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal_number)

    signal.signal(signal.SIGINT, send_to_all)
    signal.signal(signal.SIGTERM, send_to_all)
    environment = _environment(size)
    libc = ctypes.CDLL(None)
    for rank in range(size):
        process = subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            # In a session of its own a rank gets Ctrl-C once, from here, and not from the terminal as well.
            start_new_session=True,
            preexec_fn=partial(libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        processes.append(process)

    failures = _failures(processes)
    while not failures and any(process.returncode is None for process in processes):
        time.sleep(0.1)
        failures = _failures(processes)
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        _wait_for_all(processes)
        send_to_all(signal_number)
    return failures[0] if failures else 0


def _environment(size: int) -> dict[str, str]:
    """The variables that torchrun gives to its processes, but for the rank."""
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


def _failures(processes: Sequence[subprocess.Popen]) -> list[int]:
    """Exit codes of the processes that have failed, as a shell counts them: 128 + the signal that ended one."""
    codes = [process.poll() for process in processes]
    return [code if code > 0 else 128 - code for code in codes if code]


def _wait_for_all(processes: Sequence[subprocess.Popen]) -> None:
    deadline = time.monotonic() + GRACE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
