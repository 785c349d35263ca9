"""The command line of train_grpo.py: a preset (or a stored run), changed by flat flags."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from command_line import parse_flags
from configs.config import RunConfig, TrainConfig, differing_fields, from_dict
from configs.presets import PRESETS
from errors import BadInput
from locks import RUN_LOCK, check_unlocked
from untrusted.json_file import read_json

# What a resumed run may change: where it ends, how it is watched, and how much of the same computation is in memory at
# once. Everything else would break "resumed = straight".
CHANGEABLE_ON_RESUME = {
    "total_steps", "max_hours", "allow_zero_baseline", "wandb_mode", "wandb_project", "keep_checkpoints", "tensorboard",
    "rerun", "micro_batch_size", "max_batch", "gradient_checkpointing", "memory_budget",
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """Improve a vision-language-action policy on LIBERO tasks by reinforcement learning."""

    config: tyro.conf.OmitArgPrefixes[TrainConfig]
    preset: str = "libero_spatial"
    """Settings to start from: libero_spatial, libero_object, libero_goal, libero_10, libero_90 (7B), tiny (CPU), smoke
    (seconds). Left out: the 7B preset of --task-suite."""
    resume: str | None = None
    """Run folder to continue (None: a new run)."""
    check_only: bool = False
    """Check the machine, the simulator and the checkpoint, then stop."""


def parse_command(argv: Sequence[str]) -> Command:
    """The command that `argv` (without the program's name) asks for. Raises BadInput."""
    start, _ = _starting_point().parse_known_args(list(argv))
    if start.resume is not None:
        if start.preset is not None:
            raise BadInput("--preset and --resume contradict each other: a resumed run keeps its settings")
        base = stored_config(Path(start.resume))
        check_unlocked(Path(start.resume) / RUN_LOCK, f"--resume {start.resume}: the run")
        preset = "libero_spatial"
    else:
        preset = _preset_name(start)
        if preset not in PRESETS:
            near = difflib.get_close_matches(preset, PRESETS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise BadInput(f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}{hint}")
        base = PRESETS[preset]

    command = parse_flags(Command, argv, prog="train_grpo.py", default=Command(base, preset=preset))
    check_optional_packages(command.config.run)
    if start.resume is not None:
        changed = differing_fields(base, command.config)
        refused = {k: v for k, v in changed.items() if k not in CHANGEABLE_ON_RESUME}
        if refused:
            listed = ", ".join(f"{name} (run: {a}, now: {b})" for name, (a, b) in refused.items())
            raise BadInput(
                f"--resume {start.resume}: the run has another configuration: {listed}; leave these flags out, or "
                "start a new run"
            )
    return command


def preset_of(argv: Sequence[str]) -> str:
    """Name of the preset that a command line starts from."""
    return _preset_name(_starting_point().parse_known_args(list(argv))[0])


def _preset_name(start: argparse.Namespace) -> str:
    return start.preset or (start.task_suite if start.task_suite in PRESETS else "libero_spatial")


def stored_config(run_folder: Path) -> TrainConfig:
    """The configuration that a run folder's config.json holds. Raises BadInput."""
    path = run_folder / "config.json"
    try:
        stored = read_json(path)
    except BadInput as problem:
        raise BadInput(f"--resume {run_folder}: not a run folder: {problem}") from None
    if not isinstance(stored.get("config"), dict):
        raise BadInput(f"--resume {run_folder}: {path} holds no run configuration (expected an object 'config')")
    return from_dict(stored["config"], str(path))


def check_optional_packages(run: RunConfig) -> None:
    """Raise BadInput when a flag needs a package that is not installed."""
    for flag, wanted, module, package in (
        ("--tensorboard", run.tensorboard, "tensorboard", "tensorboard"),
        ("--rerun", run.rerun, "rerun", "rerun-sdk"),
    ):
        if wanted and importlib.util.find_spec(module) is None:
            raise BadInput(
                f"{flag} needs the package {package}, which is not installed: pip install -r requirements-optional.txt"
            )


def _starting_point() -> argparse.ArgumentParser:
    """The three flags that decide what the other flags change."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for spellings in (("--preset",), ("--resume",), ("--task-suite", "--task_suite")):
        parser.add_argument(*spellings, nargs="?")
    return parser
