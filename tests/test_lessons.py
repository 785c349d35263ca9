"""A warmup in which the student acts learns from all its rollouts so far, also after it was resumed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.config import TrainConfig, changed
from contracts import BadInput
from experiment.checkpoints import TrainerState, load_checkpoint, save_checkpoint
from rl.phases import phase_at
from rl.update import Learner, update
from tests.fakes import FakePolicy, acted_batch, adamw

CONFIG = changed(
    TrainConfig(),
    warmup_actor="student",
    warmup_target="hard",
    warmup_steps=100,
    warmup_epochs=2,
    warmup_lr=1e-2,
    batch_size=4,
    micro_batch_size=2,
)
WARMUP = phase_at(0, CONFIG.phases)
RL = phase_at(10**6, CONFIG.phases)
LENGTHS = (3, 2, 3)


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
    checkpoints.mkdir(exist_ok=True)
    for index in indices:
        update(learner, rollout(index), WARMUP, CONFIG, index)
        folder = save_checkpoint(checkpoints, learner, TrainerState(global_step=index), keep=2)
    return folder


def test_each_update_draws_as_many_rows_from_all_rollouts_alike():
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


def test_lessons_keep_labels_and_no_hidden_states_and_are_forgotten_after_the_warmup(tmp_path):
    learner = untrained()
    play_and_save(learner, range(2), tmp_path / "run")
    assert len(list((tmp_path / "run" / "lessons").iterdir())) == 2
    for lesson in learner.lessons:
        assert lesson.kept == [None] * len(lesson)
        assert torch.equal(lesson.tokens, learner.policy.act_as_teacher(lesson.observations).tokens)
    batch = replace(rollout(2), advantages=torch.ones(sum(LENGTHS)))
    update(learner, batch, RL, CONFIG, 2)
    save_checkpoint(tmp_path / "run", learner, TrainerState(global_step=2), keep=2)
    assert not learner.lessons
    assert not (tmp_path / "run" / "lessons").exists()
    with pytest.raises(BadInput, match="its warmup has ended"):
        load_checkpoint(tmp_path / "run" / "step_1", untrained())
