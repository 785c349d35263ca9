"""Every setting of a run: frozen dataclasses whose field docstrings are the text of `--help`.

A configuration is a value: it is built once from a preset and the command line, checked in `__post_init__`, stored in
the run folder and never changed. Units are in the names or in the docstrings; "env steps" are 20 Hz control steps of
training rollouts (SPEC: the x axis of every curve).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal

import tyro

from errors import BadInput

Suite = Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BadInput(message)


@dataclass(frozen=True)
class TaskConfig:
    """What is trained on, and in which simulator."""

    task_suite: Suite = "libero_spatial"
    """LIBERO suite."""
    task_ids: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--task-id"])] = (0,)
    """Task ids within the suite; several ids train one policy on all of them."""
    bddl_file: str | None = None
    """A BDDL file of your own in place of a task of the suite."""
    train_init_states: tuple[int, int] = (0, 40)
    """First and one-past-last of the benchmark's initial states that training may use."""
    eval_init_states: tuple[int, int] = (40, 50)
    """First and one-past-last of the initial states that evaluation uses (0 50: the published protocol)."""
    max_env_steps: int | None = None
    """Episode cap in env steps (default: the suite's; spatial 220, object 280, goal 300, 10: 520, 90: 400)."""
    num_envs: int = 1
    """Simulators (of each rank): 1 steps inline in this process, N > 1 run in worker processes."""
    assets: str = "lowpoly"
    """What objects look like: `lowpoly` (ours, no download), `official`, or a folder; the environment variable
    LIBERO_ASSETS names a folder in place of lowpoly."""

    def __post_init__(self) -> None:
        _require(len(self.task_ids) > 0, "--task-ids needs at least one task id")
        _require(len(set(self.task_ids)) == len(self.task_ids), f"--task-ids names a task twice: {self.task_ids}")
        _require(self.num_envs >= 1, f"--num-envs must be at least 1, got {self.num_envs}")
        _require(
            self.max_env_steps is None or self.max_env_steps >= 1,
            f"--max-env-steps must be at least 1, got {self.max_env_steps}",
        )
        for flag, (first, end) in (
            ("--train-init-states", self.train_init_states),
            ("--eval-init-states", self.eval_init_states),
        ):
            _require(0 <= first < end, f"{flag} must be FIRST END with 0 <= FIRST < END, got {first} {end}")


@dataclass(frozen=True)
class PolicyConfig:
    """The pretrained policy and what is trained of it."""

    checkpoint: str | None = None
    """Folder or Hugging Face id of an OpenVLA-OFT checkpoint (default: the public token-head checkpoint of the
    suite)."""
    unnorm_key: str | None = None
    """Key of the dataset statistics (default: found from the suite's name)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy runs."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the frozen weights (auto: bfloat16 on a GPU, float32 on a CPU). Adapters are float32."""
    data_parallel: bool = False
    """Use every visible GPU (CUDA_VISIBLE_DEVICES chooses): each gets a replica of the policy and its share of every
    batch; --micro-batch-size is per GPU. The result is that of one GPU but for rounding."""
    lora_rank: int = 16
    """Rank of the LoRA adapters."""
    lora_alpha: int = 16
    """Scale of the adapters: alpha / rank."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the transformer blocks and, on a GPU, record whole passes as CUDA graphs (auto: on a GPU). The first
    pass of each batch size takes seconds longer, all others a fraction of the time."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Recompute activations in the backward pass: slower, for less memory (auto: as many blocks as do not fit)."""
    memory_budget: float | None = None
    """GiB of GPU memory that the policy may take (default: all that is free)."""
    temperature: float = 1.0
    """Sampling temperature of the student; its log-probabilities use the same value."""
    teacher: Literal["auto", "greedy", "l1"] = "auto"
    """The frozen teacher: `greedy` (the pretrained policy's argmax), `l1` (the checkpoint's regression head), or
    `auto`: l1 when the checkpoint ships an action head, else greedy."""

    def __post_init__(self) -> None:
        _require(
            self.memory_budget is None or self.memory_budget > 0,
            f"--memory-budget must be positive, got {self.memory_budget}",
        )
        _require(self.lora_rank >= 1, f"--lora-rank must be at least 1, got {self.lora_rank}")
        _require(self.lora_alpha >= 1, f"--lora-alpha must be at least 1, got {self.lora_alpha}")
        _require(self.temperature > 0, f"--temperature must be positive, got {self.temperature}")


