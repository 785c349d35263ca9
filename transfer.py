"""From the CPU's memory to a device's, without waiting for what the device still has to do."""

import numpy as np
import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`. A GPU gets it after what it was asked before; the caller goes on at once.

    A plain `.to(device)` waits until the GPU has done all of that: then nothing is left that hides the Python before
    the next kernel. Pinned memory goes back to torch's pool when the copy has been made.
    """
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty_like(tensor, pin_memory=True)
    # numpy copies in this thread. torch would share the copy of two images out among all of its threads, and to wake
    # them takes longer: some 4 ms on a host with 32 cores, a fifth of a decision (docs/RESULTS.md).
    np.copyto(pinned.numpy(), tensor.numpy())
    return pinned.to(device, non_blocking=True)
