"""Every setting of a run: frozen dataclasses whose field docstrings are the text of `--help`.

A configuration is a value: it is built once from a preset and the command line, checked in `__post_init__`, stored in
the run folder and never changed. Units are in the names or in the docstrings; "env steps" are 20 Hz control steps of
training rollouts (SPEC: the x axis of every curve).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_type_hints

from configs.experience import CurriculumConfig, EvaluationConfig, RolloutConfig, TaskConfig
from configs.field_types import check_types
from configs.learning import CriticConfig, LossConfig, PhaseConfig, UpdateConfig
from configs.require import require
from errors import BadInput


@dataclass(frozen=True)
class PolicyConfig:
    """The pretrained policy and what is trained of it."""

    checkpoint: str | None = None
    """Folder or Hugging Face id of an OpenVLA-OFT checkpoint. The presets of the suites name public ones."""
    unnorm_key: str | None = None
    """Key of the dataset statistics (None: found from the suite's name)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy runs (auto: on a GPU if there is one)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the frozen weights (auto: bfloat16 on a GPU, float32 on a CPU). Adapters are float32."""
    load_in_4bit: bool = False
    """Store the weights of the language model's blocks in 4 bits (NF4, by the package bitsandbytes), for GPUs of less
    than 24 GB: 3 GiB instead of 12. The price: passes take longer, and teacher and student both start from rounded
    weights. A run that starts from an adapter trained so does the same."""
    data_parallel: bool = False
    """Use every visible GPU (CUDA_VISIBLE_DEVICES chooses): each gets a replica of the policy and its share of every
    batch; --micro-batch-size is per GPU. The result is that of one GPU but for rounding."""
    lora_rank: int = 16
    """Rank of the LoRA adapters."""
    lora_alpha: int = 16
    """Scale of the adapters' output: --lora-alpha / --lora-rank."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the transformer blocks and, on a GPU, record whole passes as CUDA graphs (auto: on a GPU, where a network
    below a billion parameters is recorded only). The first pass of each batch size takes seconds longer, all others a
    fraction of the time."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Recompute activations in the backward pass: slower, for less memory (auto: as many blocks as do not fit)."""
    memory_budget: float | None = None
    """GiB of GPU memory that the policy may take (None: all that is free)."""
    temperature: float = 1.0
    """Sampling temperature of the student, by which its logits are divided; its log-probabilities use the same."""
    teacher: Literal["auto", "greedy", "l1"] = "auto"
    """The frozen teacher: `greedy` (the pretrained policy's argmax), `l1` (the checkpoint's regression head), or
    `auto`: l1 when the checkpoint ships an action head, else greedy."""

    def __post_init__(self) -> None:
        require(
            self.memory_budget is None or self.memory_budget > 0,
            f"--memory-budget must be positive, got {self.memory_budget}",
        )
        require(self.lora_rank >= 1, f"--lora-rank must be at least 1, got {self.lora_rank}")
        require(self.lora_alpha >= 1, f"--lora-alpha must be at least 1, got {self.lora_alpha}")
        require(self.temperature > 0, f"--temperature must be positive, got {self.temperature}")


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
    """Stop, saved, after the first update that ends more than so many hours after this start (None: no limit). A
    resumed run counts anew."""
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Where wandb keeps the records (auto: online with a wandb login, else offline). metrics.jsonl has them always."""
    wandb_project: str = "vla-grpo"
    """Project of the wandb run."""
    tensorboard: bool = False
    """Also write the records and a strip of frames per evaluation for TensorBoard (needs the package tensorboard)."""
    rerun: bool = False
    """Also write the filmed episodes of evaluations as rerun recordings (needs the package rerun-sdk)."""

    def __post_init__(self) -> None:
        require(bool(self.name) and "/" not in self.name, f"--name must be a plain word, got {self.name!r}")
        require(self.seed >= 0, f"--seed must not be negative, got {self.seed}")
        require(self.keep_checkpoints >= 1, f"--keep-checkpoints must be at least 1, got {self.keep_checkpoints}")
        require(self.max_hours is None or self.max_hours > 0, f"--max-hours must be positive, got {self.max_hours}")


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
            require(
                self.rollout.group_size >= 2,
                f"--advantage {self.loss.advantage} compares episodes of one initial state: it needs --group-size of "
                f"at least 2, got {self.rollout.group_size}",
            )
        if self.curriculum.curriculum:
            require(len(self.task.task_ids) > 1, "--curriculum chooses between tasks: it needs several --task-ids")
        if self.rollout.dynamic_sampling:
            require(self.rollout.group_size >= 2, "--dynamic-sampling needs --group-size of at least 2")
        if self.phases.importance == "behaviour":
            require(
                self.loss.ratio_level == "chunk",
                "--importance behaviour is a ratio of joint chunk probabilities: it needs --ratio-level chunk",
            )
        train, evaluation = self.task.train_init_states, self.task.eval_init_states
        require(
            train[1] <= evaluation[0] or evaluation[1] <= train[0] or evaluation == (0, 50),
            f"--train-init-states {train} and --eval-init-states {evaluation} overlap: evaluation would see training "
            "states (0 50 is allowed: the published protocol)",
        )


SECTIONS: dict[str, type[Any]] = get_type_hints(TrainConfig)


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
            check_types(section, values)
            sections[name] = section(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
        except TypeError as error:
            raise BadInput(f"{source}: section {name!r} holds a value of another type ({error})") from None
        except BadInput as problem:
            raise BadInput(f"{source}: {problem}") from None
    try:
        return TrainConfig(**sections)
    except BadInput as problem:
        raise BadInput(f"{source}: {problem}") from None


def differing_fields(a: TrainConfig, b: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configurations differ: name -> (value in a, value in b)."""
    flat_a, flat_b = ({k: v for part in to_dict(c).values() for k, v in part.items()} for c in (a, b))
    return {name: (flat_a[name], flat_b[name]) for name in flat_a if flat_a[name] != flat_b[name]}
