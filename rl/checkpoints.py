"""Training checkpoints: written so that a kill at any moment leaves the previous one whole.

A run's checkpoints/ holds folders step_N and two pointers, `latest` and `best`: text files with a folder's name.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contracts import BadInput, Observation, first_line, resolve_pointer, write_json
from rl.curriculum import absorb_successes
from rl.ranks import Ranks
from rl.rollout import Rollout
from rl.update import Learner

TRAINER_FILE = "trainer.pt"
RETURN_ALPHA = 0.99
SMALL_FILES_BYTES = 8 * 2**20  # tokenizer, observations
# What torch.load says of files that are damaged, and what comes of states that belong to something else.
_UNUSABLE = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


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
    return_average: float | None = None  # exponential average of the episodic return
    task_success: dict[int, float] = field(default_factory=dict)  # curriculum: exponential average per task
    wandb_id: str | None = None
    ranks: int = 1  # processes that train together; which episodes they play depends on their number

    def improves(self, score: float | None) -> bool:
        """Whether a score beats every earlier one of the run; if so, it is the one to beat from now on."""
        if score is None or (self.best_score is not None and score <= self.best_score):
            return False
        self.best_score = score
        return True

    def absorb(self, played: Rollout) -> None:
        """Count an update: its env steps and its returns (exponential averages)."""
        self.global_step += played.env_steps
        self.update += 1
        for trajectory in played.trajectories:
            value = trajectory.success_return
            previous = value if self.return_average is None else self.return_average
            self.return_average = RETURN_ALPHA * previous + (1 - RETURN_ALPHA) * value
        absorb_successes(self.task_success, played.trajectories)


def save_checkpoint(
    checkpoints: Path, learner: Learner, state: TrainerState, keep: int, samples: Sequence[Observation] = (),
    best: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Rank 0 writes `checkpoints/step_N`, moves the pointer `latest` to it and deletes older ones beyond `keep`.

    The folder is written under a temporary name, flushed to the disk and renamed. Raises OSError (disk full, folder
    gone) with the previous checkpoint untouched. `samples` are a few observations of the run, on which a later merge of
    the adapter checks itself. With `best`, the metadata of a new best, the pointer `best` moves there first: `latest`
    says that all is done. The other ranks return when it is done.
    """
    final = checkpoints / f"step_{state.global_step}"
    if learner.ranks.is_main:
        _write_folder(final, learner, state, samples, best)
        if best is not None:
            point(checkpoints / "best", final)
        point(checkpoints / "latest", final)
        _prune(checkpoints, keep)
    learner.ranks.wait_for_all()
    return final


