"""What an evaluation leaves in the run folder beside its record: every episode's outcome, videos, rerun recordings.

Files carry the env step in their names, so a resumed run that evaluates again at the same step replaces them. Whatever
fails here costs the file, never the run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from errors import BadInput
from rl.contracts import Policy
from rl.evaluation import Validation
from rl.never_fatal import never_fatal
from rl.rerun_recording import write_recording
from rl.run import Run, write_json
from rl.trajectory import Trajectory
from rl.video import write_video
from untrusted.json_file import brief, read_json

log = logging.getLogger("train")


def write_evaluation(run: Run, global_step: int, validation: Validation, policy: Policy) -> None:
    """Write the outcomes of all episodes and show those that were filmed: as videos, with --rerun as recordings."""
    with never_fatal(f"step {global_step}: the evaluation's episodes could not be written"):
        outcomes = {actor: outcomes_of(played) for actor, played in validation.played.items()}
        path = episodes_path(run.folder, global_step)
        path.parent.mkdir(exist_ok=True)
        write_json(path, outcomes)
    for actor, trajectory in validation.filmed.items():
        path = run.folder / "videos" / f"{actor}-step_{global_step}.mp4"
        with never_fatal(f"{path.name} could not be written"):
            write_video(path, trajectory.frames)
            run.show(f"video/{actor}", path, global_step, caption_of(trajectory))
        if run.config.run.rerun:
            path = run.folder / "rerun" / f"{actor}-step_{global_step}.rrd"
            with never_fatal(f"{path.name} could not be written"):
                write_recording(path, trajectory, policy)


def outcomes_of(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """One record per episode; `trial` counts the episodes of one (task, initial state)."""
    played: Counter[tuple[int, int]] = Counter()
    records = []
    for trajectory in trajectories:
        start = (trajectory.episode.task_id, trajectory.episode.init_state_id)
        records.append(
            {
                "task_id": start[0],
                "init_state_id": start[1],
                "trial": played[start],
                "success": trajectory.success,
                "env_steps": trajectory.env_steps,
            }
        )
        played[start] += 1
    return records


def caption_of(trajectory: Trajectory) -> str:
    ending = "success" if trajectory.success else "failure"
    return f"{trajectory.episode.describe()}: {ending} after {trajectory.env_steps} env steps"


def episodes_path(folder: Path, global_step: int) -> Path:
    return folder / "evaluations" / f"step_{global_step}.json"


def read_episodes(folder: Path, global_step: int) -> dict[str, list[dict[str, Any]]]:
    """The outcomes of an evaluation by actor; empty when the run did not keep them. Raises BadInput."""
    path = episodes_path(folder, global_step)
    if not path.exists():
        return {}
    stored = read_json(path)
    for actor, outcomes in stored.items():
        if not isinstance(outcomes, list) or not all(_is_outcome(outcome) for outcome in outcomes):
            raise BadInput(f"{path}: {brief(actor)} holds no outcomes of episodes; restore the file, or delete it")
    return stored


def _is_outcome(record: Any) -> bool:
    numbers = ("task_id", "init_state_id", "trial")
    return (
        isinstance(record, dict)
        and all(type(record.get(name)) is int for name in numbers)
        and isinstance(record.get("success"), bool)
    )
