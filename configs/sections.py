"""The settings of training by section: frozen dataclasses whose field comments are the text of `--help`.

"env steps" are control steps of the simulator (20 per second in LIBERO). Counts of env steps, such as --total-steps,
are those of training rollouts; they are the x axis of every curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from pydantic import Field

from configs.bounds import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Seed,
    Share,
)
from vla.load_options import Compile, FrozenWeights, L1Student, LoadOptions

TaskIds = tyro.conf.arg(aliases=["--task-id"])
WarmupTarget = Literal["hard", "soft"]
# Marks the settings that a resumed run may change: when it ends, how it is watched, how much of the same computation is
# in memory at once, and the folder of the same assets (`experiment.resume.reopen_run`). A change of any other
# setting would give other results than a run that was never stopped.
CHANGEABLE = "changeable on resume"


@dataclass(frozen=True)
class TaskConfig:
    """The tasks to train on, and their initial states."""

    # Suite of the tasks: libero_spatial, libero_object, libero_goal, libero_10 or libero_90; the first four
    # followed by _swap, _lan, _task or _object for LIBERO-PRO's changes, by _camera, _robot, _language, _noise or _plus
    # for LIBERO-Plus's variants (docs/PUBLISHED_ROBUSTNESS.md).
    task_suite: str = "libero_spatial"
    # Task ids within the suite; several ids train one policy on all of them.
    task_ids: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1), TaskIds] = (0,)
    # Initial states of training. fresh: LIBERO's placement sampler draws a new one for every group, and all of the
    # benchmark's are held out. Or those of the benchmark that training may use: FIRST END, without END itself.
    train_init_states: tuple[NonNegativeInt, NonNegativeInt] | Literal["fresh"] = "fresh"
    # Initial states that evaluation uses: FIRST END, without END itself. 0 50 are all of LIBERO's, as in the published
    # protocol.
    eval_init_states: tuple[NonNegativeInt, NonNegativeInt] = (0, 50)


@dataclass(frozen=True)
class SimulatorConfig:
    """The simulator; the same for training and evaluation."""

    # Simulators for each rank (a process with its GPU), each in a process of its own. auto: one for each usable core,
    # and one more if the policy runs on a CPU; fewer if they would take more than half of the main or GPU memory that
    # is free once the policy is loaded, or if there are not so many episodes to play.
    num_envs: PositiveInt | Literal["auto"] = "auto"
    # Where worker processes run. processes: on this machine; ray: on the nodes of a Ray cluster (docs/SCALE_OUT.md).
    simulators: Annotated[Literal["processes", "ray"], CHANGEABLE] = "processes"
    # Meshes and textures: `official` (LIBERO's), `lowpoly` (this project's) or a folder. auto: official for a 7B,
    # unless it was trained on other looks alone; for a small policy official if there is a GPU, they are installed and
    # the policy was trained on them, else lowpoly.
    assets: Annotated[str, CHANGEABLE] = "auto"
    # Task file (BDDL) of your own, see docs/OWN_TASKS.md (None: the tasks of the suite).
    bddl_file: str | None = None
    # Env steps after which an episode ends (None: the limit of the suite, which is 220 for libero_spatial, 280 for
    # libero_object, 300 for libero_goal, 520 for libero_10 and 400 for libero_90).
    max_env_steps: PositiveInt | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The policy and how it runs; the same for training and evaluation."""

    # Folder or hub id of an OpenVLA-OFT checkpoint, or a trained adapter's folder (RUN/checkpoints/best).
    # (None: the public checkpoint of the suite in training; eval.py needs one.)
    checkpoint: str | None = None
    # Key of the dataset statistics that scale the actions (None: for an adapter the key of its training, if one
    # was given; else that of the suite).
    unnorm_key: str | None = None
    # Images per decision; 1: agentview, 2: the wrist camera, too (None: as the checkpoint says; public ones do not, and
    # are assumed to read two if they have an L1 head and proprio, else one).
    num_images: PositiveInt | None = None
    # What a checkpoint with an L1 head acts and learns by. laplace: tokens drawn around the L1 head's actions (a
    # Laplace distribution), so that training starts at its full success, and ends with an L1 checkpoint again; tokens:
    # its token head, which was never trained on actions. (A trained adapter keeps its own way.)
    l1_student: L1Student = LoadOptions.l1_student
    # Where the policy runs (auto: on a GPU if there is one).
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Precision of the frozen weights; adapters are float32. int8 stores the language model in half the memory of bf16.
    # auto: int8 if an adapter was trained on it, else bf16 on a GPU and float32 on a CPU.
    frozen_weights: FrozenWeights = LoadOptions.frozen_weights
    # Compile the network and, on a GPU, record its passes as CUDA graphs (auto: only on a GPU, where a small network is
    # recorded but not compiled).
    compile: Compile = LoadOptions.compile
    # GiB of GPU memory that the policy may take (None: all that is free). The size in a card's name is fine, although
    # the card reports less (an RTX 4090 23.6): up to 10 % more than it reports counts as all of it.
    memory_budget: Annotated[PositiveFloat | None, CHANGEABLE] = None
    # Largest number of observations in one forward pass of a rollout (None: all that are waiting). Fewer need less
    # memory.
    max_batch: Annotated[PositiveInt | None, CHANGEABLE] = None


