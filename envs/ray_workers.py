"""Workers of a pool on the nodes of a Ray cluster, one machine or many: an actor each, which has the process there.

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
from envs.worker import NoAnswer, Worker

try:
    import ray
    from ray.exceptions import RayError
except ImportError:
    raise BadInput(
        "Ray is not installed; run: pip install -r requirements-ray.txt, on every machine"
    ) from None

GRACE_S = 30.0  # beyond a deadline, which the node itself keeps: then the node is lost


def connect() -> str:
    """Join the cluster of RAY_ADDRESS, or of this machine, or start one that ends with us; says what it has."""
    if not ray.is_initialized():
        address, handler = os.environ.get("RAY_ADDRESS", ""), signal.getsignal(signal.SIGTERM)
        try:
            if match := re.search(r"([^/:]+):(\d+)$", address):  # Ray tries for a quarter of an hour
                socket.create_connection((match[1], int(match[2])), timeout=10).close()
            ray.init(include_dashboard=False, logging_level="WARNING")
        except (OSError, RuntimeError, ValueError) as fault:
            found = f"no Ray cluster at RAY_ADDRESS={address} ({first_line(fault)})"
            raise BadInput(f"{found}: correct or unset it; a cluster begins with: ray start --head") from None
        finally:
            signal.signal(signal.SIGTERM, handler)  # Ray's would end the program unsaved
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return f"Ray {ray.__version__}, {len(nodes)} node(s), {ray.cluster_resources().get('CPU', 0):.0f} CPUs"


class Relay:
    """An actor: on its node, a worker and its answers."""

    def __init__(self, *recipe: Any) -> None:
        self._worker = Worker(*recipe)

    def answer(self, arguments: tuple, timeout_s: float) -> bytes:
        """Pickled, as in a pipe: arrays that Ray unpickles are read-only, and its shared memory keeps them."""
        self._worker.request(*arguments, timeout_s=timeout_s)
        try:
            return pickle.dumps(self._worker.receive())
        except (BadInput, NoAnswer) as problem:
            return pickle.dumps(type(problem)(f"{problem}, on {socket.gethostname()}"))


class RayWorker:
    """What `envs.worker.Worker` is, on some node. One whose node is lost has died; the next one starts on another."""

    def __init__(self, make: Callable[..., Callable], *recipe: object) -> None:
        # Nodes take turns, which they do not for actors that need nothing, and there is always room, also when one is
        # lost. Ray restarts an actor that was to start on a dying node.
        options = {"num_cpus": 0.001, "scheduling_strategy": "SPREAD", "max_restarts": -1}
        self._actor = ray.remote(**options)(Relay).remote(make, *recipe)
        self.deadline = math.inf

    def request(self, *arguments: object, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s + GRACE_S
        self._answer = self._actor.answer.remote(arguments, timeout_s)

    @staticmethod
    def wait(workers: Sequence["RayWorker"], timeout_s: float) -> list["RayWorker"]:
        """Those that have answered or died; waits for the first one, at most `timeout_s`."""
        answers = [worker._answer for worker in workers]
        there, others = ray.wait(answers, timeout=timeout_s)
        if others:
            there += ray.wait(others, num_returns=len(others), timeout=0)[0]
        return [worker for worker in workers if worker._answer in there]

    def receive(self) -> Any:
        """Wait for the answer. Raises BadInput that is the answer, and NoAnswer for a fault, a death or a hang."""
        try:
            answer = pickle.loads(ray.get(self._answer, timeout=max(0.0, self.deadline - time.monotonic())))
        except RayError as fault:  # GetTimeoutError, too
            raise NoAnswer(
                f"it or its node died ({type(fault).__name__}: {str(fault).splitlines()[-1]})"
            ) from None
        self.deadline = math.inf
        if isinstance(answer, BadInput | NoAnswer):
            raise answer
        return answer

    def close(self) -> None:
        """The process dies with the actor."""
        ray.kill(self._actor)

    def end(self) -> None:
        """Ray waits for it."""
