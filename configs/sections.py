"""The settings of training by section: frozen dataclasses whose field docstrings are the text of `--help`.

"env steps" are control steps of the simulator (20 per second in LIBERO). Counts of env steps, such as --total-steps,
are those of training rollouts; they are the x axis of every curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from configs.bounds import NOT_NEGATIVE, POSITIVE, POSITIVE_SHARE, SHARE

TaskIds = tyro.conf.arg(aliases=["--task-id"])
LONGEST_NAME = 64  # bytes of --name; file systems allow 255 for a run folder, whose name has further parts
# Marks the settings that a resumed run may change: when it ends, how it is watched, how much of the same computation is
# in memory at once, and the folder of the same assets (`experiment.run_folder.reopen_run`). A change of any other
# setting would give other results than a run that was never stopped.
CHANGEABLE = "changeable on resume"


@dataclass(frozen=True)
class TaskConfig:
    """The tasks to train on, and their initial states."""

    task_suite: str = "libero_spatial"
    """Suite of the tasks: libero_spatial, libero_object, libero_goal, libero_10 or libero_90; the first four followed
    by _swap, _lan, _task or _object for LIBERO-PRO's changes, by _camera, _robot, _language, _noise or _plus (all four)
    for LIBERO-Plus's variants (docs/PUBLISHED_ROBUSTNESS.md)."""
    task_ids: Annotated[tuple[int, ...], NOT_NEGATIVE, TaskIds] = (0,)
    """Task ids within the suite; several ids train one policy on all of them."""
    train_init_states: Annotated[tuple[int, int] | Literal["fresh"], NOT_NEGATIVE] = "fresh"
    """Initial states of training. fresh: LIBERO's placement sampler draws a new one for every group, and all of the
    benchmark's are held out. Or those of the benchmark that training may use: FIRST END, without END itself."""
    eval_init_states: Annotated[tuple[int, int], NOT_NEGATIVE] = (0, 50)
    """Initial states that evaluation uses: FIRST END, without END itself. 0 50 are all of LIBERO's, as in the published
    protocol."""


@dataclass(frozen=True)
class SimulatorConfig:
    """The simulator; the same for training and evaluation."""

    num_envs: Annotated[int | Literal["auto"], POSITIVE] = "auto"
    """Simulators for each rank (a process with its GPU). 1 runs in that process; several run in worker processes. auto:
    one for each usable core, and one more if the policy runs on a CPU; fewer if they would take more than half of the
    main or GPU memory that is free once the policy is loaded, or if there are not so many episodes to play."""
    simulators: Annotated[Literal["processes", "ray"], CHANGEABLE] = "processes"
    """Where worker processes run. processes: on this machine; ray: on the nodes of a Ray cluster
    (docs/SCALE_OUT.md)."""
    assets: Annotated[str, CHANGEABLE] = "auto"
    """Meshes and textures: `official` (LIBERO's), `lowpoly` (this project's) or a folder. auto: official for a 7B; for
    a small policy official if there is a GPU, they are installed and the policy was trained on them, else lowpoly."""
    bddl_file: str | None = None
    """Task file (BDDL) of your own, see docs/OWN_TASKS.md (None: the tasks of the suite)."""
    max_env_steps: Annotated[int | None, POSITIVE] = None
    """Env steps after which an episode ends (None: the limit of the suite, which is 220 for libero_spatial, 280 for
    libero_object, 300 for libero_goal, 520 for libero_10 and 400 for libero_90)."""
    kept_tasks: Annotated[int, POSITIVE, CHANGEABLE] = 3
    """Tasks that each simulator keeps in memory. Building a task again takes seconds. (eval.py keeps one: there a
    simulator never goes back to a task.)"""


@dataclass(frozen=True)
class ModelConfig:
    """The policy and how it runs; the same for training and evaluation."""

    checkpoint: str | None = None
    """Folder or hub id of an OpenVLA-OFT checkpoint, or a trained adapter's folder (RUN/checkpoints/best)."""
    unnorm_key: str | None = None
    """Key of the dataset statistics that scale the actions (None: the key of the suite)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy runs (auto: on a GPU if there is one)."""
    frozen_weights: Literal["auto", "float32", "bf16", "int8", "fp8"] = "auto"
    """Precision of the frozen weights; adapters are float32. int8 and fp8 store the language model in half the memory
    of bf16. auto: int8 or fp8 if an adapter was trained on it, else bf16 on a GPU and float32 on a CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the network and, on a GPU, record its passes as CUDA graphs (auto: only on a GPU, where a small network
    is recorded but not compiled)."""
    memory_budget: Annotated[float | None, POSITIVE, CHANGEABLE] = None
    """GiB of GPU memory that the policy may take (None: all that is free). A budget up to 10 % above what the GPU
    reports means all of the GPU, because a card reports less than its name says (24 for an RTX 4090, which reports
    23.6)."""
    max_batch: Annotated[int | None, POSITIVE, CHANGEABLE] = None
    """Largest number of observations in one forward pass of a rollout (None: all that are waiting). Fewer need less
    memory."""


