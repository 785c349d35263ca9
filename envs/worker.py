"""A process that answers requests and never outlives the program: what it runs (`main`), and our handle on it.

It is a fresh interpreter, because multiprocessing's spawn would import the main script, and torch with it. Its arrays
travel through memory that both sides share.
"""

import ctypes
import faulthandler
import math
import mmap
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

from contracts import BadInput

T = TypeVar("T")
PROGRAM = """
import sys
sys.path[0] = sys.argv[1]
from envs import worker
worker.main(*map(int, sys.argv[2:]))
"""
PROJECT = Path(__file__).resolve().parent.parent
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "LP_NUM_THREADS")
SHARED_BYTES = 64 * 2**20  # more than any answer holds; pages that nobody writes to take no memory
END_S = 5.0  # for a process to go by itself
ANSWER_S = 120.0  # for a question; the slowest one builds a LIBERO task, and compiles robosuite's functions before it
PR_SET_PDEATHSIG = 1  # of Linux's prctl


class NoAnswer(Exception):
    """A question was not answered; the message says why."""


class Worker:
    """Our handle on a process that makes a handler, `make_handler(*recipe)`, and answers by its method `run`.

    At most one request is under way (`deadline` is finite then). The process dies with the thread that made it.
    """

    def __init__(self, make_handler: Callable[..., Any], recipe: tuple[Any, ...] = ()) -> None:
        memory_fd = os.memfd_create("frames")  # has no name that could outlive us
        os.ftruncate(memory_fd, SHARED_BYTES)
        self._memory = mmap.mmap(memory_fd, SHARED_BYTES)
        self.connection, theirs = Pipe()
        fds = (theirs.fileno(), memory_fd)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(PROJECT), str(os.getpid()), *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what libraries print is no output of our command line
            env=os.environ | dict.fromkeys(ONE_THREAD, "1"),
            start_new_session=True,  # Ctrl-C in the terminal is the parent's to handle
        )
        theirs.close()
        os.close(memory_fd)
        self.request((make_handler, recipe), timeout_s=math.inf)

    def request(self, request: object, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s  # by which the answer must be here
        with suppress(OSError):  # it has died: the next receive() finds out
            self.connection.send(request)

    def receive(self) -> Any:
        """The answer; call it when the connection is readable.

        Raises BadInput or NoAnswer that is the answer, EOFError or OSError if the process has died.
        """
        message, sizes = self.connection.recv()
        answer = unpack(message, sizes, self._memory)
        self.deadline = math.inf
        if isinstance(answer, BadInput | NoAnswer):
            raise answer
        return answer

    def close(self) -> None:
        """Let an idle process go; kill one at work, whose answer nobody will read."""
        if self.deadline < math.inf:
            self.process.kill()
        self.connection.close()

    def end(self, show_stack: bool = False) -> str:
        """Wait for a dead or closed process, kill it where that takes too long; returns what had become of it."""
        if show_stack:
            self.process.send_signal(signal.SIGABRT)  # faulthandler prints where it hangs, then it is gone
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        code = self.process.wait()
        self.connection.close()
        self._memory.close()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def ask(question: Callable[..., T], *arguments: object, answer_s: float = ANSWER_S) -> T:
    """`question(*arguments)`, computed apart, where a driver may hang or crash. Raises its BadInput, else NoAnswer."""
    worker = Worker(_Questions)
    try:
        worker.request((question, arguments), answer_s)
        if not worker.connection.poll(answer_s):
            worker.end(show_stack=True)
            raise NoAnswer(f"no answer within {answer_s:.0f} s")
        return worker.receive()
    except (EOFError, OSError):
        raise NoAnswer(f"the process ended with {worker.end()}") from None
    finally:
        worker.close()
        worker.end()


class _Questions:
    def run(self, request: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        question, arguments = request
        try:
            return question(*arguments)
        except BadInput:
            raise
        except Exception as fault:  # whatever a broken driver or library raises is the answer
            traceback.print_exc()
            return NoAnswer(f"{type(fault).__name__}: {fault}")


def main(parent: int, socket_fd: int, memory_fd: int) -> None:
    """The process: first the recipe of its handler, then requests, one answer each, until the parent hangs up."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # even if it is stopped or hangs in a library then
    if os.getppid() != parent:
        os._exit(1)  # it died before the line above
    faulthandler.enable()  # the parent aborts a hung process: its stack goes to stderr
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection, memory = Connection(socket_fd), mmap.mmap(memory_fd, SHARED_BYTES)
    requests = _requests(connection)
    for make_handler, recipe in requests:
        handler = make_handler(*recipe)
        for request in requests:
            try:
                answer = handler.run(request)
            except BadInput as fault:
                answer = fault
            with suppress(ConnectionError):
                connection.send(pack(answer, memory))
    sys.stderr.flush()
    os._exit(0)  # the interpreter's end would free GL contexts after their display, with a traceback for each


def _requests(connection: Connection) -> Iterator[Any]:
    with suppress(EOFError, ConnectionError):
        while True:
            yield connection.recv()


def pack(answer: object, memory: mmap.mmap) -> tuple[bytes, list[int]]:
    """Pickle `answer`, its arrays one after the other in `memory` and only their sizes (bytes) in the message."""
    arrays: list[pickle.PickleBuffer] = []
    message = pickle.dumps(answer, protocol=5, buffer_callback=arrays.append)
    memory.seek(0)
    return message, [memory.write(array.raw()) for array in arrays]


def unpack(message: bytes, sizes: list[int], memory: mmap.mmap) -> Any:
    """What `pack` packed, with copies of the arrays: the next answer overwrites `memory`."""
    memory.seek(0)
    return pickle.loads(message, buffers=[bytearray(memory.read(size)) for size in sizes])
