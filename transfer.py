"""From the CPU's memory to a device's, without waiting for what the device still has to do."""

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`. A GPU gets it after what it was asked before; the caller goes on at once.

    A plain `.to(device)` waits until the GPU has done all of that: then nothing is left that hides the Python before
    the next kernel. Pinned memory goes back to torch's pool when the copy has been made.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
