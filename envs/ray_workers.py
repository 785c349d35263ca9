"""Workers of a pool on the nodes of a Ray cluster, which may be one machine or many.

A worker is a Ray actor, which starts a process on its node. A simulator always needs a process of its own: it needs its
own environment variables, and it must be possible to kill it when it hangs.
"""

import math
import os
import pickle
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from contracts import BadInput
from envs.worker import NoAnswer, ProcessWorker

try:
    import ray
    from ray.exceptions import RayError
except ImportError:
    raise BadInput(
        "Ray is not installed; run: pip install -r requirements-ray.txt, on every machine"
    ) from None

# The node itself stops a worker that misses its deadline. Without an answer so long after it, the node counts as lost.
GRACE_S = 30.0
CONNECT_S = 10.0  # time for RAY_ADDRESS to answer; Ray itself would try for a quarter of an hour


def connect() -> int:
    """Join the Ray cluster at RAY_ADDRESS, else one on this machine, else start one that ends with this program.

    Returns its number of CPUs. Raises BadInput if none can be joined or started, or if it has no CPU.
    """
    if not ray.is_initialized():
        _join_or_start()
    cpus = int(ray.cluster_resources().get("CPU", 0))
    if cpus == 0:
        raise BadInput(
            "the Ray cluster has no CPU: run `ray start --address HOST:PORT` on machines that have some"
        )
    return cpus


def _join_or_start() -> None:
    address = os.environ.get("RAY_ADDRESS", "")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        host_and_port = re.search(r"([^/:]+):(\d+)$", address)
        if host_and_port is not None:
            target = (host_and_port[1], int(host_and_port[2]))
            socket.create_connection(target, timeout=CONNECT_S).close()
        ray.init(include_dashboard=False, logging_level="WARNING")
    except (OSError, RuntimeError, ValueError) as fault:
        raise BadInput(
            f"no Ray cluster at RAY_ADDRESS={address} that can be joined ({fault}): correct or unset it; a cluster "
            "begins with: ray start --head; if Ray prints InvalidAuthToken, set RAY_AUTH_MODE (docs/SCALE_OUT.md)"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray's handler would end the program unsaved


class Relay:
    """A Ray actor: it starts a worker process on its node and passes requests and answers on."""

    def __init__(self, *recipe: Any) -> None:
        self._worker = ProcessWorker(*recipe)

    def answer(self, arguments: tuple, timeout_s: float) -> bytes:
        """The answer to a request, pickled; a BadInput or NoAnswer is returned, not raised.

        Arrays that Ray itself unpickles would be read-only and would stay in its shared memory.
        """
        self._worker.request(*arguments, timeout_s=timeout_s)
        try:
            return pickle.dumps(self._worker.receive())
        except (BadInput, NoAnswer) as problem:
            return pickle.dumps(type(problem)(f"{problem}, on {socket.gethostname()}"))


class RayWorker:
    """A worker on any node. If its node is lost, the worker has died; its replacement starts on another node."""

    def __init__(self, make: Callable[..., Callable], *recipe: object) -> None:
        # SPREAD distributes actors over the nodes, but only those that need a resource. A thousandth of a CPU is always
        # free, also after a node is lost. `max_restarts`: Ray restarts an actor that was starting on a dying node.
        options = {"num_cpus": 0.001, "scheduling_strategy": "SPREAD", "max_restarts": -1}
        self._actor = ray.remote(**options)(Relay).remote(make, *recipe)
        self.deadline = math.inf

    def request(self, *arguments: object, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s + GRACE_S
        self._answer = self._actor.answer.remote(arguments, timeout_s)

    @staticmethod
    def wait(workers: Sequence["RayWorker"], timeout_s: float) -> list["RayWorker"]:
        answers = [worker._answer for worker in workers]
        arrived, pending = ray.wait(answers, timeout=timeout_s)  # returns at most one
        if pending:
            more, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
            arrived += more
        return [worker for worker in workers if worker._answer in arrived]

    def receive(self) -> Any:
        try:
            answer = pickle.loads(ray.get(self._answer, timeout=max(0.0, self.deadline - time.monotonic())))
        except RayError as fault:  # GetTimeoutError is a RayError, too
            last_line = str(fault).splitlines()[-1]
            raise NoAnswer(f"it or its node died ({type(fault).__name__}: {last_line})") from None
        self.deadline = math.inf
        if isinstance(answer, BadInput | NoAnswer):
            raise answer
        return answer

    def close(self) -> None:
        ray.kill(self._actor)  # the process dies with the actor

    def end(self) -> None:
        """Nothing to do: Ray itself waits for the actor."""
