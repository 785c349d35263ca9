"""Training checkpoints: written so that a kill at any moment leaves the previous one whole (SPEC section 10)."""

from __future__ import annotations

import io
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.field_types import check_types
from errors import BadInput
from rl.contracts import Observation
from rl.curriculum import absorb_successes
from rl.disk import check_room
from rl.learner import Learner
from rl.ranks import Ranks
from rl.rollout import Collected
from rl.run import write_json
from untrusted.json_file import as_object, required
from untrusted.torch_file import load_torch

TRAINER_FILE = "trainer.pt"
RETURN_ALPHA = 0.99
SMALL_FILES_BYTES = 8 * 2**20  # tokenizer, observations
# What torch, numpy and random raise for states that are not theirs.
_MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


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
    baseline_rate: float | None = None  # the student's success in the first evaluation
    return_average: float | None = None  # exponential average of the episodic return
    updates_without_signal: int = 0  # policy-gradient updates in a row whose advantages were all 0
    task_success: dict[int, float] = field(default_factory=dict)  # curriculum: exponential average per task
    wandb_id: str | None = None
    ranks: int = 1  # processes that train together; which episodes they play depends on their number

    def improves(self, score: float | None) -> bool:
        """Whether a score beats every earlier one of the run; if so, it is the one to beat from now on."""
        if score is None or (self.best_score is not None and score <= self.best_score):
            return False
        self.best_score = score
        return True

    def absorb(self, collected: Collected, learned_something: bool, curriculum_alpha: float) -> None:
        """Count an update: its env steps, its returns (exponential averages), whether it had a learning signal."""
        self.global_step += collected.env_steps
        self.update += 1
        self.updates_without_signal = 0 if learned_something else self.updates_without_signal + 1
        for trajectory in collected.trajectories:
            value = trajectory.success_return
            previous = value if self.return_average is None else self.return_average
            self.return_average = RETURN_ALPHA * previous + (1 - RETURN_ALPHA) * value
        absorb_successes(self.task_success, collected.trajectories, curriculum_alpha)


