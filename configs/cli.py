"""Read the command lines of train_grpo.py and eval.py, starting from a preset or from the settings of a stored run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from command_line import parse_flags
from configs.config import TrainConfig, changeable_on_resume, changed, differing_fields
from configs.eval_config import EvalConfig
from configs.presets import PRESETS, PUBLIC_CHECKPOINTS, TINY_CHECKPOINT
from configs.stored import from_dict
from contracts import BadInput, read_json
from envs.tasks import split_suite

NO_CHECKPOINT = "--checkpoint is missing: name a folder or a hub id (see --help)"


# Flags of other programs, and our own by other names -> ours.
SYNONYMS = {
    "--learning-rate": "--lr",
    "--timesteps": "--total-steps",
    "--total-timesteps": "--total-steps",
    "--use-data-parallel": "--data-parallel",
}
# Switches of other programs -> our flag and its values for a switch that is on and off.
SWITCHES = {
    "--use-wandb": ("--wandb-mode", {"true": "auto", "false": "disabled"}),
    "--no-wandb": ("--wandb-mode", {"true": "disabled", "false": "auto"}),
}


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
    preset: str = "libero_spatial"
    """Settings to start from, which the other flags change: libero_spatial, libero_object, libero_goal, libero_10
    or libero_90 (7B on that suite), rl (7B, PPO alone with large rollouts), guide (7B, the numbers that
    this project began with), tiny (small policy, for a CPU), smoke (a test of seconds). Without --preset: the 7B preset
    of --task-suite."""
    config_file: Annotated[str | None, tyro.conf.arg(name="config")] = None
    """Run folder, or its config.json, whose settings to start from in place of a preset (None: a preset)."""
    resume: str | None = None
    """Run folder to continue (None: a new run)."""
    check_only: bool = False
    """Check the machine, the simulator and the checkpoint, print the results and stop."""


def parse_train(argv: Sequence[str]) -> Command:
    """Read `argv` of train_grpo.py (without the program's name). Raises BadInput for wrong flags or values."""
    argv = _with_our_names(argv)
    # These flags decide which settings the other flags start from, so they are read first.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--preset", nargs="?")
    parser.add_argument("--config", nargs="?")
    parser.add_argument("--resume", nargs="?")
    parser.add_argument("--task-suite", "--task_suite", nargs="?")
    first, _ = parser.parse_known_args(list(argv))
    starts = {"--preset": first.preset, "--config": first.config, "--resume": first.resume}
    flags = [flag for flag, value in starts.items() if value is not None]
    if len(flags) > 1:
        raise BadInput(f"{' and '.join(flags)} contradict each other: each names the settings to start from")
    if first.resume is not None:
        return _parse_resumed_run(argv, first.resume)
    if first.config is not None:
        settings = _find_bundled_checkpoint(_settings_of(Path(first.config), "--config"))
        return parse_flags(Command, argv, prog="train_grpo.py", default=Command(settings))
    return _parse_new_run(argv, first.preset, first.task_suite)


def _with_our_names(argv: Sequence[str]) -> list[str]:
    """`argv` with our names in place of SYNONYMS and SWITCHES."""
    words: list[str] = []
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        last_switch = SWITCHES.get(argv[index - 1].replace("_", "-")) if index > 0 else None
        if (value == "grpo" and name == "--advantage") or (word == "grpo" and words[-1:] == ["--advantage"]):
            word = word.replace("grpo", "group")
        elif last_switch is not None and word.lower() in ("true", "false"):  # --use-wandb False
            our_name, values = last_switch
            words.pop()
            word = f"{our_name}={values[word.lower()]}"
        elif name in SYNONYMS:
            word = SYNONYMS[name] + equals + value
        elif name in SWITCHES:
            our_name, values = SWITCHES[name]
            word = f"{our_name}={values.get((value or 'true').lower(), value)}"
        words.append(word)
    return words


def _parse_new_run(argv: Sequence[str], preset: str | None, task_suite: str | None) -> Command:
    # A suite of LIBERO-PRO or LIBERO-Plus begins with the settings of the suite that it changes.
    base_suite, _ = ("libero_spatial", "") if task_suite is None else split_suite(task_suite)
    if preset is None:
        preset = base_suite
    if preset not in PRESETS:
        raise BadInput(f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}")
    settings = PRESETS[preset]
    if task_suite is not None and settings.model.checkpoint in PUBLIC_CHECKPOINTS.values():
        settings = changed(settings, checkpoint=PUBLIC_CHECKPOINTS.get(base_suite))
    settings = _find_bundled_checkpoint(settings)
    command = parse_flags(Command, argv, prog="train_grpo.py", default=Command(settings, preset=preset))
    if command.config.model.checkpoint is None:
        raise BadInput(NO_CHECKPOINT)
    return command


def _settings_of(run: Path, flag: str) -> TrainConfig:
    """The settings of a run, which `flag` names by its folder or its config.json. Raises BadInput."""
    path = run / "config.json" if run.is_dir() else run
    try:
        return from_dict(read_json(path).get("config"), str(path))
    except BadInput as problem:
        raise BadInput(f"{flag} {run}: not a run folder of this version: {problem}") from None


def _parse_resumed_run(argv: Sequence[str], run_folder: str) -> Command:
    stored = _find_bundled_checkpoint(_settings_of(Path(run_folder), "--resume"))
    command = parse_flags(Command, argv, prog="train_grpo.py", default=Command(stored))
    refused = [
        f"{name} (run: {value_of_run}, now: {value_now})"
        for name, (value_of_run, value_now) in differing_fields(stored, command.config).items()
        if name not in changeable_on_resume()
    ]
    if refused:
        raise BadInput(
            f"--resume {run_folder}: the run has another configuration: {', '.join(refused)}; "
            "leave these flags out, or start a new run"
        )
    return command


def _find_bundled_checkpoint(config: TrainConfig) -> TrainConfig:
    """Name the bundled policy by its whole path, beside this program's files, if it is not below the current folder."""
    if config.model.checkpoint != TINY_CHECKPOINT or Path(TINY_CHECKPOINT).is_dir():
        return config
    return changed(config, checkpoint=str(Path(__file__).resolve().parents[1] / TINY_CHECKPOINT))


def parse_eval(argv: Sequence[str]) -> EvalConfig:
    """Read `argv` of eval.py (without the program's name). Raises BadInput for wrong flags or values."""
    config = parse_flags(EvalConfig, argv, prog="eval.py")
    if not config.model.checkpoint:
        raise BadInput(NO_CHECKPOINT)
    return config
