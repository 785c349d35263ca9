"""The command lines: flags from dataclasses, presets, stored runs, exit codes."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tyro

from configs.config import (
    CHANGEABLE_ON_RESUME,
    EvalConfig,
    TrainConfig,
    changed,
    differing_fields,
    from_dict,
    require,
)
from configs.presets import PRESETS, PUBLIC_CHECKPOINTS
from contracts import BadInput, TimeIsUp, read_json

T = TypeVar("T")
NO_CHECKPOINT = "--checkpoint is missing: name a folder or a hub id (see --help)"


@dataclass(frozen=True)
class Command:
    """Improve a vision-language-action policy on LIBERO tasks by reinforcement learning."""

    config: TrainConfig
    preset: str = "libero_spatial"
    """Settings to start from: libero_spatial, libero_object, libero_goal, libero_10, libero_90, metaworld_mt50 (7B), rl
    (7B, PPO alone with large rollouts), tiny (CPU), smoke (seconds). Left out: the 7B preset of --task-suite."""
    resume: str | None = None
    """Run folder to continue (None: a new run)."""
    check_only: bool = False
    """Check the machine, the simulator and the checkpoint, then stop."""


def parse_train(argv: Sequence[str]) -> Command:
    """The command that train_grpo.py's `argv` (without the program's name) asks for. Raises BadInput."""
    # Three flags decide what the other flags change.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for spellings in (("--preset",), ("--resume",), ("--task-suite", "--task_suite")):
        first.add_argument(*spellings, nargs="?")
    start = first.parse_known_args(list(argv))[0]
    if start.resume is None:
        preset = start.preset or (start.task_suite if start.task_suite in PRESETS else "libero_spatial")
        require(preset in PRESETS, f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}")
        default = PRESETS[preset]
        if preset == "rl" and start.task_suite in PUBLIC_CHECKPOINTS:
            default = changed(default, checkpoint=PUBLIC_CHECKPOINTS[start.task_suite])
        command = parse_flags(Command, argv, prog="train_grpo.py", default=Command(default, preset=preset))
        require(command.config.model.checkpoint is not None, NO_CHECKPOINT)
        return command

    require(
        start.preset is None, "--preset and --resume contradict each other: a resumed run keeps its settings"
    )
    path = Path(start.resume, "config.json")
    try:
        stored = from_dict(read_json(path).get("config"), str(path))
    except BadInput as problem:
        raise BadInput(f"--resume {start.resume}: not a run folder of this version: {problem}") from None
    command = parse_flags(Command, argv, prog="train_grpo.py", default=Command(stored))
    differing = differing_fields(stored, command.config)
    refused = [
        f"{name} (run: {a}, now: {b})"
        for name, (a, b) in differing.items()
        if name not in CHANGEABLE_ON_RESUME
    ]
    said = "; leave these flags out, or start a new run"
    require(
        not refused, f"--resume {start.resume}: the run has another configuration: {', '.join(refused)}{said}"
    )
    return command


def parse_eval(argv: Sequence[str]) -> EvalConfig:
    """What eval.py's `argv` asks for. Raises BadInput."""
    config = parse_flags(EvalConfig, argv, prog="eval.py")
    require(bool(config.model.checkpoint), NO_CHECKPOINT)
    return config


def parse_flags(kind: type[T], argv: Sequence[str], prog: str, default: T | None = None) -> T:
    """`argv` as an instance of the dataclass `kind`, its sections without prefixes. tyro's error boxes are BadInput."""
    box = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(kind, args=list(argv), prog=prog, config=(tyro.conf.OmitArgPrefixes,), **options)
    except SystemExit as stop:
        if stop.code == 0:  # --help
            raise
        lines = [line.strip("│ ") for line in box.getvalue().splitlines() if not re.match(r"[╭╰]|│ ─", line)]
        sentence = re.split(r"\s*(?:Argument helptext|For full helptext)", " ".join(" ".join(lines).split()))[
            0
        ]
        raise BadInput(f"{sentence} (see --help)") from None


def main_guard(program: str, main: Callable[[Sequence[str]], object]) -> int:
    """Run `main(argv)` of a program; returns 0 (done, time is up), 2 (the user can repair it) or 130 (interrupted)."""
    # PyTorch's threads wait for one another actively: beside another busy program an update takes 5 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        program += f", rank {os.environ['RANK']}"

    def leave(number: int, frame: object) -> None:
        os.write(2, f"{program}: interrupted\n".encode())
        os._exit(130)

    # Until `interruptible` takes over, either signal ends the program.
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGINT is in a shell's background job
            signal.signal(number, leave)
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BadInput as problem:
        print(f"{program}: {problem}", file=sys.stderr)
        return 2
    except TimeIsUp as reason:
        print(f"{program}: {reason}")
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads the output any more (`| head`): no complaint at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