@dataclass(frozen=True)
class PhaseConfig:
    """Who acts and which loss is minimised, as a function of env steps."""

    # Begin with a warmup and a transition. --no-warmup: RL alone from env step 0, as always with --l1-student laplace
    # beside an L1 head.
    warmup: bool = True
    # Env steps of the warmup, in which the student learns to match the teacher (auto: 4000, and 50000 if the
    # teacher is an L1 head).
    warmup_steps: NonNegativeInt | Literal["auto"] = "auto"
    # Env steps of the transition, in which the probability that the teacher acts falls linearly from 1 to 0.
    transition_steps: NonNegativeInt = 5_000
    # Env steps of the whole run, whose last rollout is played to its end.
    total_steps: Annotated[NonNegativeInt, CHANGEABLE, tyro.conf.arg(aliases=["--total-timesteps"])] = 130_000
    # Who acts in the warmup. With `student`, the student learns what the teacher would do in the states that the
    # student reaches (auto: student if the teacher is an L1 head, else teacher).
    warmup_actor: Literal["auto", "teacher", "student"] = "auto"
    # What the student learns in the warmup for each number of an action. hard: the teacher's token alone (the guide's);
    # soft: the teacher's distribution at the temperature 0.3 (auto: soft if the teacher acts greedily by its tokens,
    # else hard).
    warmup_target: WarmupTarget | Literal["auto"] = "auto"
    # The frozen teacher. `greedy`: the pretrained policy's most likely tokens; `median`: the medians of its token
    # distributions; `l1`: the checkpoint's L1 head; `auto`: l1 beside a head with --l1-student tokens, else greedy.
    teacher: Literal["auto", "greedy", "median", "l1"] = "auto"
    # Share of the teacher's success rate that the greedy student must reach in the evaluation at the warmup's end. The
    # run stops if it is clearly below, because PPO cannot start from a student that hardly ever succeeds (0: there is
    # no such evaluation).
    warmup_success_ratio: Annotated[Share, CHANGEABLE] = 0.5


@dataclass(frozen=True)
class RolloutConfig:
    """The rollouts, which updates learn from."""

    # Env steps of a rollout, summed over all ranks. New episodes start until this is reached; then the running ones
    # finish.
    n_steps: PositiveInt = 4_096
    # Sampling temperature. The student's logits are divided by it, for sampling and for log-probabilities.
    temperature: PositiveFloat = 1.0
    # Physics of training episodes. fast: about a third of the time, with slightly different results; exact: LIBERO's.
    # Evaluations always use exact.
    physics: Literal["exact", "fast"] = "fast"
    # Episodes of a group: they start from the same (task, initial state).
    group_size: PositiveInt = 1
    # Prefer tasks with a success rate near one half. Without this, tasks take turns.
    curriculum: bool = False
    # Drop groups whose success rate lies outside --group-success-bounds and collect others in their place, at most
    # as many env steps as --n-steps more.
    dynamic_sampling: bool = False
    # Lowest and highest success rate, from 0 to 1, of a group that dynamic sampling keeps.
    group_success_bounds: tuple[Share, Share] = (0.1, 0.9)


