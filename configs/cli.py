"""The command lines of train_grpo.py and eval.py: presets, and the flags of a stored run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from command_line import parse_flags
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
from contracts import BadInput, read_json

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
