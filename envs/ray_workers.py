"""Workers of a pool on the nodes of a Ray cluster, one machine or many: each is an actor, which has the process there.

A simulator needs a process of its own wherever it is: for its environment, and to be killed when it hangs.
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

from contracts import BadInput, first_line
from envs.worker import NoAnswer, ProcessWorker

try:
    import ray
    from ray.exceptions import RayError
except ImportError:
    raise BadInput(
        "Ray is not installed; run: pip install -r requirements-ray.txt, on every machine"
    ) from None

GRACE_S = 30.0  # beyond a deadline, which the node itself keeps: then the node is lost
CONNECT_S = 10.0  # for an answer from RAY_ADDRESS; Ray itself tries for a quarter of an hour


def connect() -> str:
    """Join the cluster of RAY_ADDRESS, or of this machine, or start one that ends with this program.

    Returns what the cluster has, in words. Raises BadInput where there is none.
    """
    if not ray.is_initialized():
        _join_or_start()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return f"Ray {ray.__version__}, {len(nodes)} node(s), {ray.cluster_resources().get('CPU', 0):.0f} CPUs"


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
            f"no Ray cluster at RAY_ADDRESS={address} ({first_line(fault)}): "
            "correct or unset it; a cluster begins with: ray start --head"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray's handler would end the program unsaved


class Relay:
    """An actor: has a process on its node, and passes on its answers."""

    def __init__(self, *recipe: Any) -> None:
        self._worker = ProcessWorker(*recipe)

    def answer(self, arguments: tuple, timeout_s: float) -> bytes:
        """The answer or its problem, pickled as in a pipe: arrays that Ray unpickles are read-only, and its shared
        memory keeps them."""
        self._worker.request(*arguments, timeout_s=timeout_s)
        try:
            return pickle.dumps(self._worker.receive())
        except (BadInput, NoAnswer) as problem:
            return pickle.dumps(type(problem)(f"{problem}, on {socket.gethostname()}"))


class RayWorker:
    """A worker on some node. If its node is lost, it has died, and the next one starts on another node."""

    def __init__(self, make: Callable[..., Callable], *recipe: object) -> None:
        # SPREAD takes turns among the nodes, but not for actors that need nothing; a thousandth of a CPU always has
        # room, also when a node is lost. Ray restarts an actor that was to start on a dying node.
        options = {"num_cpus": 0.001, "scheduling_strategy": "SPREAD", "max_restarts": -1}
        self._actor = ray.remote(**options)(Relay).remote(make, *recipe)
        self.deadline = math.inf

    def request(self, *arguments: object, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s + GRACE_S
        self._answer = self._actor.answer.remote(arguments, timeout_s)

    @staticmethod
    def wait(workers: Sequence["RayWorker"], timeout_s: float) -> list["RayWorker"]:
        answers = [worker._answer for worker in workers]
        arrived, pending = ray.wait(answers, timeout=timeout_s)  # at most one
        if pending:
            more, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
            arrived += more
        return [worker for worker in workers if worker._answer in arrived]

    def receive(self) -> Any:
        try:
            answer = pickle.loads(ray.get(self._answer, timeout=max(0.0, self.deadline - time.monotonic())))
        except RayError as fault:  # GetTimeoutError is one, too
            last_line = str(fault).splitlines()[-1]
            raise NoAnswer(f"it or its node died ({type(fault).__name__}: {last_line})") from None
        self.deadline = math.inf
        if isinstance(answer, BadInput | NoAnswer):
            raise answer
        return answer

    def close(self) -> None:
        ray.kill(self._actor)  # the process dies with the actor

    def end(self) -> None:
        """Ray waits for it."""
