"""Checkpoints: a failure at any moment leaves the previous one whole, and foreign files do no harm."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from contracts import BadInput, resolve_pointer
from rl.checkpoints import TRAINER_FILE, TrainerState, latest_checkpoint, load_checkpoint, mark_best, save_checkpoint
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


class PowerCut(BaseException):
    """Ends the program where it stands."""


@pytest.mark.parametrize("where", ["save_adapter", "write", "fsync", "rename", "pointer"])
def test_a_cut_while_writing_leaves_the_previous_checkpoint_whole(monkeypatch, checkpoints, learner, where):
    previous = save(checkpoints, learner, 100)
    before, weights = contents(previous), parameters_of(learner.policy)
    train_a_little(learner)

    def cut(*_):
        raise PowerCut

    torn_write = lambda path, data: (path.open("wb").write(data[: len(data) // 2]), cut())  # noqa: E731
    target, replacement = {
        "write": ((Path, "write_bytes"), torn_write),
        "save_adapter": ((learner.policy, "save_adapter"), lambda folder, *_: (Path(folder).mkdir(), cut())),
        "fsync": ((os, "fsync"), cut),
        "rename": ((Path, "rename"), cut),
        "pointer": ((os, "replace"), cut),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(*target, replacement)
        with pytest.raises(PowerCut):
            save(checkpoints, learner, 200)

    assert latest_checkpoint(checkpoints.parent) == previous
    assert contents(previous) == before
    other = untrained()
    assert load_checkpoint(previous, other).global_step == 100
    assert all(torch.equal(a, b) for a, b in zip(weights, parameters_of(other.policy), strict=True))
    assert [p.name for p in checkpoints.glob("step_*") if not (p / TRAINER_FILE).exists()] == []

    again = save(checkpoints, learner, 200)  # the resumed run gets there, too
    assert latest_checkpoint(checkpoints.parent) == again
    assert load_checkpoint(again, untrained()).global_step == 200


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
    played = Rollout([trajectory(2, success=True), trajectory(3, task_id=1, index=1)], {}, wall_s=1.0, errors=0)
    state.absorb(played)
    assert (state.global_step, state.update) == (10 + played.env_steps, 5)
    assert state.return_average == pytest.approx(0.99 * 1.0)  # starts at the first return, then alpha 0.99
    assert state.task_success == pytest.approx({0: 0.9 * 0.5 + 0.1, 1: 0.9 * 0.5})
