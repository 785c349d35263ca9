"""Training checkpoints: written so that a kill at any moment leaves the previous one whole.

A run's checkpoints/ holds folders step_N and two pointers, `latest` and `best`: text files with a folder's name.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from contracts import BadInput, first_line, resolve_pointer, write_json
from envs.perturb import label_of
from rl.curriculum import UNKNOWN
from rl.rollout import Rollout
from rl.update import Learner

TRAINER_FILE = "trainer.pt"
LATEST = "latest"
BEST = "best"
TEMPORARY_PREFIX = ".writing-"

# Weights of the old value in the exponential averages, per episode.
RETURN_ALPHA = 0.99
TASK_ALPHA = 0.9


@dataclass
class TrainerState:
    """Everything that a run is, beside the policy's weights and the optimizer.

    Its fields are stored in the checkpoint under their names; one that an older checkpoint lacks has its default.
    """

    global_step: int = 0  # env steps of training rollouts
    update: int = 0  # updates done
    metrics_bytes: int = 0  # length of metrics.jsonl when this state was saved
    evaluated_at: int | None = None  # global_step of the last evaluation
    teacher_k: int | None = None  # the teacher never changes, so it is evaluated once
    teacher_n: int | None = None
    best_score: float | None = None
    return_average: float | None = None  # exponential average of the student's episodic return
    task_success: dict[int, float] = field(default_factory=dict)  # curriculum: exponential average per task
    perturbed_success: dict[str, float] = field(default_factory=dict)  # the same per kind and magnitude
    drawn: dict[int, int] = field(default_factory=dict)  # groups that each task had: see TrainingEpisodes
    wandb_id: str | None = None
    ranks: int = 1  # processes that train together; which episodes they play depends on their number
    looks: str = ""  # the pictures that the run trains on: see CheckpointInfo
    updates_without_signal: int = 0  # the last ones in a row whose advantages were all 0

    def improves(self, score: float | None) -> bool:
        """Whether `score` is the best of the run so far; if so, remember it as the one to beat."""
        if score is None:
            return False
        if self.best_score is not None and score <= self.best_score:
            return False
        self.best_score = score
        return True

    def count_update(self, rollout: Rollout, has_signal: bool) -> None:
        """Take into account an update: its env steps, returns, drawn initial states, and whether it could learn."""
        self.global_step += rollout.env_steps
        self.update += 1
        self.updates_without_signal = 0 if has_signal else self.updates_without_signal + 1
        self._average_return(rollout)
        for trajectory in rollout.trajectories:
            episode = trajectory.episode
            success = float(trajectory.success)
            label = label_of(episode.perturbation)
            task_average = self.task_success.get(episode.task_id, UNKNOWN)
            label_average = self.perturbed_success.get(label, UNKNOWN)
            self.task_success[episode.task_id] = TASK_ALPHA * task_average + (1 - TASK_ALPHA) * success
            self.perturbed_success[label] = TASK_ALPHA * label_average + (1 - TASK_ALPHA) * success
            # Trajectories come in the order of their episodes, so the last one of a task decides.
            self.drawn[episode.task_id] = episode.draw + 1

    def _average_return(self, rollout: Rollout) -> None:
        """Update `return_average` by the episodes that the student played alone. It begins at their first mean."""
        returns = [
            float(trajectory.success)
            for trajectory in rollout.trajectories
            if not any(decision.by_teacher for decision in trajectory.decisions)
        ]
        if not returns:
            return
        mean = sum(returns) / len(returns)
        if self.return_average is None:
            self.return_average = mean
        else:
            old_weight = RETURN_ALPHA ** len(returns)
            self.return_average = old_weight * self.return_average + (1 - old_weight) * mean


def save_checkpoint(
    checkpoints: Path,
    learner: Learner,
    state: TrainerState,
    keep: int,
    best: Mapping[str, float | None] | None = None,
) -> Path:
    """Rank 0 writes `checkpoints/step_N`, moves the pointer `latest` to it and deletes older ones beyond `keep`.

    `best`: metadata if this is the best checkpoint so far. The pointer `best` moves before `latest`, because a run is
    resumed from `latest`: everything else must be done by then. Raises OSError (disk full, folder gone) with the
    previous checkpoint untouched.
    """
    folder = checkpoints / f"step_{state.global_step}"
    if learner.ranks.is_main:
        _remove_abandoned(checkpoints)
        _write_atomically(folder, learner, state)
        if best is not None:
            mark_best(checkpoints, learner, state, best)
        write_pointer(checkpoints / LATEST, folder)
        _remove_old(checkpoints, keep)
    learner.ranks.gather(None)  # all ranks wait until it is written
    return folder


def _remove_abandoned(checkpoints: Path) -> None:
    """Remove what a killed process left half-written. Raises OSError if the run folder was moved away."""
    for path in checkpoints.iterdir():
        if path.name.startswith(TEMPORARY_PREFIX):
            shutil.rmtree(path, ignore_errors=True)


def _write_atomically(folder: Path, learner: Learner, state: TrainerState) -> None:
    """Write the checkpoint under a temporary name, flush it to the disk, and rename it to `folder`."""
    temporary = folder.with_name(TEMPORARY_PREFIX + folder.name)
    try:
        _write(temporary, learner, state)
        # A kill between rename and pointer leaves this folder, which the resumed run writes again.
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _flush(folder.parent)


def _write(folder: Path, learner: Learner, state: TrainerState) -> None:
    learner.policy.save_adapter(folder, looks=state.looks)
    contents: dict[str, object] = {"state": asdict(state), "optimizer": learner.optimizer.state_dict()}
    if learner.critic is not None:
        contents["critic"] = learner.critic.episodes
    # Via memory: torch's own writer does not say why a file cannot be written.
    in_memory = io.BytesIO()
    torch.save(contents, in_memory)
    (folder / TRAINER_FILE).write_bytes(in_memory.getbuffer())
    for path in folder.rglob("*"):
        _flush(path)
    _flush(folder)


def _remove_old(checkpoints: Path, keep: int) -> None:
    """Delete all checkpoints but the newest `keep` and the best."""
    steps = _steps(checkpoints)
    best = resolve_pointer(checkpoints / BEST)
    for folder in steps[:-keep]:
        if folder != best:
            shutil.rmtree(folder, ignore_errors=True)


def load_checkpoint(folder: Path, learner: Learner) -> TrainerState:
    """Restore the learner and return the run's state. Random generators need no restoring: see rl/randomness.py.

    Raises BadInput when the folder cannot be used, or was written by another number of ranks.
    """
    path = folder / TRAINER_FILE
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        state = TrainerState(**stored["state"])
        learner.policy.load_adapter(folder)
        if learner.critic is not None:
            learner.critic.episodes = stored["critic"]
        # Cleared before loading: a full GPU has no room for the old and the new moments together.
        learner.optimizer.state.clear()
        learner.optimizer.load_state_dict(stored["optimizer"])
    except Exception as error:  # which exception a damaged file leads to depends on where torch notices it
        raise BadInput(
            f"{path} is not a usable checkpoint ({first_line(error)}): write another step's name into "
            f"{folder.parent / LATEST}"
        ) from error
    if state.ranks != learner.ranks.size:  # another number of ranks would play other episodes
        raise BadInput(f"this run trains in {state.ranks} process(es), one a GPU: resume it with as many")
    return state


def mark_best(
    checkpoints: Path, learner: Learner, state: TrainerState, metadata: Mapping[str, float | None]
) -> None:
    """Rank 0 points `best` at the state's checkpoint and writes its metadata.json, with `state.best_score`."""
    if not learner.ranks.is_main:
        return
    folder = checkpoints / f"step_{state.global_step}"
    contents = {"global_step": state.global_step, "score": state.best_score, **metadata}
    write_json(folder / "metadata.json", contents)
    write_pointer(checkpoints / BEST, folder)


def latest_checkpoint(run_folder: Path) -> Path:
    """The folder that `checkpoints/latest` points at. Raises BadInput."""
    pointer = run_folder / "checkpoints" / LATEST
    folder = resolve_pointer(pointer)
    if not folder.is_dir():
        steps = ", ".join(path.name for path in _steps(pointer.parent)) or "none"
        raise BadInput(
            f"--resume {run_folder}: no checkpoint at {pointer} ({folder.name}); steps found: {steps}"
        )
    return folder


def write_pointer(pointer: Path, target: Path) -> None:
    """Let `pointer` name the folder `target` beside it, atomically."""
    temporary = pointer.with_name(TEMPORARY_PREFIX + pointer.name)
    temporary.write_text(f"{target.name}\n")
    _flush(temporary)
    os.replace(temporary, pointer)
    _flush(pointer.parent)


def _steps(checkpoints: Path) -> list[Path]:
    """The checkpoints, oldest first; folders with other names are not ours."""
    folders = [path for path in checkpoints.glob("step_*") if _step_number(path).isdigit()]
    return sorted(folders, key=lambda folder: int(_step_number(folder)))


def _step_number(folder: Path) -> str:
    return folder.name.removeprefix("step_")


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
