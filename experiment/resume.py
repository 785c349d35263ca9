"""Go on with the folder of a run that was stopped: check that it can, and cut its record at the checkpoint."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from configs.config import TrainConfig
from contracts import BadInput, lock_file, output_place, read_bytes, write_json
from envs.assets import find_pack
from experiment.provenance import simulator_packages
from experiment.run_folder import Run
from experiment.stored_run import CONFIG_FILE, LOCK_FILE, LOG_FILE, METRICS_FILE, read_description
from experiment.terminal import log_to_file
from rl.ranks import ALONE, Ranks


def reopen_run(
    folder: Path,
    config: TrainConfig,
    argv: Sequence[str],
    metrics_bytes: int,
    wandb_id: str | None,
    ranks: Ranks = ALONE,
) -> Run:
    """Open the folder of a run that is resumed.

    `metrics_bytes`: length of metrics.jsonl at the checkpoint; later records are cut off. Raises BadInput if another
    program is writing the run, or if assets or simulator differ from those of the run (equal assets may have moved).
    """
    if not ranks.is_main:
        return Run(folder, config, ranks)
    lock = lock_file(folder / LOCK_FILE, f"--resume {folder}: the run")
    description = read_description(folder)
    now = {"looks": str(find_pack(config.simulator.assets)), "simulator": simulator_packages()}
    for part, value in now.items():
        if description.get(part) != value:
            raise BadInput(
                f"--resume {folder}: {part} of the run: {description.get(part)}; now: {value}: give the run its own "
                "(--assets, or the versions of its packages), or start a new run"
            )
    with output_place(folder, "--resume"):
        # A setting that is changed on resume stays changed.
        description["config"] = asdict(config)
        description["resume_argv"] = [*description.get("resume_argv", []), list(argv)]
        write_json(folder / CONFIG_FILE, description)
        log_to_file(folder / LOG_FILE)
        metrics_file = folder / METRICS_FILE
        os.truncate(metrics_file, min(metrics_bytes, len(read_bytes(metrics_file))))
    return Run(folder, config, ranks, wandb_id, lock)
