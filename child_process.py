"""Processes of our own program that talk over one socket and never outlive their parent.

A child is a fresh interpreter. multiprocessing's spawn would do nearly the same, but it imports the parent's main
script, and with it everything that the parent needs, into every child.
"""

import faulthandler
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

PROJECT = Path(__file__).resolve().parent
PROGRAM = """
import importlib, sys
sys.path[0] = sys.argv[1]
import child_process, quick_imports
child_process.become_child(int(sys.argv[2]))
quick_imports.begin_imports()
module = importlib.import_module(sys.argv[3])
quick_imports.end_imports()
module.main(*map(int, sys.argv[4:]))
"""
END_S = 5.0  # for a child to go by itself


def start_child(
    module: str, stalled_s: float, pass_fds: Sequence[int] = (), env: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen, Connection]:
    """Run `main(socket_fd, *pass_fds)` of `module`; returns the process and our end of the socket.

    A child stopped in the middle of a message must not stop us: sending and receiving raise OSError after `stalled_s`
    seconds without a byte. `env` is added to the environment.
    """
    ours, theirs = socket.socketpair()
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(stalled_s), 0))
    with theirs:
        fds = (theirs.fileno(), *pass_fds)
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(PROJECT), str(os.getpid()), module, *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what libraries print is no output of our command line
            env={**os.environ, **(env or {})},
            start_new_session=True,  # Ctrl-C in the terminal is the parent's to handle
        )
    return process, Connection(ours.detach())


def end_child(process: subprocess.Popen, show_stack: bool = False) -> str:
    """Wait for a child that has died or whose socket is closed, kill it where that takes too long; returns its end."""
    if show_stack:
        process.send_signal(signal.SIGABRT)  # faulthandler prints where it hangs, then it is gone
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    code = process.returncode
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def become_child(parent: int) -> None:
    """What every child does before its imports. It ends when its parent is gone, even if it hangs inside a library."""
    faulthandler.enable()  # the parent aborts a hung child: its stack goes to stderr
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """The end of the connection would go unnoticed inside a call that hangs, so look at the parent itself."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