@dataclass(frozen=True)
class PhaseConfig:
    """Who acts and which loss is minimised, as a function of env steps."""

    warmup: bool = True
    """--no-warmup: pure RL from step 0 (no warmup, no transition)."""
    warmup_steps: int = 25_000
    """Env steps in which the teacher acts and the student learns to match it."""
    transition_steps: int = 5_000
    """Env steps in which the teacher acts with a probability that falls linearly from 1 to 0."""
    total_steps: int = 100_000
    """Env steps of the whole run."""
    warmup_only: bool = False
    """Stop at the end of the warmup."""
    distill_target: Literal["greedy", "sharpened"] = "greedy"
    """What the warmup matches: the teacher's tokens, or its distribution at --distill-temperature."""
    distill_temperature: float = 0.5
    """Temperature that sharpens the teacher's distribution (only with --distill-target sharpened)."""
    distill_student_temperature: float = 1.0
    """Temperature of the student's distribution that the warmup matches to the target. At the sampling temperature
    (--temperature) the sampled student learns to do what the teacher does; at 1 its argmax does."""
    importance: Literal["student", "behaviour"] = "student"
    """Denominator of PPO's ratio in the transition: the student's own probability, or the exact probability of the
    mixture that acted (then ratios are of joint chunk probabilities)."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--warmup-steps", self.warmup_steps),
            ("--transition-steps", self.transition_steps),
            ("--total-steps", self.total_steps),
        ):
            _require(value >= 0, f"{flag} must not be negative, got {value}")
        for flag, value in (
            ("--distill-temperature", self.distill_temperature),
            ("--distill-student-temperature", self.distill_student_temperature),
        ):
            _require(value > 0, f"{flag} must be positive, got {value}")
        _require(self.warmup or not self.warmup_only, "--warmup-only and --no-warmup contradict each other")


@dataclass(frozen=True)
class RolloutConfig:
    """How much experience an update learns from."""

    n_steps: int = 512
    """Env steps of a rollout, over all ranks: new episodes start until it is reached, running ones finish."""
    group_size: int = 1
    """Episodes from each drawn (task, initial state)."""
    dynamic_sampling: bool = False
    """Drop groups whose success rate lies outside --group-success-bounds and collect others in their place."""
    group_success_bounds: tuple[float, float] = (0.1, 0.9)
    """Success rates of a group that dynamic sampling keeps."""
    max_extra_steps: int = 2_048
    """Env steps per update that dynamic sampling may spend beyond --n-steps (a group that has started is finished)."""
    max_batch: int | None = None
    """Observations that the policy decides on together at most (default: all that wait); fewer need less memory."""
    patience_ms: float = 0.0
    """Milliseconds that a batch waits for simulators about to be ready. 0: whatever is ready is decided at once."""

    def __post_init__(self) -> None:
        _require(self.n_steps >= 1, f"--n-steps must be at least 1, got {self.n_steps}")
        _require(self.group_size >= 1, f"--group-size must be at least 1, got {self.group_size}")
        _require(self.max_extra_steps >= 0, f"--max-extra-steps must not be negative, got {self.max_extra_steps}")
        _require(self.max_batch is None or self.max_batch >= 1, f"--max-batch must be at least 1, got {self.max_batch}")
        _require(self.patience_ms >= 0, f"--patience-ms must not be negative, got {self.patience_ms}")
        low, high = self.group_success_bounds
        _require(0 <= low <= high <= 1, f"--group-success-bounds must satisfy 0 <= LOW <= HIGH <= 1, got {low} {high}")


@dataclass(frozen=True)
class LossConfig:
    """Advantages and the clipped surrogate."""

    advantage: Literal["absolute", "group", "rloo", "batch", "gae"] = "absolute"
    """Advantage of a trajectory: its return, or its return relative to the others of its group or of the rollout; or
    of each decision, by a critic (gae)."""
    discount: float = 1.0
    """Discount per decision, counted back from the last one (only with --advantage absolute or gae)."""
    ratio_level: Literal["chunk", "token"] = "chunk"
    """Clip the ratio of chunk log-probs (mean over tokens) or each token's ratio (SimpleVLA-RL)."""
    clip_low: float = 0.2
    """Clip distance on the side that limits a decrease for A > 0 (and an increase for A < 0)."""
    clip_high: float = 0.28
    """Clip distance on the other side ("clip higher")."""
    kl_coef: float = 0.0
    """Weight of the exact KL divergence from the teacher's distribution."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    aggregation: Literal["decision", "trajectory"] = "decision"
    """Every decision, or every trajectory, weighs the same."""

    def __post_init__(self) -> None:
        _require(0 < self.discount <= 1, f"--discount must lie in (0, 1], got {self.discount}")
        _require(
            self.discount == 1 or self.advantage in ("absolute", "gae"),
            f"--discount {self.discount} needs --advantage absolute or gae: {self.advantage} compares plain returns",
        )
        for flag, value in (("--clip-low", self.clip_low), ("--clip-high", self.clip_high)):
            _require(0 < value < 1, f"{flag} must lie in (0, 1), got {value}")
        for flag, value in (("--kl-coef", self.kl_coef), ("--entropy-coef", self.entropy_coef)):
            _require(value >= 0, f"{flag} must not be negative, got {value}")


@dataclass(frozen=True)
class CriticConfig:
    """The value head of --advantage gae."""

    gae_lambda: float = 0.95
    """Lambda of the generalised advantage estimate."""
    value_lr: float = 1e-4
    """Learning rate of the value head."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    value_clip: float = 0.2
    """Largest change of a value that the value loss rewards within one update."""
    value_warmup_steps: int = 0
    """Env steps, after the warmup phase, in which only the value head learns."""
    critic_through_backbone: bool = False
    """Let the value loss train the adapters, too."""

    def __post_init__(self) -> None:
        _require(0 <= self.gae_lambda <= 1, f"--gae-lambda must lie in [0, 1], got {self.gae_lambda}")
        for flag, value in (
            ("--value-lr", self.value_lr),
            ("--value-coef", self.value_coef),
            ("--value-clip", self.value_clip),
        ):
            _require(value > 0, f"{flag} must be positive, got {value}")
        _require(
            self.value_warmup_steps >= 0, f"--value-warmup-steps must not be negative, got {self.value_warmup_steps}"
        )


