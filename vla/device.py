"""Choose the device that a policy runs on, and limit how much of its memory this process may take."""

import os
from pathlib import Path

import torch

from contracts import GIB, BadInput
from vla.hub import check_checkpoint_name

LARGE_CHECKPOINT_BYTES = 2 * GIB  # checkpoints larger than this run on a CPU only with --device cpu
# --memory-budget names the size that a GPU is sold with, and a GPU reports less: an RTX 4090 23.6 GiB of its 24, an
# A100 79.2 of 80, and with error correction an L40S 44.4 of 48, a T4 14.6 of 16. This is the largest ratio allowed.
SOLD_TO_REPORTED = 1.1


def count_gpus() -> int:
    """How many GPUs torch can use: none if the driver is too old for it, though nvidia-smi lists some."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_device(requested: str | torch.device, checkpoint: str | None = None) -> torch.device:
    """The device that `--device` names. Raises BadInput when it does not exist.

    `auto` and `cuda` mean this process's GPU: each rank on a machine has its own. Without a GPU `auto` means the CPU,
    unless `checkpoint` is too large for a CPU, which raises BadInput, too.
    """
    name = str(requested)
    num_gpus = count_gpus()
    if name != "cpu" and num_gpus == 0 and torch.cuda.device_count() > 0:
        raise BadInput(
            f"torch {torch.__version__} cannot use the GPU that is here: update its driver, install the torch that "
            "suits it, or use --device cpu"
        )
    if name == "auto" and num_gpus == 0:
        if checkpoint is not None and is_large(checkpoint):
            policy = "a 7B policy"
            if not Path(checkpoint).exists() and Path(checkpoint).parent.is_dir():  # most likely mistyped
                policy = "no such folder, so it is taken for a 7B of the Hugging Face hub, which"
            raise BadInput(
                f"checkpoint {checkpoint}: {policy} needs a CUDA GPU of 24 GB, but torch sees none; "
                "`make demo` trains a small policy here (to force the CPU: --device cpu)"
            )
        name = "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name in ("auto", "cuda"):  # always with an index: for some libraries "cuda" means the first GPU
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if name not in {f"cuda:{index}" for index in range(num_gpus)}:
        raise BadInput(
            f"--device {requested}: there is no {name}, torch sees {num_gpus} CUDA GPUs; start no more processes than "
            "GPUs, or use --device cpu"
        )
    return torch.device(name)


def is_large(checkpoint: str) -> bool:
    """Whether a base checkpoint is too large for a CPU: a folder if its weights are, a hub id always.

    Raises BadInput for a name that is neither.
    """
    check_checkpoint_name(checkpoint)
    base = Path(checkpoint).expanduser()
    if not base.is_dir():
        return True
    return sum(file.stat().st_size for file in base.glob("*.safetensors")) > LARGE_CHECKPOINT_BYTES


def limit_memory(gib: float | None, device: torch.device) -> None:
    """Limit this process's tensors to `gib` GiB of GPU memory, all of it for up to SOLD_TO_REPORTED times what it has.

    None sets no limit. Raises BadInput for a larger value.
    """
    if gib is None:
        return
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    if gib * GIB > SOLD_TO_REPORTED * total:
        raise BadInput(
            f"--memory-budget {gib:g}: {device} has {total / GIB:.1f} GiB of GPU memory; give less, or nothing"
        )
    fraction = min(gib * GIB / total, 1.0)
    torch.cuda.set_per_process_memory_fraction(fraction, device.index or 0)
