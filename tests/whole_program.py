"""train_grpo.py from its command line to its exit code, on the fakes: all of the program but network and simulator.

What is left out is what takes seconds and has tests of its own: checks before the run, pictures, videos.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import rl.evaluation_files
import rl.report
import train_grpo
from configs.cli import main_guard
from tests.fakes import FakePolicy, FakePool, Script, observation

FLAGS = [
    "--preset", "smoke", "--warmup-steps", "24", "--transition-steps", "24", "--total-steps", "72", "--n-steps", "24",
    "--eval-interval", "48", "--n-epochs", "1", "--batch-size", "3",
]  # fmt: skip
UPDATES = 3


def script(task_id: int, init_state: int) -> Script:
    return Script(env_steps=8, success=True)


def use_fakes(monkeypatch, num_envs: int = 1) -> None:
    """Let train_grpo.py run on a policy of a few hundred numbers and scripted episodes."""
    for name, fake in {
        "load_policy": lambda *_: FakePolicy(adapter_scale=0.1),
        "make_pool": lambda *_: FakePool(script, num_envs),
        "fit_to_memory": lambda config, *_: config,
        "check_setup": lambda *_, **__: observation(1.0, 2.0, 3.0),
        "log_setup": lambda *_: None,
    }.items():
        monkeypatch.setattr(train_grpo, name, fake)
    monkeypatch.setattr(rl.evaluation_files, "write_video", lambda path, frames: path.write_bytes(b"a video"))
    monkeypatch.setattr(logging.getLogger(), "handlers", list(logging.getLogger().handlers))  # a run sets its own
    monkeypatch.setattr(rl.report, "write_report", lambda stored: stored.folder / "report" / "index.html")


def command_line(monkeypatch, *argv: str) -> int:
    """Exit code of `python train_grpo.py ARGV`."""
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *argv])
    return main_guard("train_grpo.py", train_grpo.main)


def flags_into(folder: Path) -> list[str]:
    return [*FLAGS, "--output", str(folder), "--micro-batch-size", "3"]