def _write_folder(
    final: Path, learner: Learner, state: TrainerState, samples: Sequence[Observation], best: Mapping[str, Any] | None
) -> None:
    temporary = final.with_name(f".writing-{final.name}")
    _remove(temporary)
    _check_room(final.parent, learner)
    try:
        learner.policy.save_adapter(temporary, samples)
        stored = {"state": asdict(state), "optimizer": learner.optimizer.state_dict(), "random": _random_state()}
        if learner.critic is not None:
            stored["critic"] = learner.critic.state_dict()
        in_memory = io.BytesIO()  # torch's own writer does not say why a file cannot be written
        torch.save(stored, in_memory)
        (temporary / TRAINER_FILE).write_bytes(in_memory.getbuffer())
        if best is not None:
            _describe_best(temporary, state, best)
        for path in [*temporary.rglob("*"), temporary]:
            _flush(path)
        _remove(final)  # left by a kill between the rename and the pointer: this is it again
        temporary.rename(final)
        _flush(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_room(checkpoints: Path, learner: Learner) -> None:
    """Raise OSError (ENOSPC) when a checkpoint will not fit: each trained parameter and AdamW's two moments of it."""
    groups = learner.optimizer.param_groups
    wanted = 3 * sum(p.numel() * p.element_size() for group in groups for p in group["params"]) + SMALL_FILES_BYTES
    if shutil.disk_usage(checkpoints).free < wanted:
        raise OSError(28, f"a checkpoint needs {wanted / 2**30:.2f} GiB", str(checkpoints))


def load_checkpoint(folder: Path, learner: Learner) -> TrainerState:
    """Restore learner and random generators from a checkpoint folder. Raises BadInput."""
    path = folder / TRAINER_FILE
    another_step = f"resume from another step of the run: write its folder's name into {folder.parent / 'latest'}"
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        state = TrainerState(**stored["state"])
        check_ranks(state, learner.ranks)
        _check_finite(stored, str(path))
        learner.policy.load_adapter(folder)
        if learner.critic is not None:
            learner.critic.load_state_dict(stored["critic"])
        learner.optimizer.state.clear()  # first: a full GPU has no room for the moments of both
        learner.optimizer.load_state_dict(stored["optimizer"])
        _restore_random_state(stored["random"])
    except BadInput as problem:
        raise BadInput(f"{problem}; {another_step}") from problem
    except _UNUSABLE as error:
        raise BadInput(f"{path} is not a usable checkpoint ({first_line(error)}); {another_step}") from error
    return state


def _check_finite(stored: Any, name: str) -> None:
    """Raise BadInput, with its name, at the first tensor in a structure of dictionaries that is not finite."""
    if isinstance(stored, torch.Tensor) and not torch.isfinite(stored).all():
        raise BadInput(f"{name} holds NaN or infinity: the file is damaged or its training has diverged")
    if isinstance(stored, dict):
        for key, value in stored.items():
            _check_finite(value, f"{name}: {key}")


def check_ranks(state: TrainerState, ranks: Ranks) -> None:
    """Raise BadInput when a run would go on with another number of processes: they would play other episodes."""
    if state.ranks != ranks.size:
        raise BadInput(
            f"this run trains in {state.ranks} process(es), one for each GPU, but now there are {ranks.size}: resume "
            "it with as many"
        )


def mark_best(checkpoints: Path, learner: Learner, state: TrainerState, metadata: Mapping[str, Any]) -> None:
    """Rank 0 points `best` at the latest checkpoint, with metadata.json: its score has become `state.best_score`."""
    if learner.ranks.is_main:
        folder = resolve_pointer(checkpoints / "latest")
        _describe_best(folder, state, metadata)
        point(checkpoints / "best", folder)


def _describe_best(folder: Path, state: TrainerState, metadata: Mapping[str, Any]) -> None:
    write_json(folder / "metadata.json", {"global_step": state.global_step, "score": state.best_score, **metadata})


def latest_checkpoint(run_folder: Path) -> Path:
    """The folder that `checkpoints/latest` points at. Raises BadInput."""
    pointer = run_folder / "checkpoints" / "latest"
    folder = resolve_pointer(pointer)
    if not folder.is_dir():
        steps = ", ".join(path.name for path in _steps(pointer.parent)) or "none"
        missing = "" if folder == pointer else f" ({folder.name}, which it names, is not there)"
        raise BadInput(f"--resume {run_folder}: no checkpoint at {pointer}{missing}; steps found: {steps}")
    return folder


def point(pointer: Path, target: Path) -> None:
    """Let `pointer` name the folder `target` beside it, atomically."""
    temporary = pointer.with_name(f".{pointer.name}-{os.getpid()}")
    temporary.write_text(f"{target.name}\n")
    _flush(temporary)
    os.replace(temporary, pointer)
    _flush(pointer.parent)


def _prune(checkpoints: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, the best, and what a kill left half-written."""
    for pattern in (".writing-step_*", ".latest-*", ".best-*"):
        for abandoned in checkpoints.glob(pattern):
            _remove(abandoned)
    best = resolve_pointer(checkpoints / "best")
    for folder in _steps(checkpoints)[:-keep]:
        if folder != best:
            _remove(folder)


def _steps(checkpoints: Path) -> list[Path]:
    """The checkpoints, oldest first; what is named otherwise is not ours."""
    numbers = {int(path.name[5:]): path for path in checkpoints.glob("step_*") if re.fullmatch(r"step_\d+", path.name)}
    return [numbers[step] for step in sorted(numbers)]


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():  # a checkpoint may have been moved to another disk and linked back
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _random_state() -> dict[str, Any]:
    """States of all global generators, in types that torch.load(weights_only=True) accepts."""
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": random.getstate(),
        # numpy's type of the tuple is that of its other answer, a dictionary.
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),  # type: ignore[attr-defined]
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_random_state(stored: dict[str, Any]) -> None:
    version, internal, gauss = stored["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = stored["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(stored["torch"])
    if stored["cuda"] and torch.cuda.device_count() == len(stored["cuda"]):
        torch.cuda.set_rng_state_all(stored["cuda"])
