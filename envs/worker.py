"""Workers call a function, one request at a time, in a process that ends with the program.

`ProcessWorker` is the program's handle of such a process; the process runs `main`. It is a fresh interpreter, because
multiprocessing's spawn would import the main script, and torch with it.
"""

import ctypes
import faulthandler
import math
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from contracts import BadInput

T = TypeVar("T")
PROJECT = Path(__file__).resolve().parent.parent
ONE_THREAD = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "LP_NUM_THREADS",
)
END_S = 5.0  # time that a process has to end by itself
# Time that `ask` gives a question. The slowest one compiles robosuite's functions, then builds a LIBERO task.
ANSWER_S = 120.0
PR_SET_PDEATHSIG = 1  # option of Linux's prctl: the signal that a process gets when its parent dies


class NoAnswer(Exception):
    """A request was not answered; the message says why."""


class Worker(Protocol):
    """What a pool needs of a worker. It makes a function once, `make(*recipe)`, and calls it for every request."""

    # When the answer to the present request is due, on time.monotonic's clock; infinite if there is no request.
    deadline: float

    def __init__(self, make: Callable[..., Callable], *recipe: object) -> None: ...

    def request(self, *arguments: object, timeout_s: float) -> None:
        """Ask for `function(*arguments)`, to be answered within `timeout_s`."""
        ...

    @staticmethod
    def wait(workers: Sequence[Any], timeout_s: float) -> list[Any]:
        """The workers that have answered or died; waits at most `timeout_s` for the first one."""
        ...

    def receive(self) -> Any:
        """Wait for the answer and return it.

        Raises BadInput if the function raised it. Raises NoAnswer if the function failed otherwise, or if the worker
        died, or has not begun to answer by its deadline. An answer that has begun has no deadline.
        """
        ...

    def close(self) -> None:
        """Begin to end the worker: an idle one ends by itself, one at work is killed. Returns at once."""
        ...

    def end(self) -> object:
        """Wait until a closed worker has ended."""
        ...


class ProcessWorker:
    """A worker in a process of its own. The kernel kills the process when the thread that made it ends."""

    def __init__(self, make: Callable[..., Callable], *recipe: object) -> None:
        self.connection, remote_end = Pipe()
        call = f"from envs import worker; worker.main({remote_end.fileno()})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[0] = {str(PROJECT)!r}; {call}"],
            pass_fds=[remote_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard error: what libraries print is no output of our command line
            env=os.environ | dict.fromkeys(ONE_THREAD, "1"),
            start_new_session=True,  # Ctrl-C in the terminal is the parent's to handle
        )
        remote_end.close()
        self.request(make, *recipe, timeout_s=math.inf)  # the first message is the recipe; it gets no answer

    def request(self, *arguments: object, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s
        with suppress(OSError):  # the process has died: the next receive() finds out
            self.connection.send(arguments)

    @staticmethod
    def wait(workers: Sequence["ProcessWorker"], timeout_s: float) -> list["ProcessWorker"]:
        answered = wait([worker.connection for worker in workers], timeout_s)
        return [worker for worker in workers if worker.connection in answered]

    def receive(self) -> Any:
        try:
            if not self.connection.poll(max(0.0, self.deadline - time.monotonic())):
                # faulthandler prints where the process hangs, then the process ends.
                self.process.send_signal(signal.SIGABRT)
                raise NoAnswer(f"it gave no answer in time ({self.end()})")
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise NoAnswer(f"it died ({self.end()})") from None
        self.deadline = math.inf
        if isinstance(answer, BadInput | NoAnswer):
            raise answer
        return answer

    def close(self) -> None:
        if self.deadline < math.inf:
            self.process.kill()  # nobody will read its answer
        self.connection.close()

    def end(self) -> str:
        """Wait for a dead or closed process to end; kill it after END_S. Returns its signal's name or its exit code."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.process.kill()  # does nothing if the process has ended
        code = self.process.wait()
        self.connection.close()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def ask(question: Callable[..., T], *arguments: object, answer_s: float = ANSWER_S) -> T:
    """Return `question(*arguments)`, computed in a process of its own, because a driver may hang or crash.

    Raises BadInput if the question raises it. Raises NoAnswer if the question fails otherwise, or if there is no answer
    within `answer_s`.
    """
    worker = ProcessWorker(partial, question, *arguments)
    try:
        worker.request(timeout_s=answer_s)
        return worker.receive()
    finally:
        worker.close()
        worker.end()


def main(socket_fd: int) -> None:
    """What a worker process runs: it receives the recipe of its function, then answers requests one by one.

    It ends when the parent closes the connection.
    """
    # The kernel kills this process when its parent ends, even if this process is stopped or hangs in a library.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()  # the parent aborts a process that hangs: then its stack is printed to stderr
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(socket_fd)
    with suppress(EOFError, ConnectionError):
        make, *recipe = connection.recv()
        function = make(*recipe)
        while True:
            arguments = connection.recv()
            connection.send(_answer(function, arguments))
    sys.stderr.flush()
    # A normal exit would free GL contexts after their display, and print a traceback for each.
    os._exit(0)


def _answer(function: Callable, arguments: tuple) -> object:
    """What `function` returns, or an exception (BadInput, NoAnswer) for the parent to raise."""
    try:
        return function(*arguments)
    except BadInput as fault:
        return fault
    except Exception as fault:  # whatever a broken driver or library raises
        traceback.print_exc()
        return NoAnswer(f"{type(fault).__name__}: {fault}")
