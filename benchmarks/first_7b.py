"""Two tools of scripts/first_7b.sh: the facts of a machine, and the memory and time that a command takes.

    python -m benchmarks.first_7b machine FILE               # GPU, driver, processor, memory, versions
    python -m benchmarks.first_7b measure FILE COMMAND...    # run the command; its lines, seconds and peak of the GPU

Each writes a JSON file, from which benchmarks/first_7b_report.py makes the page that a volunteer sends. The peak is
that of the whole GPU, as nvidia-smi reports it twice a second: weights, tensors, CUDA contexts, the simulators' images,
and other programs.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.background import repeated_beside
from command_line import main_guard
from contracts import read_json, write_json
from experiment.provenance import describe_machine, git_state, package_versions

SAMPLING_INTERVAL_S = 0.5
PACKAGES = ("python", "torch", "transformers", "timm", "peft", "mujoco", "robosuite", "hf-libero")
GPU_FIELDS = ("name", "driver_version", "memory.total", "power.limit")  # of nvidia-smi


@dataclass
class GpuMemory:
    """The used memory of a whole GPU in MiB, as nvidia-smi reports it."""

    total: int
    at_start: int
    peak: int

    def sample(self) -> None:
        values = query_gpu("memory.used")
        if values is not None:
            self.peak = max(self.peak, int(values[0]))


def query_gpu(*fields: str) -> list[str] | None:
    """The values of nvidia-smi's fields for the GPU that torch uses; None without such a GPU."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
        f"--id={gpu}",
    ]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return [value.strip() for value in finished.stdout.splitlines()[0].split(",")]


def facts_of_machine() -> dict[str, object]:
    """What a reader needs to compare figures, by name. It names no user, host or folder."""
    import torch

    processors = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    (memory_kib,) = re.findall(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    versions = package_versions()
    machine = describe_machine()
    return {
        **machine,
        "processor": processors[0] if processors else machine["processor"],
        "main_gib": round(int(memory_kib) / 2**20, 1),
        "gpu": dict(zip(GPU_FIELDS, query_gpu(*GPU_FIELDS) or (), strict=False)),
        "cuda": torch.version.cuda,
        "versions": {name: versions[name] for name in PACKAGES if name in versions},
        "git": git_state(),
    }


@contextmanager
def watched_gpu() -> Iterator[GpuMemory | None]:
    """Watch the memory of the whole GPU in this block; None without a GPU that reports it."""
    values = query_gpu("memory.total", "memory.used")
    if values is None or not all(value.isdigit() for value in values):  # [N/A] where a GPU shares main memory
        yield None
        return
    total, used = map(int, values)
    memory = GpuMemory(total, at_start=used, peak=used)
    with repeated_beside(memory.sample, SAMPLING_INTERVAL_S):
        yield memory


def measure(file: Path, command: Sequence[str]) -> int:
    """Run the command and write what it printed and took to the file; returns its exit code.

    If the file holds an earlier part of the same work, seconds are added to its seconds, and the higher peak stays.
    """
    started = time.perf_counter()
    printed = []
    with watched_gpu() as memory:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line.rstrip("\n"))
        exit_code = process.wait()
    seconds = time.perf_counter() - started
    gpu = None if memory is None else asdict(memory)
    if file.exists():
        earlier = read_json(file)
        seconds += earlier["seconds"]
        if gpu is not None and earlier["gpu"] is not None:
            gpu["peak"] = max(gpu["peak"], earlier["gpu"]["peak"])
    write_json(file, {"seconds": round(seconds), "gpu": gpu, "printed": printed})
    return exit_code


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        "benchmarks.first_7b", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tool", choices=("machine", "measure"))
    parser.add_argument("file", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    if args.tool == "machine":
        write_json(args.file, facts_of_machine())
        print(args.file.read_text(), end="")
        return
    if not args.command:
        parser.error("a command is missing")
    # An interrupt from the terminal reaches the command, too. This process waits until the command has ended by it.
    signal.signal(signal.SIGINT, lambda signal_number, frame: None)
    raise SystemExit(measure(args.file, args.command))


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.first_7b", main))
