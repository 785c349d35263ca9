"""Workers, which answer one request at a time: in this process, or in a process that never outlives the program.

`ProcessWorker` is the program's handle on such a process, and `main` is what the process runs. It is a fresh
interpreter, because multiprocessing's spawn would import the main script, and torch with it.
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
END_S = 5.0  # for a process to go by itself
# For a question; the slowest one builds a LIBERO task, and compiles robosuite's functions before it.
ANSWER_S = 120.0
PR_SET_PDEATHSIG = 1  # of Linux's prctl


class NoAnswer(Exception):
    """A request was not answered; the message says why."""


class Worker(Protocol):
    """What a pool needs of a worker, which makes a function, `make(*recipe)`, and calls it for every request."""

    deadline: float  # on time.monotonic's clock, for the answer to the present request; infinite without one

    def __init__(self, make: Callable[..., Callable], *recipe: object) -> None: ...

    def request(self, *arguments: object, timeout_s: float) -> None:
        """Ask for `function(*arguments)`."""
        ...

    @staticmethod
    def wait(workers: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those that have answered or died; waits for the first one, at most `timeout_s`."""
        ...

    def receive(self) -> Any:
        """Wait for the answer. Raises BadInput that is the answer, and NoAnswer for a fault, a death or a hang."""
        ...

    def close(self) -> None:
        """Let an idle worker go; stop one at work by force."""
        ...

    def end(self) -> object:
        """Wait until a closed worker has gone."""
        ...


class InlineWorker:
    """A worker in this process: it works while its answer is received, so it has no deadline and cannot die."""

    def __init__(self, make: Callable[..., Callable], *recipe: object) -> None:
        self.deadline = math.inf
        self._function: Any = make(*recipe)
        self._arguments: tuple[object, ...] = ()

    def request(self, *arguments: object, timeout_s: float) -> None:
        self._arguments = arguments

    @staticmethod
    def wait(workers: Sequence["InlineWorker"], timeout_s: float) -> list["InlineWorker"]:
        return list(workers)

    def receive(self) -> Any:
        return self._function(*self._arguments)

    def close(self) -> None:
        self._function.close()

    def end(self) -> None:
        """It has nothing to wait for."""


class ProcessWorker:
    """A worker in a process of its own, which dies with the thread that made it."""

    def __init__(self, make: Callable[..., Callable], *recipe: object) -> None:
        self.connection, remote_end = Pipe()
        program = f"import sys; sys.path[0] = {str(PROJECT)!r}; from envs import worker; worker.main(%d)"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program % remote_end.fileno()],
            pass_fds=[remote_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what libraries print is no output of our command line
            env=os.environ | dict.fromkeys(ONE_THREAD, "1"),
            start_new_session=True,  # Ctrl-C in the terminal is the parent's to handle
        )
        remote_end.close()
        self.request(make, *recipe, timeout_s=math.inf)

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
                self.process.send_signal(
                    signal.SIGABRT
                )  # faulthandler prints where it hangs, then it is gone
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
        """Wait for a dead or closed process, and kill it where that takes too long; returns what became of it."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.process.kill()  # does nothing to one that has gone
        code = self.process.wait()
        self.connection.close()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def ask(question: Callable[..., T], *arguments: object, answer_s: float = ANSWER_S) -> T:
    """`question(*arguments)`, computed in a process of its own, because a driver may hang or crash.

    Raises BadInput that the question raises, else NoAnswer.
    """
    worker = ProcessWorker(partial, question, *arguments)
    try:
        worker.request(timeout_s=answer_s)
        return worker.receive()
    finally:
        worker.close()
        worker.end()


def main(socket_fd: int) -> None:
    """The process: first the recipe of its function, then requests, one answer each, until the parent hangs up."""
    # The kernel kills this process with its parent, even if it is stopped or hangs in a library then.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()  # the parent aborts a hung process: its stack goes to stderr
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(socket_fd)
    with suppress(EOFError, ConnectionError):
        make, *recipe = connection.recv()
        function = make(*recipe)
        while True:
            arguments = connection.recv()
            connection.send(_answer(function, arguments))
    sys.stderr.flush()
    os._exit(0)  # the interpreter's end would free GL contexts after their display, with a traceback for each


def _answer(function: Callable, arguments: tuple) -> object:
    """What `function` returns, or the exception that tells the parent why there is no answer."""
    try:
        return function(*arguments)
    except BadInput as fault:
        return fault
    except Exception as fault:  # whatever a broken driver or library raises
        traceback.print_exc()
        return NoAnswer(f"{type(fault).__name__}: {fault}")
