"""Named configurations. The command line starts from one of them and changes single fields."""

from dataclasses import replace
from typing import get_args

from configs.config import (
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    PhaseConfig,
    RolloutConfig,
    RunConfig,
    SimulatorConfig,
    Suite,
    TaskConfig,
    TrainConfig,
    UpdateConfig,
)

# Token-head checkpoints of SimpleVLA-RL (supervised on one trajectory per task): the public starting points whose
# language-model head was trained on action tokens, and which leave room for reinforcement learning.
PUBLIC_CHECKPOINTS: dict[Suite, str] = {
    "libero_spatial": "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1",
    "libero_object": "Haozhan72/Openvla-oft-SFT-libero-object-traj1",
    "libero_goal": "Haozhan72/Openvla-oft-SFT-libero-goal-traj1",
    "libero_10": "Haozhan72/Openvla-oft-SFT-libero10-traj1",
}

# 2 million parameters beside its vocabulary, trained on 15 noisy demonstrations a task: good enough to be taught, weak
# enough to learn. Its README says how it was made.
TINY_CHECKPOINT = "checkpoints/tiny-libero-spatial"

# What differs from the 7B's settings beside sizes follows docs/RESULTS.md, "Learning".
_TINY = TrainConfig(
    task=TaskConfig(train_init_states=(0, 30), eval_init_states=(30, 50)),
    model=ModelConfig(checkpoint=TINY_CHECKPOINT),
    phases=PhaseConfig(
        warmup_steps=12_000, transition_steps=4_000, total_steps=40_000, distill_student_temperature=1.6
    ),
    rollout=RolloutConfig(n_steps=4_000, temperature=1.6),
    loss=LossConfig(ratio_level="token"),
    update=UpdateConfig(n_epochs=4, batch_size=32, lr=2e-4, warmup_lr=1e-3),
    evaluation=EvaluationConfig(eval_interval=20_000, eval_trials=3),
    run=RunConfig(name="tiny"),
)

PRESETS: dict[str, TrainConfig] = {
    **{
        suite: TrainConfig(
            TaskConfig(suite), model=ModelConfig(PUBLIC_CHECKPOINTS.get(suite)), run=RunConfig(name="openvla")
        )
        for suite in get_args(Suite)
    },
    "tiny": _TINY,
    # Every phase in seconds: what the tests run.
    "smoke": replace(
        _TINY,
        task=replace(_TINY.task, eval_init_states=(40, 41)),
        simulator=SimulatorConfig(max_env_steps=16),
        phases=PhaseConfig(warmup_steps=32, transition_steps=32, total_steps=96),
        rollout=RolloutConfig(n_steps=32, temperature=1.6),
        loss=LossConfig(),
        update=replace(_TINY.update, n_epochs=2, batch_size=4),
        evaluation=EvaluationConfig(eval_interval=64, allow_zero_baseline=True),
        run=RunConfig(name="smoke", wandb_mode="disabled"),
    ),
}