def save_checkpoint(
    checkpoints: Path, learner: Learner, state: TrainerState, keep: int, samples: Sequence[Observation] = (),
    best: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Rank 0 writes `checkpoints/step_N`, moves the pointer `latest` to it and deletes older ones beyond `keep`.

    With `best`, the metadata of a new best, the pointer `best` moves there first: `latest` says that all is done.

    The folder is written under a temporary name, flushed to the disk and renamed. Raises OSError (disk full, folder
    gone) with the previous checkpoint untouched. `samples` are a few observations of the run, on which a later merge of
    the adapter checks itself. The other ranks return when it is done.
    """
    if learner.ranks.is_main:
        _write_checkpoint(checkpoints, learner, state, keep, samples, best)
    learner.ranks.wait_for_all()
    return checkpoints / f"step_{state.global_step}"


def _write_checkpoint(
    checkpoints: Path, learner: Learner, state: TrainerState, keep: int, samples: Sequence[Observation],
    best: Mapping[str, Any] | None,
) -> None:  # fmt: skip
    final = checkpoints / f"step_{state.global_step}"
    temporary = checkpoints / f".writing-step_{state.global_step}"
    shutil.rmtree(temporary, ignore_errors=True)
    check_room(checkpoints, checkpoint_bytes(learner), "a checkpoint")
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
        if final.exists():  # left by a kill between the rename and the pointer: this is it again
            shutil.rmtree(final)
        temporary.rename(final)
        _flush(checkpoints)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if best is not None:
        point(checkpoints / "best", final)
    point(checkpoints / "latest", final)
    _prune(checkpoints, keep)


def checkpoint_bytes(learner: Learner) -> int:
    """Roughly the size of a checkpoint: every trained parameter, AdamW's two moments of it, and small files."""
    groups = learner.optimizer.param_groups
    return 3 * sum(p.numel() * p.element_size() for group in groups for p in group["params"]) + SMALL_FILES_BYTES


def load_checkpoint(folder: Path, learner: Learner) -> TrainerState:
    """Restore learner and random generators from a checkpoint folder. Raises BadInput."""
    path = folder / TRAINER_FILE
    try:
        stored = as_object(load_torch(path), str(path))
        fields = as_object(required(stored, "state", str(path)), f"{path}: state")
        check_types(TrainerState, fields)
        state = TrainerState(**fields)
        if min(state.global_step, state.update, state.metrics_bytes) < 0:
            raise ValueError("a count is negative")
        check_ranks(state, learner.ranks)
        check_numbers(stored, str(path))
        learner.policy.load_adapter(folder)
        if learner.critic is not None:
            learner.critic.load_state_dict(stored["critic"])
        _check_optimizer(stored["optimizer"], learner.optimizer)
        learner.optimizer.state.clear()  # first: a full GPU has no room for the moments of both
        learner.optimizer.load_state_dict(stored["optimizer"])
        _restore_random_state(stored["random"])
    except BadInput as problem:
        raise BadInput(f"{problem}; {_another_step(folder)}") from problem
    except _MISFITS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(f"{path} is not a usable checkpoint ({reason}): {_another_step(folder)}") from error
    return state


def check_numbers(stored: Any, name: str) -> None:
    """Raise BadInput, with its name, at the first tensor in a structure of dictionaries that is not finite."""
    if isinstance(stored, torch.Tensor) and not torch.isfinite(stored).all():
        raise BadInput(
            f"{name} holds NaN or infinity: the file is damaged or its training has diverged; resume from another step "
            "of the run, by pointing checkpoints/latest at it"
        )
    if isinstance(stored, dict):
        for key, value in stored.items():
            check_numbers(value, f"{name}: {key}")


def _another_step(folder: Path) -> str:
    return f"resume from another step of the same run, by pointing {folder.parent / 'latest'} at it"


def _check_optimizer(stored: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for moments of other parameters: torch would take them and fail in the first step."""
    groups, known = stored["param_groups"], optimizer.state_dict()["param_groups"]
    if [group.keys() for group in groups] != [group.keys() for group in known]:
        raise ValueError("the optimizer's settings are others")
    for group, own in zip(groups, known, strict=True):
        for name, value in own.items():
            if name != "params" and type(group[name]) is not type(value):
                raise ValueError(f"the optimizer's {name} is {group[name]!r}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = [number for group in groups for number in group["params"]]
    for number, moments in stored["state"].items():
        shape = parameters[ids.index(number)].shape
        if {name: tensor.shape for name, tensor in moments.items()} != {
            "step": (),
            "exp_avg": shape,
            "exp_avg_sq": shape,
        }:
            raise ValueError("the optimizer's moments belong to other parameters")


def check_ranks(state: TrainerState, ranks: Ranks) -> None:
    """Raise BadInput when a run would go on with another number of processes: they would play other episodes."""
    if state.ranks != ranks.size:
        raise BadInput(
            f"this run trains in {state.ranks} process(es), but now there are {ranks.size}: resume it with "
            f"{Ranks(size=state.ranks).launcher} train_grpo.py"
        )


def mark_best(checkpoints: Path, learner: Learner, state: TrainerState, metadata: Mapping[str, Any]) -> None:
    """Rank 0 points `best` at the latest checkpoint, with metadata.json: its score has become `state.best_score`."""
    if not learner.ranks.is_main:
        return
    folder = (checkpoints / "latest").resolve()
    _describe_best(folder, state, metadata)
    point(checkpoints / "best", folder)


def _describe_best(folder: Path, state: TrainerState, metadata: Mapping[str, Any]) -> None:
    write_json(folder / "metadata.json", {"global_step": state.global_step, "score": state.best_score, **metadata})


def restore_best(checkpoints: Path, learner: Learner) -> Path:
    """Give the policy the adapters of `best`, point `latest` there, too, and return its folder."""
    learner.ranks.wait_for_all()  # rank 0 may have just moved the pointer
    best = (checkpoints / "best").resolve()
    learner.policy.load_adapter(best)
    if learner.ranks.is_main:
        point(checkpoints / "latest", best)
    return best


def latest_checkpoint(run_folder: Path) -> Path:
    """The folder that `checkpoints/latest` points at. Raises BadInput."""
    pointer = run_folder / "checkpoints" / "latest"
    if not pointer.exists():
        steps = sorted(p.name for p in (run_folder / "checkpoints").glob("step_*"))
        raise BadInput(f"--resume {run_folder}: no checkpoint at {pointer}; steps found: {', '.join(steps) or 'none'}")
    return pointer.resolve()


def point(pointer: Path, target: Path) -> None:
    """Make the symbolic link `pointer` name `target` in the same folder, atomically."""
    temporary = pointer.with_name(f".{pointer.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, pointer)
    _flush(pointer.parent)


def _prune(checkpoints: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, those that a pointer names, and what a kill left half-written."""
    for abandoned in checkpoints.glob(".*"):  # folders and pointers
        if abandoned.is_symlink():
            abandoned.unlink()
        else:
            shutil.rmtree(abandoned, ignore_errors=True)
    pointed = {link.resolve().name for link in checkpoints.iterdir() if link.is_symlink()}
    steps = sorted(checkpoints.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    for folder in steps[:-keep]:
        if folder.name not in pointed:
            shutil.rmtree(folder)


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
