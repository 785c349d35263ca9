"""Read the command lines of train_grpo.py and eval.py, starting from a preset or from the settings of a stored run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from command_line import parse_flags
from configs.config import TrainConfig, changeable_on_resume, changed, config_from_json, differing_fields
from configs.eval_config import EvalConfig
from configs.presets import PRESETS, PUBLIC_CHECKPOINTS, TINY_CHECKPOINT
from contracts import BadInput, read_json
from envs.tasks import split_suite

NO_CHECKPOINT = "--checkpoint is missing: name a folder or a hub id (see --help)"


@dataclass(frozen=True)
class Command:
    """Improve a vision-language-action policy on LIBERO tasks by reinforcement learning.

    Most used:
    --check-only: check machine, simulator and checkpoint, and stop
    --preset tiny: the bundled small policy, on a CPU
    --task-suite SUITE --task-ids ID ...: what to learn
    --checkpoint PATH_OR_HUB_ID: where to start
    --total-steps N, --max-hours H: when to end
    --resume RUN: continue a run that was stopped
    --memory-budget GIB, --num-envs N, --data-parallel: how much of this machine
    """

    config: TrainConfig
    # Settings to start from, which the other flags change: a suite of LIBERO (7B on that suite), rl (7B, PPO alone with
    # large rollouts), guide (7B, the numbers that this project began with), tiny (small policy, for a CPU), smoke (a
    # test of seconds). Without --preset: the 7B preset of --task-suite.
    preset: str = "libero_spatial"
    # Run folder, or its config.json, whose settings to start from in place of a preset (None: a preset).
    config_file: Annotated[str | None, tyro.conf.arg(name="config")] = None
    # Run folder to continue (None: a new run).
    resume: str | None = None
    # Check the machine, the simulator and the checkpoint, print the results and stop.
    check_only: bool = False


@dataclass(frozen=True)
class Start:
    """The flags that decide which settings the other flags start from."""

    preset: str | None = None
    config: str | None = None
    resume: str | None = None
    task_suite: str | None = None


def parse_train(argv: Sequence[str]) -> Command:
    """Read `argv` of train_grpo.py (without the program's name). Wrong flags exit with code 2, or raise BadInput."""
    start, _ = tyro.cli(Start, args=argv, prog="train_grpo.py", return_unknown_args=True, add_help=False)
    names = {"--preset": start.preset, "--config": start.config, "--resume": start.resume}
    chosen = [flag for flag, name in names.items() if name is not None]
    if len(chosen) > 1:
        raise BadInput(f"{' and '.join(chosen)} contradict each other: each names the settings to start from")
    if start.resume is not None:
        return _parse_resumed_run(argv, start.resume)
    if start.config is not None:
        default = Command(_settings_of_run(start.config, "--config"))
    else:
        default = _settings_of_preset(start.preset, start.task_suite)
    command = parse_flags(Command, argv, prog="train_grpo.py", default=default)
    if command.config.model.checkpoint is None:
        raise BadInput(NO_CHECKPOINT)
    return command


def _settings_of_preset(preset: str | None, task_suite: str | None) -> Command:
    # A suite of LIBERO-PRO or LIBERO-Plus begins with the settings of the suite that it changes.
    base_suite, _ = ("libero_spatial", "") if task_suite is None else split_suite(task_suite)
    if preset is None:
        preset = base_suite
    if preset not in PRESETS:
        raise BadInput(f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}")
    settings = PRESETS[preset]
    if task_suite is not None and settings.model.checkpoint in PUBLIC_CHECKPOINTS.values():
        settings = changed(settings, checkpoint=PUBLIC_CHECKPOINTS.get(base_suite))
    return Command(_find_bundled_checkpoint(settings), preset=preset)


def _settings_of_run(run: str, flag: str) -> TrainConfig:
    """The settings of a run, which `flag` names by its folder or its config.json. Raises BadInput."""
    path = Path(run)
    file = path / "config.json" if path.is_dir() else path
    try:
        return _find_bundled_checkpoint(config_from_json(read_json(file).get("config")))
    except BadInput as problem:
        raise BadInput(f"{flag} {run}: not a run folder of this version: {problem}") from None


def _parse_resumed_run(argv: Sequence[str], run: str) -> Command:
    stored = _settings_of_run(run, "--resume")
    command = parse_flags(Command, argv, prog="train_grpo.py", default=Command(stored))
    refused = [
        f"{name} (run: {value_of_run}, now: {value_now})"
        for name, (value_of_run, value_now) in differing_fields(stored, command.config).items()
        if name not in changeable_on_resume()
    ]
    if refused:
        raise BadInput(
            f"--resume {run}: the run has another configuration: {', '.join(refused)}; "
            "leave these flags out, or start a new run"
        )
    return command


def _find_bundled_checkpoint(config: TrainConfig) -> TrainConfig:
    """Name the bundled policy by its whole path, beside this program's files, if it is not below the current folder."""
    if config.model.checkpoint != TINY_CHECKPOINT or Path(TINY_CHECKPOINT).is_dir():
        return config
    return changed(config, checkpoint=str(Path(__file__).resolve().parents[1] / TINY_CHECKPOINT))


def parse_eval(argv: Sequence[str]) -> EvalConfig:
    """Read `argv` of eval.py (without the program's name). Wrong flags exit with code 2, or raise BadInput."""
    config = parse_flags(EvalConfig, argv, prog="eval.py")
    if not config.model.checkpoint:
        raise BadInput(NO_CHECKPOINT)
    return config
