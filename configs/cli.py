"""Read the command lines of train_grpo.py and eval.py, starting from a preset or from the settings of a stored run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import tyro

from command_line import parse_flags
from configs.config import TrainConfig, changeable_on_resume, config_from_json, differing_fields
from configs.eval_config import EvalConfig
from configs.presets import PRESETS, Preset, with_checkpoint
from contracts import BadInput, read_json


@dataclass(frozen=True)
class Command:
    """Improve a vision-language-action policy on LIBERO tasks by reinforcement learning.

    Most used:
    --check-only: check machine, simulator and checkpoint, and stop
    --preset tiny: the bundled small policy, which needs no GPU
    --task-suite SUITE --task-ids ID ...: what to learn
    --checkpoint PATH_OR_HUB_ID: where to start
    --total-steps N, --max-hours H: when to end
    --resume RUN: continue a run that was stopped
    --memory-budget GIB, --num-envs N, --data-parallel: how much of this machine
    """

    config: TrainConfig = field(default_factory=TrainConfig)
    # Settings to start from, which the other flags change. rl: GRPO alone with large rollouts; guide: the numbers of
    # the design guide that this project began with; tiny: a small policy, for a CPU; smoke: a test of seconds. None:
    # the defaults, which, like rl and guide, are for a 7B.
    preset: Preset | None = None
    # Run folder to continue (None: a new run).
    resume: str | None = None
    # Check the machine, the simulator and the checkpoint, print the results and stop.
    check_only: bool = False


@dataclass(frozen=True)
class Start:
    """The flags of `Command` that decide which settings the others start from: these are read first, on their own."""

    preset: Preset | None = None
    resume: str | None = None


def parse_train(argv: Sequence[str]) -> Command:
    """Read `argv` of train_grpo.py (without the program's name). Wrong flags exit with code 2, or raise BadInput."""
    start, _ = tyro.cli(Start, args=argv, prog="train_grpo.py", return_unknown_args=True, add_help=False)
    if start.resume is None:
        settings = TrainConfig() if start.preset is None else PRESETS[start.preset]
    elif start.preset is None:
        settings = settings_of_run(start.resume)
    else:
        raise BadInput("--preset and --resume contradict each other: each names the settings to start from")
    default = Command(settings, preset=start.preset)
    command = parse_flags(Command, argv, prog="train_grpo.py", default=default)
    if command.resume is not None:
        refuse_changes(command.resume, default.config, command.config)
        refuse_missing_start(command.resume, command.config.model.checkpoint)
    return replace(command, config=with_checkpoint(command.config))


def settings_of_run(run: str) -> TrainConfig:
    """The settings of a run, which --resume names by its folder. Raises BadInput."""
    folder = Path(run)
    file = folder / "config.json"
    if folder.parent.name == "checkpoints":
        raise BadInput(f"--resume {run}: is a checkpoint: give the run's folder, {folder.parent.parent}")
    if not run or not file.is_file():
        raise BadInput(f"--resume {run}: holds no run: give a run's folder, such as runs/RUN")
    try:
        return config_from_json(read_json(file).get("config"))
    except BadInput as problem:
        raise BadInput(f"--resume {run}: not a run folder of this version: {problem}") from None


def refuse_changes(run: str, stored: TrainConfig, config: TrainConfig) -> None:
    """Raise BadInput if flags change settings of a resumed run that must stay as they are."""
    refused = [
        f"{name} (run: {value_of_run}, now: {value_now})"
        for name, (value_of_run, value_now) in differing_fields(stored, config).items()
        if name not in changeable_on_resume()
    ]
    if refused:
        raise BadInput(
            f"--resume {run}: the run has another configuration: {', '.join(refused)}; "
            "leave these flags out, or start a new run"
        )


def refuse_missing_start(run: str, checkpoint: str | None) -> None:
    """Raise BadInput if the folder that a resumed run started from, with its teacher, is gone."""
    if checkpoint is not None and Path(checkpoint).is_absolute() and not Path(checkpoint).exists():
        raise BadInput(
            f"--resume {run}: the checkpoint that it started from is gone: put it back at {checkpoint}"
        )


def parse_eval(argv: Sequence[str]) -> EvalConfig:
    """Read `argv` of eval.py (without the program's name). Wrong flags exit with code 2, or raise BadInput."""
    config = parse_flags(EvalConfig, argv, prog="eval.py")
    if not config.model.checkpoint:
        raise BadInput("--checkpoint is missing: name a folder or a hub id")
    return config