@dataclass(frozen=True)
class CurriculumConfig:
    """Which of several tasks is practised."""

    curriculum: bool = False
    """Prefer tasks that succeed about half of the time (else tasks take turns)."""
    curriculum_alpha: float = 0.9
    """Weight of the past in each task's exponential average of successes, per episode."""
    curriculum_temperature: float = 0.2
    """How strongly tasks near 50 % success are preferred (small: strongly)."""
    curriculum_floor: float = 0.2
    """Share of the sampling that stays uniform over the tasks."""

    def __post_init__(self) -> None:
        _require(0 <= self.curriculum_alpha < 1, f"--curriculum-alpha must lie in [0, 1), got {self.curriculum_alpha}")
        _require(
            self.curriculum_temperature > 0,
            f"--curriculum-temperature must be positive, got {self.curriculum_temperature}",
        )
        _require(0 <= self.curriculum_floor <= 1, f"--curriculum-floor must lie in [0, 1], got {self.curriculum_floor}")


@dataclass(frozen=True)
class UpdateConfig:
    """The optimizer."""

    n_epochs: int = 10
    """Passes over a rollout."""
    batch_size: int = 2
    """Decisions per optimizer step, over all ranks."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Decisions per forward and backward pass and device; the gradient does not depend on it, memory does (auto: as
    fits, at most --batch-size)."""
    lr: float = 1e-6
    """Learning rate of AdamW."""
    warmup_lr: float | None = None
    """Learning rate in the warmup (default: --lr); imitation bears larger steps than reinforcement."""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    max_grad_norm: float = 1.0
    """Gradient norm above which gradients are scaled down (1000 times it: the step is skipped)."""
    target_kl: float | None = None
    """End the epochs of an update when the approximate KL of a whole epoch exceeds this."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--n-epochs", self.n_epochs),
            ("--batch-size", self.batch_size),
            ("--micro-batch-size", self.batch_size if self.micro_batch_size == "auto" else self.micro_batch_size),
        ):
            _require(value >= 1, f"{flag} must be at least 1, got {value}")
        _require(self.lr > 0, f"--lr must be positive, got {self.lr}")
        _require(self.warmup_lr is None or self.warmup_lr > 0, f"--warmup-lr must be positive, got {self.warmup_lr}")
        _require(self.weight_decay >= 0, f"--weight-decay must not be negative, got {self.weight_decay}")
        _require(self.max_grad_norm > 0, f"--max-grad-norm must be positive, got {self.max_grad_norm}")
        _require(self.target_kl is None or self.target_kl > 0, f"--target-kl must be positive, got {self.target_kl}")


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation of teacher and student on held-out initial states."""

    eval_interval: int = 5_000
    """Env steps between evaluations (also at step 0 and at the end)."""
    eval_trials: int = 1
    """Sampled episodes per task and held-out initial state; greedy ones are played once, as they repeat themselves."""
    allow_zero_baseline: bool = False
    """Go on when the policy that acts first has no success in the first evaluation."""
    stop_if_below_baseline: bool = False
    """Stop, with the best checkpoint restored, when the student's success in an evaluation lies below that of the first
    one by more than chance (its 95 % interval ends below the first rate)."""
    max_updates_without_signal: int = 10
    """Stop after so many policy-gradient updates in a row without a single non-zero advantage."""
    best_by: Literal["evaluation", "return"] = "evaluation"
    """What `checkpoints/best` maximises: the lower bound of the student's evaluated success, or the exponential
    average (alpha 0.99) of the episodic return."""

    def __post_init__(self) -> None:
        _require(self.eval_interval >= 1, f"--eval-interval must be at least 1, got {self.eval_interval}")
        _require(self.eval_trials >= 1, f"--eval-trials must be at least 1, got {self.eval_trials}")
        _require(
            self.max_updates_without_signal >= 1,
            f"--max-updates-without-signal must be at least 1, got {self.max_updates_without_signal}",
        )


