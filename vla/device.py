"""The device that a command line names."""

import torch

from errors import BadInput


def named_device(name: str) -> torch.device:
    """`cpu`, `cuda`, `cuda:1` and so on, or `auto`: a GPU if there is one. Raises BadInput when it is missing."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"--device {name}: expected auto, cpu, cuda or cuda:1 and so on") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"--device {name}: this machine has no such usable CUDA device; use --device cpu")
    return device