@dataclass(frozen=True)
class LossConfig:
    """Advantages and the clipped surrogate loss (PPO)."""

    # Advantage of a trajectory. absolute: its return; group (GRPO): its return standardised within its group; batch:
    # its return minus the mean of its task in the rollout, scaled; gae: its return relative to what a critic expects;
    # auto: gae for several tasks, batch for one.
    advantage: Literal["auto", "absolute", "group", "batch", "gae"] = "absolute"
    # Lambda of the generalised advantage estimate, per decision (only with --advantage gae).
    gae_lambda: Share = 0.95
    # Which ratio is clipped. chunk: one ratio for a chunk of actions, from the mean log-prob of its tokens; token: the
    # ratio of each token (as SimpleVLA-RL does).
    ratio_level: Literal["chunk", "token"] = "token"
    # If the advantage is negative, the ratio is clipped at 1 minus this.
    clip_low: PositiveShare = 0.2
    # If the advantage is positive, the ratio is clipped at 1 plus this.
    clip_high: PositiveShare = 0.28
    # Weight of the penalty for the exact KL divergence from the teacher's distribution (nats per token).
    kl_coef: NonNegativeFloat = 0.0
    # Weight of the bonus for entropy (nats per token).
    entropy_coef: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class UpdateConfig:
    """The adapters and their optimizer."""

    # Passes of an update over the decisions of a rollout.
    n_epochs: PositiveInt = 4
    # Passes of an update in the warmup (auto: 16 if the teacher is an L1 head, else 4).
    warmup_epochs: PositiveInt | Literal["auto"] = "auto"
    # Decisions per optimizer step at most, over all ranks: a rollout is divided into equal parts.
    batch_size: PositiveInt = 64
    # Decisions per forward and backward pass at most. This changes memory and speed, not the result (auto: as many as
    # fit).
    micro_batch_size: Annotated[PositiveInt | Literal["auto"], CHANGEABLE] = "auto"
    # Learning rate of AdamW, per optimizer step. With --desired-kl it is RL's first one.
    lr: Annotated[PositiveFloat, tyro.conf.arg(aliases=["--learning-rate"])] = 3e-5
    # How far an RL update should move the policy, in nats per token: after each update the learning rate is multiplied
    # by this over the measured KL, by at most 3 and at least 1/3 (None: it stays --lr).
    desired_kl: PositiveFloat | None = 0.02
    # Learning rate in the warmup, per optimizer step (auto: 1e-3 if the teacher is an L1 head, else 1e-4).
    warmup_lr: PositiveFloat | Literal["auto"] = "auto"
    # Weight decay of AdamW: every optimizer step takes the learning rate times this share off each weight.
    weight_decay: NonNegativeFloat = 0.01
    # Largest L2 norm of the gradient. A larger one is scaled down to it; above 1000 times this the step is skipped.
    max_grad_norm: PositiveFloat = 1.0
    # Rank of the LoRA adapters, whose output is added as it is (alpha equals the rank).
    lora_rank: PositiveInt = 16
    # Blocks with adapters, counted from the end of the language model; the token head has an adapter, too. All below
    # is frozen: it is computed once, when the policy acts, and kept until the update has learned from it. all: adapters
    # in all parts, also in the vision transformers, and a trained proprio projector. (A trained adapter keeps its own.)
    trained_blocks: PositiveInt | Literal["all"] = "all"


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation of teacher and student on held-out initial states, during training."""

    # Env steps between evaluations; also at step 0, at the end, and after the warmup if --warmup-success-ratio judges
    # the student there. They come between updates, so never more often than --n-steps.
    eval_interval: PositiveInt = 20_000
    # Sampled episodes per task and held-out initial state (0: none), in addition to one greedy episode; more greedy
    # ones would be equal.
    eval_trials: NonNegativeInt = 1
    # Train even if the teacher, or without a warmup the student, had no success in the first evaluation.
    allow_zero_baseline: Annotated[bool, CHANGEABLE] = False


@dataclass(frozen=True)
class RunConfig:
    """Where the run is stored, how it is watched, when it stops, and how many GPUs it uses."""

    # Last part of the run folder's name.
    name: Annotated[str, Field(max_length=64, pattern="^[^/]*$")] = "run"
    # Folder that holds the run folders.
    output: str = "runs"
    # Seed of all random numbers.
    seed: Seed = 0
    # Use every visible GPU: one process (rank) for each GPU computes a share of every rollout and minibatch.
    data_parallel: bool = False
    # Number of the newest checkpoints that are kept, in addition to `best`.
    keep_checkpoints: Annotated[PositiveInt, CHANGEABLE] = 2
    # Save and stop after the first update or evaluation that ends this many hours or more after the program's start
    # (None: no limit). --resume counts anew.
    max_hours: Annotated[PositiveFloat | None, CHANGEABLE] = None
    # Where wandb keeps the metrics (auto: $WANDB_MODE, else online with a login, else offline); metrics.jsonl always
    # has them. The environment variables WANDB_PROJECT (vla-grpo without it), WANDB_ENTITY, WANDB_RUN_GROUP and
    # WANDB_TAGS are used.
    wandb_mode: Annotated[Literal["auto", "online", "offline", "disabled"], CHANGEABLE] = "auto"