@dataclass(frozen=True)
class RunConfig:
    """Where the run is kept and how it is watched."""

    name: str = "run"
    """Last part of the run folder's name."""
    output: str = "runs"
    """Folder that holds the run folders."""
    seed: int = 0
    """Seed of everything random."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints are kept beside `best`."""
    max_hours: float | None = None
    """Stop, saved, after the first update that ends more than so many hours after this start (default: no limit). A
    resumed run counts anew."""
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online with a wandb login, else offline. Records always go to metrics.jsonl too."""
    wandb_project: str = "vla-grpo"
    """Project of the wandb run."""
    tensorboard: bool = False
    """Also write the records and a strip of frames per evaluation for TensorBoard (needs the package tensorboard)."""
    rerun: bool = False
    """Also write the filmed episodes of evaluations as rerun recordings (needs the package rerun-sdk)."""

    def __post_init__(self) -> None:
        _require(bool(self.name) and "/" not in self.name, f"--name must be a plain word, got {self.name!r}")
        _require(self.seed >= 0, f"--seed must not be negative, got {self.seed}")
        _require(self.keep_checkpoints >= 1, f"--keep-checkpoints must be at least 1, got {self.keep_checkpoints}")
        _require(self.max_hours is None or self.max_hours > 0, f"--max-hours must be positive, got {self.max_hours}")


@dataclass(frozen=True)
class TrainConfig:
    """Improve a vision-language-action policy on LIBERO tasks by reinforcement learning."""

    task: TaskConfig = field(default_factory=TaskConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    phases: PhaseConfig = field(default_factory=PhaseConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        if self.loss.advantage in ("group", "rloo"):
            _require(
                self.rollout.group_size >= 2,
                f"--advantage {self.loss.advantage} compares episodes of one initial state: it needs --group-size of "
                f"at least 2, got {self.rollout.group_size}",
            )
        if self.curriculum.curriculum:
            _require(len(self.task.task_ids) > 1, "--curriculum chooses between tasks: it needs several --task-ids")
        if self.rollout.dynamic_sampling:
            _require(self.rollout.group_size >= 2, "--dynamic-sampling needs --group-size of at least 2")
        if self.phases.importance == "behaviour":
            _require(
                self.loss.ratio_level == "chunk",
                "--importance behaviour is a ratio of joint chunk probabilities: it needs --ratio-level chunk",
            )
        train, evaluation = self.task.train_init_states, self.task.eval_init_states
        _require(
            train[1] <= evaluation[0] or evaluation[1] <= train[0] or evaluation == (0, 50),
            f"--train-init-states {train} and --eval-init-states {evaluation} overlap: evaluation would see training "
            "states (0 50 is allowed: the published protocol)",
        )


SECTIONS = {f.name: f.default_factory for f in fields(TrainConfig)}


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Nested plain dictionary of a configuration, for JSON."""
    return asdict(config)


def from_dict(stored: Mapping[str, Any], source: str) -> TrainConfig:
    """The inverse of `to_dict` after a trip through JSON; `source` names the file in errors."""
    sections = {}
    for name, section in SECTIONS.items():
        values = stored.get(name)
        known = {f.name for f in fields(section)}
        if not isinstance(values, Mapping) or set(values) != known:
            found = sorted(values) if isinstance(values, Mapping) else type(values).__name__
            raise BadInput(f"{source}: section {name!r} should have the fields {sorted(known)}, found {found}")
        try:
            sections[name] = section(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        except TypeError as error:
            raise BadInput(f"{source}: section {name!r} holds a value of another type ({error})") from None
    return TrainConfig(**sections)


def differing_fields(a: TrainConfig, b: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configurations differ: name -> (value in a, value in b)."""
    flat_a, flat_b = ({k: v for part in to_dict(c).values() for k, v in part.items()} for c in (a, b))
    return {name: (flat_a[name], flat_b[name]) for name in flat_a if flat_a[name] != flat_b[name]}
