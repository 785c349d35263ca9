"""Named configurations. The command line starts from one of them and changes single fields."""

from dataclasses import replace

from configs.config import (
    EvaluationConfig,
    PhaseConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    TrainConfig,
    UpdateConfig,
)

# Token-head checkpoints of SimpleVLA-RL (supervised on one trajectory per task): the public starting points whose
# language-model head was trained on action tokens, and which leave room for reinforcement learning.
PUBLIC_CHECKPOINTS = {
    "libero_spatial": "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1",
    "libero_object": "Haozhan72/Openvla-oft-SFT-libero-object-traj1",
    "libero_goal": "Haozhan72/Openvla-oft-SFT-libero-goal-traj1",
    "libero_10": "Haozhan72/Openvla-oft-SFT-libero10-traj1",
}

# Written by `python -m vla.tiny` (`make demo` does it): a random policy of the real architecture and file format.
TINY_CHECKPOINT = "checkpoints/tiny"

_TINY = TrainConfig(
    policy=PolicyConfig(checkpoint=TINY_CHECKPOINT, gradient_checkpointing=False),
    phases=PhaseConfig(warmup_steps=1_760, transition_steps=880, total_steps=3_520),
    rollout=RolloutConfig(n_steps=440),
    update=UpdateConfig(n_epochs=4, batch_size=8, micro_batch_size=8, lr=1e-3),
    # Random weights never succeed: until a trained small policy is bundled, its demo goes on without a success.
    evaluation=EvaluationConfig(eval_interval=1_760, allow_zero_baseline=True),
    task=TaskConfig(eval_init_states=(40, 44)),
    run=RunConfig(name="tiny"),
)

PRESETS: dict[str, TrainConfig] = {
    **{
        suite: TrainConfig(
            task=TaskConfig(task_suite=suite), policy=PolicyConfig(checkpoint=checkpoint), run=RunConfig(name="openvla")
        )
        for suite, checkpoint in PUBLIC_CHECKPOINTS.items()
    },
    "libero_90": TrainConfig(task=TaskConfig(task_suite="libero_90"), run=RunConfig(name="openvla")),
    "tiny": _TINY,
    # Every phase in seconds: what the tests run.
    "smoke": replace(
        _TINY,
        task=replace(_TINY.task, max_env_steps=16, eval_init_states=(40, 41)),
        phases=PhaseConfig(warmup_steps=32, transition_steps=32, total_steps=96),
        rollout=RolloutConfig(n_steps=32),
        update=replace(_TINY.update, n_epochs=2, batch_size=4, micro_batch_size=4),
        evaluation=EvaluationConfig(eval_interval=64, allow_zero_baseline=True),
        run=RunConfig(name="smoke", wandb_mode="disabled"),
    ),
}
