"""A warmup in which the student acts learns from all its rollouts so far, also after it was resumed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.config import TrainConfig, changed
from experiment.checkpoints import TrainerState, load_checkpoint, save_checkpoint
from rl.phases import phase_at
from rl.update import Learner, update
from tests.fakes import FakePolicy, acted_batch, adamw, parameters_of

CONFIG = changed(
    TrainConfig(),
    warmup_actor="student",
    warmup_steps=100,
    warmup_epochs=2,
    warmup_lr=1e-2,
    batch_size=4,
    micro_batch_size=2,
)
WARMUP = phase_at(0, CONFIG.phases)
RL = phase_at(10**6, CONFIG.phases)
LENGTHS = (3, 2, 3)


@pytest.fixture
def checkpoints(tmp_path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


class Observed(FakePolicy):
    """Notes what it learned from."""

    def chunk_logits(self, observations, kept=None):
        if torch.is_grad_enabled():
            self.learned = [*getattr(self, "learned", []), *(tuple(o.proprio) for o in observations)]
        return super().chunk_logits(observations, kept)


def untrained() -> Learner:
    policy = Observed(adapter_scale=0.2)
    return Learner(policy, None, adamw(policy))


def rollout(index: int):
    """The same whoever plays it."""
    batch = acted_batch(FakePolicy(adapter_scale=0.2), LENGTHS, seed=index)
    return replace(batch, kept=[torch.tensor(seen.proprio).float() for seen in batch.observations])


def play_and_save(learner: Learner, indices: range, checkpoints: Path) -> Path:
    for index in indices:
        update(learner, rollout(index), WARMUP, CONFIG, index)
        folder = save_checkpoint(checkpoints, learner, TrainerState(global_step=index), keep=2)
    return folder


def test_each_update_draws_as_many_rows_from_all_rollouts_alike(checkpoints):
    learner = untrained()
    for index in range(4):
        learner.policy.learned = []
        metrics = update(learner, rollout(index), WARMUP, CONFIG, index)
        assert metrics["train/optimizer_steps"] == 2 * sum(LENGTHS) / 4
        assert len(learner.policy.learned) == 2 * sum(LENGTHS)
    origins = [
        {tuple(observation.proprio) for observation in rollout(index).observations} for index in range(4)
    ]
    assert all(origin & set(learner.policy.learned) for origin in origins)


def test_all_rows_are_labelled_by_the_teacher_and_keep_no_hidden_states():
    learner = untrained()
    for index in range(2):
        update(learner, rollout(index), WARMUP, CONFIG, index)
    for lesson in learner.lessons:
        assert lesson.kept == [None] * len(lesson)
        expected = learner.policy.act_as_teacher(lesson.observations).tokens
        assert torch.equal(lesson.tokens, expected)


def test_a_resumed_warmup_goes_on_with_the_same_rollouts(checkpoints, tmp_path):
    straight = untrained()
    play_and_save(straight, range(4), checkpoints)
    (tmp_path / "stopped").mkdir()
    folder = play_and_save(untrained(), range(2), tmp_path / "stopped")
    resumed = untrained()
    load_checkpoint(folder, resumed)
    play_and_save(resumed, range(2, 4), tmp_path / "stopped")
    for parameter, expected in zip(
        parameters_of(resumed.policy), parameters_of(straight.policy), strict=True
    ):
        assert torch.equal(parameter, expected)


def test_after_the_warmup_they_are_forgotten(checkpoints):
    learner = untrained()
    play_and_save(learner, range(2), checkpoints)
    assert len(list((checkpoints / "lessons").iterdir())) == 2
    batch = replace(rollout(2), advantages=torch.ones(sum(LENGTHS)))
    update(learner, batch, RL, CONFIG, 2)
    save_checkpoint(checkpoints, learner, TrainerState(global_step=2), keep=2)
    assert not learner.lessons
    assert not (checkpoints / "lessons").exists()
