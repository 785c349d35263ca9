"""Named settings (`--preset`), and the checkpoint from which a run starts without --checkpoint."""

from pathlib import Path
from typing import Literal

from configs.config import TrainConfig, changed
from contracts import BadInput
from envs.tasks import split_suite

Preset = Literal["rl", "guide", "tiny", "smoke"]

# Token-head checkpoints of SimpleVLA-RL (supervised on one trajectory per task): the public starting points whose
# language-model head was trained on action tokens, and which leave room for reinforcement learning.
PUBLIC_CHECKPOINTS: dict[str, str] = {
    "libero_spatial": "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1",
    "libero_object": "Haozhan72/Openvla-oft-SFT-libero-object-traj1",
    "libero_goal": "Haozhan72/Openvla-oft-SFT-libero-goal-traj1",
    "libero_10": "Haozhan72/Openvla-oft-SFT-libero10-traj1",
}

# 2 million parameters apart from its vocabulary. Like the public checkpoints it reads one image and no robot state, so
# it has to look. It knows libero_spatial task 0 alone, in both looks. The README in its folder says how it was made.
TINY_CHECKPOINT = "checkpoints/tiny-libero-spatial"

# One rollout of the greedy teacher, one of the transition, then PPO. The student is not judged after the warmup: that
# takes minutes on a CPU. `lr` is only the first learning rate: after each update it follows the default
# --desired-kl. Physics stay fast, to save a CPU's time. docs/LOG.md compares recipes.
_TINY = changed(
    TrainConfig(),
    name="tiny",
    checkpoint=TINY_CHECKPOINT,
    warmup_success_ratio=0.0,
    warmup_steps=3_000,
    transition_steps=3_000,
    total_steps=40_000,
    n_steps=3_000,
    advantage="auto",
    n_epochs=3,
    batch_size=128,
    warmup_epochs=4,
    lr=3e-4,
    warmup_lr=1e-3,
    eval_interval=40_000,
)

# How other projects train a 7B. From SimpleVLA-RL: 512 episodes per update in groups of 8, one epoch of four optimizer
# steps, equal weight for all trajectories, groups without a signal dropped. From RLinf: the learning rate for LoRA.
_RL = changed(
    TrainConfig(),
    name="rl",
    warmup=False,
    total_steps=10_000_000,
    n_steps=64_000,
    physics="exact",  # as in these projects
    group_size=8,
    advantage="group",
    temperature=1.6,
    dynamic_sampling=True,
    n_epochs=1,
    batch_size=2_048,
    lr=1e-4,
    desired_kl=None,
    eval_interval=640_000,
)

# "The guide" is the design guide that this project began with: PPO of a token-level VLA in three phases (warmup by
# imitation, transition, RL), on absolute advantages. The defaults keep its algorithm. These are also its numbers, which
# are small: a whole run plays some 500 episodes, as many as a single update of the preset rl.
_GUIDE = changed(
    TrainConfig(),
    name="guide",
    train_init_states=(0, 40),
    eval_init_states=(40, 50),
    num_envs=1,
    l1_student="tokens",
    warmup_actor="teacher",
    warmup_target="hard",
    warmup_steps=25_000,
    warmup_success_ratio=0.0,
    total_steps=100_000,
    n_steps=512,
    physics="exact",
    ratio_level="chunk",
    n_epochs=10,
    warmup_epochs=10,
    batch_size=2,
    lr=1e-6,
    warmup_lr=1e-6,
    desired_kl=None,
    eval_interval=5_000,
)

# Without a preset a run has the defaults of configs/sections.py, which are for a 7B.
PRESETS: dict[Preset, TrainConfig] = {
    "tiny": _TINY,
    "guide": _GUIDE,
    "rl": _RL,
    # All phases within seconds; the tests run this.
    "smoke": changed(
        _TINY,
        name="smoke",
        num_envs=1,
        eval_init_states=(40, 41),
        max_env_steps=16,
        advantage="absolute",
        ratio_level="chunk",
        warmup_steps=32,
        transition_steps=32,
        total_steps=96,
        n_steps=32,
        physics="exact",
        temperature=1.6,
        n_epochs=2,
        warmup_epochs=1,
        batch_size=4,
        lr=2e-4,
        eval_interval=32,
        allow_zero_baseline=True,
        wandb_mode="disabled",
    ),
}


def with_checkpoint(config: TrainConfig) -> TrainConfig:
    """The settings with a checkpoint that can be found from the current folder: by default that of the suite.

    A suite of LIBERO-PRO or LIBERO-Plus has the checkpoint of the suite that it changes. Raises BadInput for a suite
    without a public checkpoint.
    """
    checkpoint = config.model.checkpoint
    if checkpoint is None:
        base_suite, _ = split_suite(config.task.task_suite)
        if base_suite not in PUBLIC_CHECKPOINTS:
            raise BadInput(f"no public checkpoint of {base_suite} is known: add --checkpoint")
        checkpoint = PUBLIC_CHECKPOINTS[base_suite]
    elif checkpoint == TINY_CHECKPOINT and not Path(checkpoint).is_dir():
        checkpoint = str(Path(__file__).resolve().parents[1] / TINY_CHECKPOINT)
    return changed(config, checkpoint=checkpoint)
