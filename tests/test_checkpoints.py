"""Checkpoints: a failure at any moment leaves the previous one whole, and foreign files do no harm."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from contracts import BadInput, resolve_pointer
from experiment.checkpoints import (
    TRAINER_FILE,
    TrainerState,
    latest_checkpoint,
    load_checkpoint,
    mark_best,
    save_checkpoint,
)
from rl.rollout import Rollout
from rl.update import Learner
from tests.fakes import FakePolicy, adamw, parameters_of, random_observations, trajectory


@pytest.fixture
def checkpoints(tmp_path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def learner() -> Learner:
    """A policy and an optimizer with a history."""
    policy = FakePolicy(adapter_scale=0.1)
    learner = Learner(policy, None, adamw(policy))
    train_a_little(learner)
    return learner


def train_a_little(learner: Learner) -> None:
    learner.policy.chunk_logits(random_observations(3)).logsumexp(-1).sum().backward()
    learner.optimizer.step()
    learner.optimizer.zero_grad()


def save(checkpoints: Path, learner: Learner, step: int, keep: int = 9, **state) -> Path:
    return save_checkpoint(checkpoints, learner, TrainerState(global_step=step, **state), keep)


def untrained() -> Learner:
    policy = FakePolicy(adapter_scale=0.1)
    return Learner(policy, None, adamw(policy))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_everything_comes_back(checkpoints, learner):
    state = TrainerState(
        512, 3, 1234, 0, 7, 10, 0.25, return_average=0.5, task_success={0: 0.5, 7: 0.75}, drawn={7: 41}, wandb_id="abc"
    )  # fmt: skip
    save_checkpoint(checkpoints, learner, state, keep=2)
    other = untrained()
    assert load_checkpoint(latest_checkpoint(checkpoints.parent), other) == state
    for a, b in zip(parameters_of(learner.policy), parameters_of(other.policy), strict=True):
        assert torch.equal(a, b)
    train_a_little(learner)
    train_a_little(other)  # the same moments: the next steps are equal, too
    for a, b in zip(parameters_of(learner.policy), parameters_of(other.policy), strict=True):
        assert torch.equal(a, b)


def test_the_pointer_moves_only_after_everything_is_on_the_disk(monkeypatch, checkpoints, learner):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *a: (order.append("pointer"), replace(*a)))
    folder = save(checkpoints, learner, 1)
    files = len(contents(folder))
    assert order.index("pointer") >= files + 2  # every file, the folder, and the folder above


def test_a_missing_checkpoint_is_named_with_the_steps_that_are_there(checkpoints, learner):
    with pytest.raises(BadInput, match=r"no checkpoint at .*latest \(latest\); steps found: none"):
        latest_checkpoint(checkpoints.parent)
    for step in (50, 100):
        folder = save(checkpoints, learner, step)
    shutil.rmtree(folder)
    with pytest.raises(BadInput, match=r"\(step_100\); steps found: step_50"):
        latest_checkpoint(checkpoints.parent)


def test_the_newest_are_kept_by_number_not_by_name_and_the_best_always(checkpoints, learner):
    save(checkpoints, learner, 8)
    mark_best(checkpoints, learner, TrainerState(global_step=8, best_score=0.9), {})
    for step in (9, 10, 100):
        save(checkpoints, learner, step, keep=2)
    assert sorted(p.name for p in checkpoints.glob("step_*")) == ["step_10", "step_100", "step_8"]
    assert resolve_pointer(checkpoints / "best").name == "step_8"


class Payload:
    def __reduce__(self):
        return (os.abort, ())


@pytest.mark.parametrize("damage", ["cut", "text", "missing", "fields", "list", "code"])
def test_damaged_trainer_files_are_refused_in_one_line(checkpoints, learner, damage):
    folder = save(checkpoints, learner, 1)
    path = folder / TRAINER_FILE
    whole = path.read_bytes()
    {
        "cut": lambda: path.write_bytes(whole[: len(whole) // 2]),
        "text": lambda: path.write_text("not a checkpoint"),
        "missing": path.unlink,
        "fields": lambda: torch.save({"state": {"no_such_field": 1}}, path),
        "list": lambda: torch.save([1, 2, 3], path),
        "code": lambda: torch.save({"state": Payload()}, path),  # does not run: it would end this process
    }[damage]()
    with pytest.raises(BadInput) as caught:
        load_checkpoint(folder, untrained())
    assert str(caught.value).startswith(f"{path} is not a usable checkpoint (")


def test_an_update_is_counted_with_its_env_steps_and_returns():
    state = TrainerState(global_step=10, update=4)
    played = Rollout(
        [trajectory(2, success=True), trajectory(3, task_id=1, index=1)], {}, wall_s=1.0, errors=0
    )
    state.count_update(played, has_signal=True)
    assert (state.global_step, state.update) == (10 + played.env_steps, 5)
    assert state.return_average == pytest.approx(
        0.5
    )  # starts at the mean of the first update, then alpha 0.99
    assert state.task_success == pytest.approx({0: 0.9 * 0.5 + 0.1, 1: 0.9 * 0.5})
