"""The first device's end of the connection to one replica, and what becomes of the program when a replica is gone."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from child_process import end_child, start_child
from vla.replica import Backward, Exchange, Forward, Recompute, Start

ANSWER_S = 600.0  # for a replica to ask its device for something; the first forward pass may compile
FAREWELL_S = 120  # for the program to say that a replica is gone and to end, where wandb may take 60 of them
NOTICE_S = 10.0  # for the program to find out by itself that a replica is gone


class ReplicaHandle:
    """The connection to one replica."""

    def __init__(self, device: torch.device, turn: torch.cuda.Event | None):
        """turn: the replica's on all memory that it shares with the first device."""
        self.device, self.turn = device, turn
        self.transit = torch.empty(0)  # where outputs and their gradients pass; on the first device
        self.has_gradient = False  # that no `reduce_gradients` has fetched
        self._is_behind = False  # with a request, whose answer nobody has received
        self.may_end = False
        self._noticed = threading.Event()  # that it has ended, by `catch_up`
        self.process, self.connection = start_child("vla.replica", ANSWER_S)
        threading.Thread(target=self._watch, daemon=True).start()
        with suppress(OSError):
            self.connection.send_bytes(multiprocessing.current_process().authkey)

    def transit_for(self, size: int, device: torch.device) -> Tensor | None:
        """New transit memory for `size` numbers where that of before is too small."""
        if self.transit.numel() >= size:
            return None
        self.transit = torch.empty(size, device=device).share_memory_()
        return self.transit

    def ask(self, request: Recompute | Exchange) -> None:
        self.send(request)
        self.catch_up()

    def send(self, request: Start | Forward | Backward | Recompute | Exchange) -> None:
        """At once, if the replica is not behind."""
        self.catch_up()
        with suppress(OSError):  # it has died: the next catch_up() finds out
            self.connection.send(request)
        self._is_behind = True

    def catch_up(self, timeout_s: float = ANSWER_S) -> None:
        """Until the replica has asked its device for what was sent last, or raise what the replica raised.

        RuntimeError when it is dead or hangs.
        """
        if not self._is_behind:
            return
        try:
            self._receive(timeout_s)
        except Exception:  # whatever it is, the replica has ended
            self._noticed.set()
            end_in_any_case(self.device)
            raise
        self._is_behind = False

    def _watch(self) -> None:
        """Notice its death, too, while Python waits for the first GPU, and that for the replica."""
        while self.process.poll() is None:
            time.sleep(1.0)
        if self.may_end:
            return
        end_in_any_case(self.device)
        if not self._noticed.wait(NOTICE_S):
            ending = end_child(self.process)
            what = f"the policy's replica on {self.device} died ({ending})"
            print(f"{what}: the program waits for what it had begun, and ends within {FAREWELL_S} s", file=sys.stderr)

    def _receive(self, timeout_s: float) -> None:
        where = f"the policy's replica on {self.device}"
        try:
            if not self.connection.poll(timeout_s):
                raise TimeoutError
            answer = self.connection.recv()
        except (TimeoutError, BlockingIOError):  # the latter: stopped in the middle of an answer
            ending = end_child(self.process, show_stack=True)
            raise RuntimeError(f"{where} gave no answer in {timeout_s:.0f} s ({ending}): see its stack above") from None
        except (EOFError, OSError):
            ending = end_child(self.process)
            hint = "its last words are above; if there are none, the system ended it, perhaps for want of memory"
            raise RuntimeError(f"{where} died ({ending}): {hint}") from None
        if isinstance(answer, Exception):
            raise type(answer)(f"{where}: {answer}")


def end_all(handles: Sequence[ReplicaHandle]) -> None:
    """Idle replicas go by themselves, at the end of the connection; one at work when it is done, or is killed."""
    for handle in handles:
        if handle.process.poll() is not None:  # perhaps by the signal that ends this program, too
            end_in_any_case(handle.device)
        handle.may_end = True
        handle.connection.close()
    for handle in handles:
        end_child(handle.process)


def end_in_any_case(device: torch.device) -> None:
    """A replica on `device` is gone: let the program end, by SIGALRM if it has not ended otherwise FAREWELL_S from now.

    If the replica's turn (vla.turns) had not come to its end, the first GPU waits for it for ever; to record the event
    again, from here, does not free it. So does every call that waits for that GPU, and among them may be those with
    which libraries take their leave at a program's end. Seen on H200s after most kills in the middle of an update. A
    signal without a handler ends what hangs in any library.
    """
    if device.type == "cuda" and signal.getitimer(signal.ITIMER_REAL)[0] == 0:  # once: not later at the second call
        signal.alarm(FAREWELL_S)
