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
from typing import Any

import torch

from contracts import BadInput, first_line, resolve_pointer, write_json
from envs.perturb import label_of
from rl.curriculum import UNKNOWN
from rl.rollout import Rollout
from rl.update import Learner

TRAINER_FILE = "trainer.pt"
RETURN_ALPHA, TASK_ALPHA = 0.99, 0.9  # of the exponential averages, per episode


@dataclass
class TrainerState:
    """Everything that a run is, beside the policy's weights and the optimizer."""

    global_step: int = 0  # env steps of training rollouts
    update: int = 0  # updates done
    metrics_bytes: int = 0  # length of metrics.jsonl when this state was saved
    evaluated_at: int | None = None  # global_step of the last evaluation
    teacher_k: int | None = None  # the teacher never changes: its evaluation is done once
    teacher_n: int | None = None
    best_score: float | None = None
    return_average: float | None = None  # exponential average of the student's episodic return
    task_success: dict[int, float] = field(default_factory=dict)  # curriculum: exponential average per task
    perturbed_success: dict[str, float] = field(default_factory=dict)  # the same per kind and magnitude
    drawn: dict[int, int] = field(
        default_factory=dict
    )  # groups that each task had: the cursor of training_episodes
    wandb_id: str | None = None
    ranks: int = 1  # processes that train together; which episodes they play depends on their number
    looks: str = ""  # the pictures that it trains on: see CheckpointInfo

    def improves(self, score: float | None) -> bool:
        """Whether a score beats every earlier one of the run; if so, it is the one to beat from now on."""
        is_better = score is not None and (self.best_score is None or score > self.best_score)
        if is_better:
            self.best_score = score
        return is_better

    def absorb(self, played: Rollout) -> None:
        """Count an update: its env steps, its returns (exponential averages), the initial states it drew."""
        self.global_step += played.env_steps
        self.update += 1
        own = [float(t.success) for t in played.trajectories if not any(d.by_teacher for d in t.decisions)]
        if own:  # the student's, which begin at their mean
            old, mean = RETURN_ALPHA ** len(own), sum(own) / len(own)
            self.return_average = (
                mean if self.return_average is None else old * self.return_average + (1 - old) * mean
            )
        for trajectory in played.trajectories:
            value, task_id = float(trajectory.success), trajectory.episode.task_id
            label = label_of(trajectory.episode.perturbation)
            of_task, of_label = (
                self.task_success.get(task_id, UNKNOWN),
                self.perturbed_success.get(label, UNKNOWN),
            )
            self.task_success[task_id] = TASK_ALPHA * of_task + (1 - TASK_ALPHA) * value
            self.perturbed_success[label] = TASK_ALPHA * of_label + (1 - TASK_ALPHA) * value
            self.drawn[task_id] = (
                trajectory.episode.draw + 1
            )  # trajectories come in the order of their episodes


def save_checkpoint(
    checkpoints: Path, learner: Learner, state: TrainerState, keep: int, best: Mapping[str, Any] | None = None
) -> Path:
    """Rank 0 writes `checkpoints/step_N`, moves the pointer `latest` to it and deletes older ones beyond `keep`.

    Raises OSError (disk full, folder gone) with the previous checkpoint untouched. `best`: metadata of a new best; that
    pointer moves before `latest`, which says that all is done.
    """
    final = checkpoints / f"step_{state.global_step}"
    if learner.ranks.is_main:
        for path in checkpoints.iterdir():  # raises when the folder was moved away: it is not made anew
            if path.name.startswith(".writing-"):  # abandoned by a kill
                shutil.rmtree(path, ignore_errors=True)
        temporary = checkpoints / f".writing-{final.name}"
        try:
            _write(temporary, learner, state)
            shutil.rmtree(
                final, ignore_errors=True
            )  # left by a kill between rename and pointer: this is it again
            temporary.rename(final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _flush(checkpoints)
        if best is not None:
            mark_best(checkpoints, learner, state, best)
        point(checkpoints / "latest", final)
        kept = {*_steps(checkpoints)[-keep:], resolve_pointer(checkpoints / "best")}
        for folder in {*_steps(checkpoints)} - kept:
            shutil.rmtree(folder, ignore_errors=True)
    learner.ranks.gather(None)  # all wait for it
    return final


def _write(folder: Path, learner: Learner, state: TrainerState) -> None:
    learner.policy.save_adapter(folder, looks=state.looks)
    stored: dict[str, Any] = {"state": asdict(state), "optimizer": learner.optimizer.state_dict()}
    if learner.critic is not None:
        stored["critic"] = learner.critic.episodes
    in_memory = io.BytesIO()  # torch's own writer does not say why a file cannot be written
    torch.save(stored, in_memory)
    (folder / TRAINER_FILE).write_bytes(in_memory.getbuffer())
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


def load_checkpoint(folder: Path, learner: Learner) -> TrainerState:
    """Restore the learner from a checkpoint folder. No generator has a history (`rl.rollout`). Raises BadInput."""
    path = folder / TRAINER_FILE
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        state = TrainerState(**stored["state"])
        learner.policy.load_adapter(folder)
        if learner.critic is not None:
            learner.critic.episodes = stored["critic"]
        learner.optimizer.state.clear()  # first: a full GPU has no room for the moments of both
        learner.optimizer.load_state_dict(stored["optimizer"])
    except Exception as error:  # the file is damaged, or of something else: torch raises what it comes upon
        raise BadInput(
            f"{path} is not a usable checkpoint ({first_line(error)}): write another step's name into "
            f"{folder.parent / 'latest'}"
        ) from error
    if state.ranks != learner.ranks.size:  # they would play other episodes
        raise BadInput(f"this run trains in {state.ranks} process(es), one a GPU: resume it with as many")
    return state


def mark_best(checkpoints: Path, learner: Learner, state: TrainerState, metadata: Mapping[str, Any]) -> None:
    """Rank 0 points `best` at the state's checkpoint, with metadata.json: its score is `state.best_score`."""
    if learner.ranks.is_main:
        folder = checkpoints / f"step_{state.global_step}"
        write_json(
            folder / "metadata.json",
            {"global_step": state.global_step, "score": state.best_score, **metadata},
        )
        point(checkpoints / "best", folder)


def latest_checkpoint(run_folder: Path) -> Path:
    """The folder that `checkpoints/latest` points at. Raises BadInput."""
    pointer = run_folder / "checkpoints" / "latest"
    folder = resolve_pointer(pointer)
    if not folder.is_dir():
        steps = ", ".join(path.name for path in _steps(pointer.parent)) or "none"
        raise BadInput(
            f"--resume {run_folder}: no checkpoint at {pointer} ({folder.name}); steps found: {steps}"
        )
    return folder


def point(pointer: Path, target: Path) -> None:
    """Let `pointer` name the folder `target` beside it, atomically."""
    temporary = pointer.with_name(f".writing-{pointer.name}")
    temporary.write_text(f"{target.name}\n")
    _flush(temporary)
    os.replace(temporary, pointer)
    _flush(pointer.parent)


def _steps(checkpoints: Path) -> list[Path]:
    """The checkpoints, oldest first; what is named otherwise is not ours."""
    return sorted(
        (p for p in checkpoints.glob("step_*") if p.name[5:].isdigit()), key=lambda p: int(p.name[5:])
    )


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