@dataclass(frozen=True)
class PhaseConfig:
    """Who acts and which loss is minimised, as a function of env steps."""

    warmup: bool = True
    """Begin with a warmup and a transition. --no-warmup: RL alone from env step 0."""
    warmup_steps: Annotated[int | Literal["auto"], NOT_NEGATIVE] = "auto"
    """Env steps of the warmup, in which the student learns to match the teacher (auto: 50000 if the teacher is an L1
    head, beside which no token head was trained; else 4000)."""
    transition_steps: Annotated[int, NOT_NEGATIVE] = 5_000
    """Env steps of the transition, in which the probability that the teacher acts falls linearly from 1 to 0."""
    total_steps: Annotated[int, NOT_NEGATIVE, CHANGEABLE] = 130_000
    """Env steps of the whole run."""
    warmup_actor: Literal["auto", "teacher", "student"] = "auto"
    """Who acts in the warmup. With `student`, the student learns what the teacher would do in the states that the
    student reaches (auto: student if the teacher is an L1 head, else teacher)."""
    teacher: str = "auto"
    """The frozen teacher. `greedy`: the pretrained policy's most likely tokens; `median`: the medians of its token
    distributions; `l1`: the checkpoint's L1 head; `auto`: l1 if the checkpoint has such a head, else greedy. Or another
    CHECKPOINT (folder, hub id or trained adapter): a stronger policy with the same inputs."""
    distill_student_temperature: Annotated[float, POSITIVE] = 1.0
    """Temperature of the student's logits in the loss of the warmup. With the value of --temperature the sampling
    student learns to match the teacher; with 1 the greedy student does."""
    warmup_agreement: Annotated[float, SHARE, CHANGEABLE] = 0.5
    """Share of the teacher's success rate that the greedy student must reach in the evaluation at the warmup's end. The
    run stops if it is clearly below, because PPO cannot start from a student that hardly ever succeeds (0: never)."""

    @property
    def teacher_checkpoint(self) -> str | None:
        """The checkpoint that --teacher names; None if the trained checkpoint is its own teacher."""
        return None if self.teacher in ("auto", "greedy", "median", "l1") else self.teacher


@dataclass(frozen=True)
class RolloutConfig:
    """The rollouts, which updates learn from."""

    n_steps: Annotated[int, POSITIVE] = 4_096
    """Env steps of a rollout, summed over all ranks. New episodes start until this is reached; then the running ones
    finish."""
    temperature: Annotated[float, POSITIVE] = 1.0
    """Sampling temperature. The student's logits are divided by it, for sampling and for log-probabilities."""
    physics: Literal["exact", "fast"] = "fast"
    """Physics of training episodes. fast: about a third of the time, with slightly different results; exact: LIBERO's.
    Evaluations always use exact."""
    group_size: Annotated[int, POSITIVE] = 1
    """Episodes of a group: they start from the same (task, initial state)."""
    curriculum: bool = False
    """Prefer tasks with a success rate near one half. Without this, tasks take turns."""
    dynamic_sampling: bool = False
    """Drop groups whose success rate lies outside --group-success-bounds and collect others in their place, for at most
    --n-steps more env steps."""
    group_success_bounds: Annotated[tuple[float, float], SHARE] = (0.1, 0.9)
    """Lowest and highest success rate, from 0 to 1, of a group that dynamic sampling keeps."""


