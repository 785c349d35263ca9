"""One episode of eval.py: how it is played, what decides how it ends, its record and its video."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from configs.eval_config import EvalConfig
from contracts import BadInput, first_line, read_bytes
from envs.assets import find_pack
from envs.tasks import bddl_task
from experiment.results import EpisodeKey, EpisodeRecord, Results, Settings
from experiment.setup import weights_fingerprint
from experiment.videos import write_video
from rl.trajectory import Episode, Trajectory
from vla.adapter_folder import base_and_adapter, has_usable_l1_head
from vla.policy import Mode, Policy

log = logging.getLogger(__name__)

# An episode's index is composed with these strides (`episode_of`). The first is above the number of tasks of any suite
# (90), the second above the number of initial states of any task.
TASK_STRIDE = 100
STATE_STRIDE = 10_000


def episode_of(key: EpisodeKey, fresh: bool = False) -> Episode:
    """The episode to play. Its index, and with it its random stream, depends on the key alone.

    `fresh`: whether the key's init_state_id is the seed of a fresh state.
    """
    index = (key.repeat * STATE_STRIDE + key.init_state_id) * TASK_STRIDE + key.task_id
    if fresh:
        return Episode(index, key.task_id, None, index, seed=key.init_state_id)
    return Episode(index, key.task_id, key.init_state_id, group=index)


def settings_of(config: EvalConfig, policy: Policy) -> Settings:
    """The settings that, with its key, decide how an episode ends. Raises BadInput if --mode l1 has no L1 head."""
    mode = choose_mode(config, policy)
    bddl_file = config.simulator.bddl_file
    init_states = None if bddl_file is None else bddl_task(bddl_file).init_states
    settings: Settings = {
        "checkpoint": str(config.model.checkpoint),
        "weights": weights_fingerprint(policy),
        "mode": mode,
        "temperature": (config.temperature or 1.0) if mode == "sample" else None,
        "seed": config.seed,
        "assets": str(find_pack(config.simulator.assets)),
        "bddl_sha256": _sha256(bddl_file),
        "init_states_sha256": _sha256(init_states),
        "device": policy.device.type,
        "frozen_weights": policy.frozen_weights,
        "max_env_steps": config.simulator.max_env_steps,
        "unnorm_key": config.model.unnorm_key,
    }
    if config.prompt == "leaked":
        settings["prompt"] = "leaked"
    if config.init_states == "fresh":
        settings["init_states"] = "fresh"
    return settings


def _sha256(path: str | Path | None) -> str | None:
    return None if path is None else hashlib.sha256(read_bytes(Path(path))).hexdigest()


def choose_mode(config: EvalConfig, policy: Policy) -> Mode:
    """Resolve --mode auto. Raises BadInput if --mode is l1 and the checkpoint has no L1 head."""
    checkpoint = str(config.model.checkpoint)
    can_act_by_l1 = has_usable_l1_head(checkpoint, policy.action_head)
    if config.mode == "l1" and not can_act_by_l1:
        advice = "use --mode greedy, median or sample"
        if policy.action_head is not None:
            base, _ = base_and_adapter(checkpoint)
            advice += f"; that of the untrained policy is evaluated by --checkpoint {base}"
        raise BadInput(f"--mode l1: {checkpoint} has no L1 action head; {advice}")
    if config.mode != "auto":
        return config.mode
    if config.samples:
        return "sample"
    return "l1" if can_act_by_l1 else "greedy"


def episode_record(
    config: EvalConfig, results: Results, key: EpisodeKey, trajectory: Trajectory
) -> EpisodeRecord:
    """Make the record of an episode (docs/RESULTS_JSON.md), and write its video if --video asks for it."""
    video = None
    if config.video == "all" or (config.video == "failures" and not trajectory.success):
        video = save_video(results.path, key, trajectory)
    return {
        **key._asdict(),  # type: ignore[typeddict-item]  # mypy does not know the keys of _asdict()
        "seed": config.seed,
        "mode": results.settings["mode"],
        "success": trajectory.success,
        "env_steps": trajectory.env_steps,
        "decisions": len(trajectory.decisions),
        "seconds": round(trajectory.seconds, 3),
        "error": trajectory.fault,
        "video": video,
    }


def save_video(results_path: Path, key: EpisodeKey, trajectory: Trajectory) -> str | None:
    """Write the episode's video; return its path relative to the results file, or None if it cannot be written."""
    parts = [key.task_suite, f"task_{key.task_id}", f"init_state_{key.init_state_id}"]
    if key.repeat > 0:
        parts.append(f"repeat_{key.repeat}")
    parts.append("success" if trajectory.success else "failure")
    name = "-".join(parts) + ".mp4"
    video = f"{results_path.stem}-videos/{name}"
    try:
        write_video(results_path.parent / video, trajectory.frames)
    except Exception as error:
        log.warning("%s could not be written (%s); the evaluation goes on", name, first_line(error))
        return None
    return video
