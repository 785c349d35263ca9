"""Whose turn it is on memory of a GPU that several processes have mapped: the GPU waits, not their Python.

A turn ends where its owner's work on that GPU stands when `record` is called; who waits for it goes on from there. CUDA
looks at the event when it is asked to wait, so the other process must have recorded by then: a message tells. Every
event belongs to the GPU that owns the memory: processes that wait for an event of another GPU hung on the H200s where
this was tried. On a CPU work is done when its call returns, and there is nothing to wait for.

Source: CUDA programming guide, interprocess communication; cudaEventInterprocess.
"""

import torch


def new_turn(device: torch.device) -> torch.cuda.Event | None:
    """An event that can be sent to another process (torch.multiprocessing); it has ended. None on a CPU."""
    if device.type != "cuda":
        return None
    turn = torch.cuda.Event(interprocess=True)
    record(turn, device)
    return turn


def record(turn: torch.cuda.Event | None, device: torch.device) -> None:
    """This process's turn ends with the work that it has asked of `device` so far."""
    if turn is not None:
        turn.record(torch.cuda.current_stream(device))


def wait_for(turn: torch.cuda.Event | None, device: torch.device) -> None:
    """Work that this process asks of `device` from now on begins after the turn that was recorded last."""
    if turn is not None:
        torch.cuda.current_stream(device).wait_event(turn)
