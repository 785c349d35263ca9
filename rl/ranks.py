"""The processes that train one policy together, how they are started, and the few things that they do in common.

Every rank plays episodes of its own. Then all hold all trajectories and decide the same from them. Only forward and
backward passes are divided, and their gradients added up. With one process every operation here is the identity.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from contracts import BadInput, SelfCheckError, first_line
from rl.rollout import Rollout, rollout
from rl.trajectory import Episode

if TYPE_CHECKING:
    from envs.pool import Pool
    from vla.policy import Policy

log = logging.getLogger(__name__)

BYTES_PER_MESSAGE = 2**25  # of gradients
PATIENCE = timedelta(
    minutes=30
)  # then the others are taken for dead; the slowest rollout and rank 0's disk take less
GRACE_S = 30.0  # for ranks to end by themselves (closing wandb) after one has stopped; then they are ended


class RanksLost(SystemExit):
    """Another rank stopped or does not answer: this one ends, too, with one line and exit code 1."""


@dataclass(frozen=True)
class Ranks:
    """This process (`rank`) among `size` that train together."""

    rank: int = 0
    size: int = 1
    objects: dist.ProcessGroup | None = (
        None  # gloo: Python objects take no GPU memory, a waiting rank burns no core
    )

    @property
    def is_main(self) -> bool:
        """Whether this rank logs, and writes files."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value; also a point at which all ranks wait for one another."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._answer_expected():
            dist.all_gather_object(values, value, group=self.objects)
        return values

    def from_main(self, value: Any) -> Any:
        """Rank 0's value; what the others pass is ignored."""
        return self.gather(value)[0]

    def divide(self, count: int, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """`compute` of the rows 0 .. count - 1, a part of them on each rank: compute((n,) rows) -> (n, ...) on the CPU.

        All ranks get the same bits. The last ones repeat rows: all compute equally many.
        """
        part = -(-count // self.size)
        own = torch.arange(self.rank * part, (self.rank + 1) * part) % count
        return torch.cat(self.gather(compute(own)))[:count]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the ranks, in place: recorded passes know where a gradient lies.

        In flat parts: tensor by tensor (878) it takes 35 ms instead of 7 on two H200s, and a full GPU has no room for a
        copy of all. Where no rank has a gradient, none appears: AdamW would decay its parameter.
        """
        if self.size == 1:
            return
        reached = map(any, zip(*self.gather([p.grad is not None for p in parameters]), strict=True))
        gradients = []
        for parameter in (p for p, is_reached in zip(parameters, reached, strict=True) if is_reached):
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(parameter.grad)
        with self._answer_expected():
            for part in _take_tensors(gradients, BYTES_PER_MESSAGE):
                flat = _flatten_dense_tensors(part)
                dist.all_reduce(flat)
                torch._foreach_copy_(part, _unflatten_dense_tensors(flat, part))

    def check_same_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        """All ranks hold the same float32 parameters: the sums of their bits as integers agree."""
        if self.size == 1:
            return
        own = torch.stack([p.detach().view(torch.int32).sum(dtype=torch.int64) for p in parameters]).tolist()
        if any(others != own for others in self.gather(own)):
            raise SelfCheckError(
                "the ranks no longer train the same policy: trainable tensors differ after an update; resume from the "
                "last checkpoint, on machines of one kind"
            )

    def leave(self) -> None:
        """After the last common act."""
        if self.size > 1:
            self.gather(None)
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _answer_expected(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, pickle.UnpicklingError) as error:
            raise RanksLost(
                f"rank {self.rank}: another rank has stopped, its own message says why, or was silent for too long "
                f"({first_line(error)})"
            ) from error


ALONE = Ranks()


def shared_rollout(
    ranks: Ranks,
    policy: Policy,
    pool: Pool,
    episodes: Iterable[Episode],
    n_steps: int | None = None,
    **options: Any,
) -> Rollout:
    """`rl.rollout.rollout` divided among the ranks, each an equal part of `n_steps`: all get all trajectories."""
    if ranks.size == 1:
        return rollout(policy, pool, episodes, n_steps=n_steps, **options)
    by_group = n_steps is not None  # else every episode is played anyway: then single ones divide more evenly
    own_episodes = (e for e in episodes if (e.group if by_group else e.index) % ranks.size == ranks.rank)
    part = None if n_steps is None else math.ceil(n_steps / ranks.size)
    own = rollout(policy, pool, own_episodes, n_steps=part, **options)
    without_frames = replace(own, trajectories=[replace(t, frames=[]) for t in own.trajectories])
    parts = ranks.gather(without_frames)
    parts[ranks.rank] = own
    return Rollout(
        trajectories=sorted((t for part in parts for t in part.trajectories), key=lambda t: t.episode.index),
        times={key: sum(part.times[key] for part in parts) / ranks.size for key in own.times},
        wall_s=max(part.wall_s for part in parts),
        errors=sum(part.errors for part in parts),
    )


def start_ranks() -> None:
    """--data-parallel: run this very command once per visible GPU, and exit; a process that is a rank goes on."""
    if "WORLD_SIZE" in os.environ:
        return
    if (count := torch.cuda.device_count()) > 1:
        sys.exit(run_as_ranks([sys.executable, *sys.argv], count))
    log.warning("--data-parallel: there is no second GPU, and the run goes on in one process")


def run_as_ranks(command: Sequence[str], size: int) -> int:
    """Run `size` processes of one command, each told its rank; returns the first exit code that is not 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    common = (
        {"OMP_NUM_THREADS": "1"} | os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    )  # as torchrun
    common |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    die_with_launcher = partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    ranks: list[subprocess.Popen] = []

    def send(number: int, _: object = None) -> None:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, send)
    for rank in range(size):
        env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        # A session of its own: what Ctrl-C sends to the terminal's processes reaches a rank once, from here.
        ranks.append(subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=die_with_launcher))
    while not (failed := [p.returncode for p in ranks if p.poll()]) and any(
        p.returncode is None for p in ranks
    ):
        time.sleep(0.1)
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_S
        while any(p.poll() is None for p in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)
        send(number)
    return next((code if code > 0 else 128 - code for code in failed), 0)


def join_ranks(device: torch.device | str = "auto") -> Ranks:
    """Meet the other ranks, and make this one's GPU the current one; as plain `python`, nothing happens."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    on_gpu = torch.cuda.is_available() and torch.device("cuda" if device == "auto" else device).type == "cuda"
    try:
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
        objects = dist.new_group(backend="gloo", timeout=PATIENCE)
        dist.all_reduce(
            torch.zeros(1, device="cuda" if on_gpu else "cpu")
        )  # NCCL takes its memory before we measure
    except (RuntimeError, ValueError) as error:
        raise BadInput(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} cannot meet the others ({first_line(error)}): "
            "start as many processes on every machine, with one main_process_ip and main_process_port"
        ) from None
    return Ranks(dist.get_rank(), dist.get_world_size(), objects)  # type: ignore[arg-type]  # never outside the group