@dataclass(frozen=True)
class LossConfig:
    """Advantages and the clipped surrogate loss (PPO)."""

    advantage: Literal["auto", "absolute", "group", "rloo", "batch", "gae"] = "absolute"
    """Advantage of a trajectory. absolute: its return; group (GRPO): its return standardised within its group; rloo:
    its return minus the mean of the others in its group; batch: its return minus the mean of its task in the rollout,
    scaled; gae: its return relative to what a critic expects; auto: gae for several tasks, batch for one."""
    discount: Annotated[float, POSITIVE_SHARE] = 1.0
    """Discount factor per decision, counted back from the last decision (only with --advantage absolute)."""
    gae_lambda: Annotated[float, SHARE] = 0.95
    """Lambda of the generalised advantage estimate, per decision (only with --advantage gae)."""
    ratio_level: Literal["chunk", "token"] = "token"
    """Which ratio is clipped. chunk: one ratio for a chunk of actions, from the mean log-prob of its tokens; token: the
    ratio of each token (as SimpleVLA-RL does)."""
    clip_low: Annotated[float, POSITIVE_SHARE] = 0.2
    """If the advantage is negative, the ratio is clipped at 1 minus this."""
    clip_high: Annotated[float, POSITIVE_SHARE] = 0.28
    """If the advantage is positive, the ratio is clipped at 1 plus this."""
    kl_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the penalty for the exact KL divergence from the teacher's distribution (nats per token)."""
    entropy_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the bonus for entropy (nats per token)."""


@dataclass(frozen=True)
class UpdateConfig:
    """The adapters and their optimizer."""

    n_epochs: Annotated[int, POSITIVE] = 4
    """Passes of an update over the decisions of a rollout."""
    warmup_epochs: Annotated[int | Literal["auto"], POSITIVE] = "auto"
    """Passes of an update in the warmup (auto: 16 if the teacher is an L1 head, else 1)."""
    batch_size: Annotated[int, POSITIVE] = 64
    """Decisions per optimizer step at most, over all ranks: a rollout is divided into equal parts."""
    micro_batch_size: Annotated[int | Literal["auto"], POSITIVE, CHANGEABLE] = "auto"
    """Decisions per forward and backward pass. This changes memory and speed, not the result (auto: as many as fit)."""
    lr: Annotated[float, POSITIVE] = 3e-5
    """Learning rate of AdamW, per optimizer step. With --desired-kl it is RL's first one."""
    desired_kl: Annotated[float | None, POSITIVE] = 0.02
    """How far an RL update should move the policy, in nats per token: after each update the learning rate is multiplied
    by this over the measured KL, by at most 3 and at least 1/3 (None: it stays --lr)."""
    warmup_lr: Annotated[float | Literal["auto"], POSITIVE] = "auto"
    """Learning rate in the warmup, per optimizer step (auto: 1e-3 if the teacher is an L1 head, else 3e-6)."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.01
    """Weight decay of AdamW: every optimizer step takes the learning rate times this share off each weight."""
    max_grad_norm: Annotated[float, POSITIVE] = 1.0
    """Largest L2 norm of the gradient. A larger one is scaled down to it; above 1000 times this the step is skipped."""
    target_kl: Annotated[float | None, POSITIVE] = 0.1
    """End an update after an epoch whose mean approximate KL, in nats per token, exceeds this (None: never)."""
    lora_rank: Annotated[int, POSITIVE] = 16
    """Rank of the LoRA adapters, whose output is added as it is (alpha equals the rank)."""
    gradient_checkpointing: Annotated[Literal["auto", "on", "off"], CHANGEABLE] = "auto"
    """Recompute activations in the backward pass, which is slower and needs less memory (auto: only in as many blocks
    as memory requires)."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation of teacher and student on held-out initial states, during training."""

    eval_interval: Annotated[int, POSITIVE] = 20_000
    """Env steps between evaluations (also at step 0 and at the end)."""
    eval_trials: Annotated[int, NOT_NEGATIVE] = 1
    """Sampled episodes per task and held-out initial state (0: none), in addition to one greedy episode; more greedy
    ones would be equal."""
    allow_zero_baseline: Annotated[bool, CHANGEABLE] = False
    """Train even if the teacher, or without a warmup the student, had no success in the first evaluation."""
    best_by: Literal["evaluation", "return"] = "evaluation"
    """What the checkpoint `best` maximises. evaluation: the greedy student's success rate in evaluations;
    return: the moving average of the return in training."""


@dataclass(frozen=True)
class RunConfig:
    """Where the run is stored, how it is watched, when it stops, and how many GPUs it uses."""

    name: str = "run"
    """Last part of the run folder's name."""
    output: str = "runs"
    """Folder that holds the run folders."""
    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Seed of all random numbers."""
    data_parallel: bool = False
    """Use every visible GPU: one process (rank) for each GPU computes a share of every rollout and minibatch."""
    keep_checkpoints: Annotated[int, POSITIVE, CHANGEABLE] = 2
    """Number of the newest checkpoints that are kept, in addition to `best`."""
    max_hours: Annotated[float | None, POSITIVE, CHANGEABLE] = None
    """Save and stop after the first update that ends this many hours or more after the start of the program (None: no
    limit). --resume counts anew."""
    wandb_mode: Annotated[Literal["auto", "online", "offline", "disabled"], CHANGEABLE] = "auto"
    """Where wandb keeps the metrics (auto: online with a wandb login, else offline); metrics.jsonl always has them. The
    environment variables WANDB_PROJECT (vla-grpo without it), WANDB_ENTITY, WANDB_RUN_GROUP and WANDB_TAGS are used."""
