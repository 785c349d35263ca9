"""Named configurations. The command line starts from one of them and changes single fields."""

from typing import get_args

from configs.config import Suite, TrainConfig, changed

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
_TINY = changed(
    TrainConfig(), name="tiny", checkpoint=TINY_CHECKPOINT, train_init_states="fresh", eval_init_states=(30, 50),
    warmup_steps=12_000, transition_steps=4_000, total_steps=40_000, n_steps=4_000,
    temperature=1.6, distill_student_temperature=1.6, ratio_level="token",
    n_epochs=4, batch_size=32, lr=2e-4, warmup_lr=1e-3, eval_interval=20_000, eval_trials=3,
)  # fmt: skip

PRESETS: dict[str, TrainConfig] = {
    **{
        suite: changed(TrainConfig(), name="openvla", checkpoint=PUBLIC_CHECKPOINTS.get(suite), task_suite=suite)
        for suite in get_args(Suite)
    },
    "tiny": _TINY,
    # Every phase in seconds: what the tests run.
    "smoke": changed(
        _TINY, name="smoke", eval_init_states=(40, 41), max_env_steps=16, ratio_level="chunk",
        warmup_steps=32, transition_steps=32, total_steps=96, n_steps=32, distill_student_temperature=1.0,
        n_epochs=2, batch_size=4, eval_interval=64, eval_trials=1, allow_zero_baseline=True, wandb_mode="disabled",
    ),
}  # fmt: skip
