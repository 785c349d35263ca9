"""Read the folder of a run, finished or not: its settings, its metrics, how far it has come."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from typing_extensions import NotRequired

from configs.config import TrainConfig, config_from_json
from contracts import BadInput, read_bytes, read_fields
from experiment.provenance import Provenance

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "train.log"
LOCK_FILE = ".lock"
FRAMES_PER_SECOND = 20  # of videos; LIBERO's control rate, so a video plays in real time

GREEDY = "eval/greedy_success"  # every evaluation has it
WALL_TIME = ("rollout/time_s", "time/update", "time/eval", "time/checkpoint")

MetricsRow: TypeAlias = dict[str, float]  # global_step, update and metrics


class RunDescription(Provenance):
    """The contents of config.json: the provenance, and what decides the result of the run."""

    config: dict[str, dict[str, object]]  # settings by section: see configs.config.config_from_json
    looks: str  # name and digest of the assets
    simulator: str  # its packages with their versions
    hub_commit: NotRequired[str | None]  # of the checkpoint, if it came from the hub
    resume_argv: NotRequired[list[list[str]]]  # the command lines that resumed the run; missing if none did


def evaluation_path(folder: Path, env_steps: int) -> Path:
    """The results file of the evaluation of a run after so many env steps."""
    return folder / "evaluations" / f"step_{env_steps}.json"


def video_folder(folder: Path, env_steps: int) -> Path:
    """Where the videos of an evaluation in a run are."""
    return folder / "videos" / f"step_{env_steps}"


@dataclass(frozen=True)
class StoredRun:
    """The contents of a run folder, finished or not."""

    folder: Path
    config: TrainConfig
    rows: Sequence[MetricsRow]  # of metrics.jsonl
    description: RunDescription

    @property
    def evaluated_steps(self) -> list[int]:
        """The env steps of its evaluations, oldest first."""
        return [int(row["global_step"]) for row in self.rows if GREEDY in row]

    @property
    def is_finished(self) -> bool:
        """Whether the run has had its last evaluation."""
        return self.evaluated_steps[-1:] >= [self.config.phases.total_steps]

    def status(self) -> str:
        """How far the run has come, in one line."""
        state = "Finished" if self.is_finished else "Not finished"
        env_steps = self.rows[-1]["global_step"] if self.rows else 0
        planned = "" if self.is_finished else f" of {self.config.phases.total_steps:,}"
        updates = sum("schedule/phase" in row for row in self.rows)
        hours = sum(row.get(key, 0.0) for row in self.rows for key in WALL_TIME) / 3600
        return f"{state}: {env_steps:,}{planned} env steps, {updates} updates, {hours:.1f} h"


def read_run(folder: Path) -> StoredRun:
    """Read a run folder. Raises BadInput if it is not one, is damaged, or has settings of another version."""
    try:
        description = read_description(folder)
        config = config_from_json(description["config"])
        rows = read_metrics(folder / METRICS_FILE)
    except BadInput as problem:
        raise BadInput(f"{folder} is not a run folder of this version: {problem}") from None
    return StoredRun(folder.resolve(), config, rows, description)


def read_description(folder: Path) -> RunDescription:
    """Read the config.json of a run folder. Raises BadInput."""
    return read_fields(folder / CONFIG_FILE, RunDescription)


def read_metrics(path: Path) -> list[MetricsRow]:
    """Read the records of a metrics.jsonl. Raises BadInput if there is none, or if a record is damaged.

    Values that were not finite (null in the file) are left out, and so is a last line that a kill has cut.
    """
    *lines, _ = read_bytes(path).split(b"\n")  # a whole last line ends with a newline, too
    try:
        # As one list, because then equal names share their memory: a long run is read at every evaluation.
        records = json.loads(b"[" + b",".join(lines) + b"]")
        return [{key: value for key, value in record.items() if value is not None} for record in records]
    except (ValueError, AttributeError) as error:
        raise BadInput(f"{path} is damaged: {error}") from None
