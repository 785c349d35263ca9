"""Checkpoints: a failure at any moment leaves the previous one whole, and foreign files do no harm."""

import os
from pathlib import Path

import pytest
import torch

from contracts import BadInput
from experiment.checkpoints import (
    BEST,
    TRAINER_FILE,
    TrainerState,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    write_pointer,
)
from rl.rollout import Rollout
from rl.update import Learner
from tests.fakes import FakePolicy, adamw, trajectory


@pytest.fixture
def checkpoints(tmp_path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def learner() -> Learner:
    policy = FakePolicy()
    return Learner(policy, None, adamw(policy))


def save(checkpoints: Path, learner: Learner, step: int, keep: int = 9) -> Path:
    return save_checkpoint(checkpoints, learner, TrainerState(global_step=step), keep)


def test_the_pointer_moves_only_after_everything_is_on_the_disk(monkeypatch, checkpoints, learner):
    order = []
    fsync = os.fsync
    replace = os.replace

    def noted_fsync(descriptor):
        order.append("fsync")
        fsync(descriptor)

    def noted_replace(source, target):
        order.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    folder = save(checkpoints, learner, 1)
    num_files = sum(path.is_file() for path in folder.rglob("*"))
    before = order[: order.index("latest")]
    assert before.count("fsync") >= num_files + 2  # every file, the folder, and the folder above


def test_what_was_just_written_latest_and_best_are_kept_whatever_other_steps_there_are(checkpoints, learner):
    """After going back to an earlier checkpoint: what was written last counts, not the number of steps."""
    for step in (8, 16, 500, 1000):
        save(checkpoints, learner, step)
    write_pointer(checkpoints / BEST, checkpoints / "step_500")
    folder = save(checkpoints, learner, 12, keep=1)
    assert sorted(path.name for path in checkpoints.glob("step_*")) == ["step_12", "step_500"]
    assert latest_checkpoint(checkpoints.parent) == folder


class Payload:
    """Ends the process that unpickles it."""

    def __reduce__(self):
        return (os.abort, ())


@pytest.mark.parametrize("content", [{"state": {"no_such_field": 1}}, [1, 2, 3], {"state": Payload()}])
def test_foreign_cut_and_missing_trainer_files_are_refused_in_one_line(checkpoints, learner, content):
    folder = save(checkpoints, learner, 1)
    path = folder / TRAINER_FILE

    def is_refused() -> None:
        with pytest.raises(BadInput, match=str(path)):
            load_checkpoint(folder, learner)

    path.write_bytes(path.read_bytes()[:1000])
    is_refused()
    torch.save(content, path)
    is_refused()
    path.unlink()
    is_refused()


def test_an_update_is_counted_with_its_env_steps_successes_by_task_and_signal():
    state = TrainerState(global_step=10, updates_done=4)
    rollout = Rollout([trajectory(2, success=True), trajectory(3, task_id=1, index=1)], {}, 1.0, errors=0)
    state.count_update(rollout, steps_taken=1)
    assert (state.global_step, state.updates_done) == (10 + rollout.env_steps, 5)
    assert state.task_success == pytest.approx({0: 0.9 * 0.5 + 0.1, 1: 0.9 * 0.5})
    counts = []
    for steps_taken in (0, 0, 1, 0):
        state.count_update(rollout, steps_taken)
        counts.append(state.updates_without_signal)
    assert counts == [1, 2, 0, 1]  # in a row
