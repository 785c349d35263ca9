"""train_grpo.py from its command line to its exit code, on the fakes: all of the program but network and simulator.

What is left out is what takes long and has tests of its own: checks before the run, pictures, videos, the report.
`at` makes something happen at one of the `MOMENTS` of a run.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

import envs.pool
import preflight
import rl.checkpoints
import rl.evaluation
import rl.report
import rl.rollout
import rl.run
import train_grpo
from configs.cli import main_guard
from tests.fakes import FakePolicy, FakePool, Script, observation

FLAGS = [
    "--preset", "smoke", "--warmup-steps", "24", "--transition-steps", "24", "--total-steps", "72", "--n-steps", "24",
    "--eval-interval", "48", "--n-epochs", "1", "--batch-size", "3", "--micro-batch-size", "3",
]  # fmt: skip
# What differs from run to run.
VARYING = ("time/", "rollout/time_s", "rollout/env_steps_per_s", "train/time_s", "system/")

# Moment of a run -> (where in the program, at which call of it): before there is a run folder, and then.
LOADING = {"load": (preflight, "load_policy", 1), "preflight": (preflight, "check_setup", 1)}
RUNNING = {
    "baseline evaluation": (rl.evaluation, "validate", 1),
    "rollout": (rl.rollout, "decide", 15),  # 6 of the baseline, 6 of the first update: the middle of the second rollout
    "update": (torch.optim.AdamW, "step", 4),  # half of the second update
    "metrics line": (rl.run, "write_all", 3),
    "checkpoint": (torch, "save", 3),  # the adapter is on the disk already
    "pointer": (rl.checkpoints, "point", 4),  # latest, best, latest; then the second update's
    "final evaluation": (rl.evaluation, "validate", 3),
    "report": (rl.report, "conclude", 1),
}
MOMENTS = LOADING | RUNNING

looked_up_once = cache(partial(rl.run.provenance, []))


def use_fakes(monkeypatch) -> None:
    """Let train_grpo.py run on a policy of a few hundred numbers and scripted episodes."""
    for owner, name, fake in (
        (preflight, "load_policy", lambda *_, **__: FakePolicy(adapter_scale=0.1)),
        (preflight, "fit_micro_batch", lambda *_, **__: (3, "")),
        (preflight, "check_machine", lambda *_, **__: None),
        (preflight, "check_setup", lambda *_, **__: observation(1.0, 2.0, 3.0)),
        (preflight, "log_setup", lambda *_, **__: None),
        (envs.pool, "make_pool", lambda *_, **__: FakePool(lambda *_: Script(env_steps=8, success=True))),
        (rl.evaluation, "write_video", lambda path, frames: path.write_bytes(b"a video")),
        (rl.report, "conclude", lambda *_, **__: None),
    ):
        monkeypatch.setattr(owner, name, fake)
    found = looked_up_once()
    monkeypatch.setattr(rl.run, "provenance", lambda argv: found | {"argv": list(argv)})
    monkeypatch.setattr(logging.getLogger(), "handlers", list(logging.getLogger().handlers))  # a run sets its own


def command_line(monkeypatch, *argv: str) -> int:
    """Exit code of `python train_grpo.py ARGV`."""
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *argv])
    return main_guard("train_grpo.py", train_grpo.main)


def at(monkeypatch, moment: str, act: Callable[..., Any]) -> None:
    """When the run comes to the moment, call `act` (with the arguments that are there) first."""
    owner, name, count = MOMENTS[moment]
    original, calls = getattr(owner, name), 0

    def reached(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == count:
            act(*args)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, reached)


def raising(error: BaseException) -> Callable[..., None]:
    def act(*_, **__):
        raise error

    return act


def killed(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def results(run: Path) -> tuple[list, list, dict]:
    """Records without durations, and the last checkpoint's weights and state."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if not key.startswith(VARYING)} for row in rows]
    latest = rl.checkpoints.latest_checkpoint(run)
    weights = [np.load(latest / f"{name}.npy").tobytes() for name in ("adapter", "bias")]
    state = torch.load(latest / "trainer.pt")["state"]
    return rows, weights, {key: value for key, value in state.items() if key != "metrics_bytes"}


def only_run(folder: Path) -> Path:
    (run,) = folder.iterdir()
    return run


def flags_into(folder: Path) -> list[str]:
    return [*FLAGS, "--output", str(folder)]


def one_line(captured: str) -> str:
    (line,) = captured.splitlines()
    assert line.startswith("train_grpo.py: ")
    return line


@cache
def straight() -> tuple[list, list, dict]:
    """The results of a run that nothing stops."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        use_fakes(patch)
        assert command_line(patch, *flags_into(Path(folder))) == 0
        return results(only_run(Path(folder)))


def resume(run: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:  # what stopped the run is gone now
        use_fakes(patch)
        return command_line(patch, "--resume", str(run))


def in_a_process_of_its_own(run: Callable[[pytest.MonkeyPatch], int]) -> int:
    """Fork, run, and return how the child ended: a code, or minus a signal. Its patches are its own."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the parent's threads do not exist here
        with pytest.MonkeyPatch.context() as patch:
            os._exit(run(patch))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def stopped_at(moment: str, act: Callable[..., Any], folder: Path, *flags: str) -> int:
    """How a run in a process of its own ends that does `act` at the moment."""

    def run(patch) -> int:
        at(patch, moment, act)
        return command_line(patch, *flags_into(folder), *flags)

    return in_a_process_of_its_own(run)
