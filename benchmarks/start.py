"""How long every command line takes to answer --help: from the disk (after the page cache was dropped) and again.

sudo .venv/bin/python -m benchmarks.start     # root: only root may drop the page cache; others get the second figure
"""

import subprocess
import sys
import time
from pathlib import Path

COMMANDS = (
    ("train_grpo.py",), ("eval.py",), ("-m", "rl.report"), ("-m", "vla.merge"), ("-m", "workshop.sft"),
    ("-m", "workshop.tiny"), ("-m", "workshop.demos"),
    ("-m", "workshop.make_init_states"), ("-m", "workshop.lowpoly"),
)  # fmt: skip
WARM_STARTS = 3


def main() -> None:
    for command in COMMANDS:
        cold = f"{seconds(command):5.2f} s" if drop_page_cache() else "needs root"
        warm = sorted(seconds(command) for _ in range(WARM_STARTS))[WARM_STARTS // 2]
        print(f"{command[-1]:<22} cold {cold}   warm {warm:5.2f} s", flush=True)


def seconds(command: tuple[str, ...]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *command, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def drop_page_cache() -> bool:
    subprocess.run(["sync"], check=True)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
