"""Every setting of training and evaluation: frozen dataclasses whose field docstrings are the text of `--help`.

"env steps" are 20 Hz control steps of training rollouts (the x axis of every curve).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import tyro
from pydantic import TypeAdapter, ValidationError

from contracts import BadInput
from envs.assets import METAWORLD_LOOKS
from envs.perturb import KINDS, MAGNITUDES, Kind
from envs.tasks import METAWORLD

Suite = Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90", "metaworld_mt50"]
TaskIds = tyro.conf.arg(aliases=["--task-id"])

PUBLISHED_SUITES: tuple[Suite, ...] = ("libero_spatial", "libero_object", "libero_goal", "libero_10")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise BadInput(message)


# All numbers are positive but these (field names are unique over all sections), and these are at most 1.
MAY_BE_0 = {
    "task_ids", "train_init_states", "eval_init_states", "first_init_state", "warmup_steps", "transition_steps",
    "total_steps", "group_success_bounds", "kl_coef", "entropy_coef", "gae_lambda",
    "weight_decay", "seed", "eval_trials",
    "holdout", "init_states", "noise_scales",  # of the workshop
}  # fmt: skip
AT_MOST_1 = {"group_success_bounds", "discount", "clip_low", "clip_high", "gae_lambda"}


def check_numbers(section: Any) -> None:
    for name, value in vars(section).items():
        bound = "not be negative" if name in MAY_BE_0 else "be positive"
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, int | float) and not isinstance(x, bool):
                flag = f"--{name.replace('_', '-')}"
                require(
                    abs(x) < 2**63, f"{flag} must be a number of at most 64 bits, got {x}"
                )  # not NaN, not inf
                require(x > 0 or (x == 0 and name in MAY_BE_0), f"{flag} must {bound}, got {x}")
                require(x <= 1 or name not in AT_MOST_1, f"{flag} must be at most 1, got {x}")
                require(
                    name != "magnitudes" or x in MAGNITUDES,
                    f"{flag} are steps of 1 to {MAGNITUDES[-1]}, got {x}",
                )


@dataclass(frozen=True)
class TaskConfig:
    """What is trained on."""

    task_suite: Suite = "libero_spatial"
    """Suite that the tasks belong to: one of LIBERO's, or Meta-World's fifty."""
    task_ids: Annotated[tuple[int, ...], TaskIds] = (0,)
    """Task ids within the suite; several ids train one policy on all of them."""
    train_init_states: tuple[int, int] | Literal["fresh"] = (0, 40)
    """First and one-past-last of the benchmark's initial states that training may use, or `fresh`: LIBERO's placement
    sampler draws another one for every group, and all of the benchmark's are held out."""
    eval_init_states: tuple[int, int] = (40, 50)
    """First and one-past-last of the initial states that evaluation uses (0 50: the published protocol)."""


@dataclass(frozen=True)
class SimulatorConfig:
    """How the simulator is run; the same for training and evaluation."""

    num_envs: int = 1
    """Simulators (of each rank): 1 steps inline in this process, N > 1 run in worker processes."""
    simulators: Literal["processes", "ray"] = "processes"
    """Where worker processes run: on this machine, or on the nodes of a Ray cluster (docs/SCALE_OUT.md)."""
    assets: str = "auto"
    """What objects look like: `official` (LIBERO's), `lowpoly` (ours) or a folder (auto: official; for a small policy
    low-poly, unless it knows official, which is installed, and there is a GPU; Meta-World: its own)."""
    bddl_file: str | None = None
    """A BDDL file of your own in place of the suite's tasks (see docs/OWN_TASKS.md; None: those)."""
    max_env_steps: int | None = None
    """Episode cap in env steps (None: the suite's; spatial 220, object 280, goal 300, 10: 520, 90: 400,
    metaworld_mt50: 200)."""
    kept_tasks: int = 3
    """Of several tasks, how many each simulator keeps built: building one takes seconds, keeping one memory."""
    perturb: tuple[Kind | Literal["all", "none"], ...] = ()
    """Kinds of change to the world (docs/OWN_TASKS.md). Training: a group of episodes gets one of them, or none;
    evaluation: each of them, at each magnitude, beside the unperturbed episode of the same initial state."""
    magnitudes: tuple[int, ...] = (1, 3, 5)
    """How far the changes of --perturb go, in steps of 1 to 5."""

    @property
    def perturbations(self) -> tuple[str, ...]:
        """Labels of what --perturb and --magnitudes ask for."""
        kinds = (
            KINDS
            if "all" in self.perturb
            else tuple(kind for kind in self.perturb if kind not in ("all", "none"))
        )
        labels = (f"{kind}-{magnitude}" for kind in kinds for magnitude in self.magnitudes)
        return tuple(dict.fromkeys(labels))


def check_simulator(
    simulator: SimulatorConfig, suites: tuple[Suite, ...], protocol: str | None = None
) -> None:
    """Meta-World is another simulator: what is LIBERO's alone is refused for it."""
    if METAWORLD not in suites:
        return
    require(len(suites) == 1, f"{METAWORLD} is no suite of LIBERO: give it a command of its own")
    given = {
        "--assets": simulator.assets not in ("auto", METAWORLD_LOOKS), "--bddl-file": simulator.bddl_file,
        "--perturb": simulator.perturbations, "--protocol": protocol,
    }  # fmt: skip
    flags = " and ".join(flag for flag, value in given.items() if value)
    require(not flags, f"{flags}: LIBERO's alone; leave it out for {METAWORLD}")


@dataclass(frozen=True)
class ModelConfig:
    """The pretrained policy and how it runs; the same for training and evaluation."""

    checkpoint: str | None = None
    """Folder or hub id of an OpenVLA-OFT checkpoint, or a trained adapter's folder (RUN/checkpoints/best)."""
    unnorm_key: str | None = None
    """Key of the dataset statistics (None: found from the suite's name)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy runs (auto: on a GPU if there is one)."""
    frozen_weights: Literal["auto", "float32", "bf16", "int8", "fp8"] = "auto"
    """Precision of the frozen weights (auto: bf16 on a GPU, float32 on a CPU, what an adapter was trained on if that is
    int8 or fp8: 8 bits for the language model, in half the memory). Adapters are float32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the blocks and, on a GPU, record passes as CUDA graphs (auto: on a GPU; small networks only record)."""
    memory_budget: float | None = None
    """GiB of GPU memory that the policy may take (None: all that is free)."""
    max_batch: int | None = None
    """Observations that the policy decides on together at most (None: all that wait); fewer need less memory."""


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
    warmup_actor: Literal["teacher", "student"] = "teacher"
    """Who acts in the warmup. student: it learns what the teacher would do in the states that it comes to itself."""
    teacher: str = "auto"
    """The frozen teacher: `greedy`, the pretrained policy's argmax; `l1`, the checkpoint's L1 head; `auto`, that if it
    ships one; or another CHECKPOINT (folder, hub id or trained adapter), a stronger policy with the same inputs."""
    distill_student_temperature: float = 1.0
    """Temperature at which the student is matched: at --temperature its samples learn the target, at 1 its argmax."""

    @property
    def teacher_checkpoint(self) -> str | None:
        """None: the checkpoint that is trained."""
        return None if self.teacher in ("auto", "greedy", "l1") else self.teacher


@dataclass(frozen=True)
class RolloutConfig:
    """The experience that an update learns from."""

    n_steps: int = 512
    """Env steps of a rollout, over all ranks: new episodes start until it is reached, running ones finish."""
    temperature: float = 1.0
    """Sampling temperature of the student, by which its logits are divided; its log-probabilities use the same."""
    physics: Literal["exact", "fast"] = "exact"
    """Of training episodes. fast: about a third of the time, not LIBERO's to the bit (evaluations stay exact)."""
    group_size: int = 1
    """Episodes from each drawn (task, initial state)."""
    curriculum: bool = False
    """Prefer tasks, and perturbations, that succeed about half of the time (else tasks take turns)."""
    dynamic_sampling: bool = False
    """Drop groups whose success rate lies outside --group-success-bounds and collect others in their place, with at
    most --n-steps env steps more than without it."""
    group_success_bounds: tuple[float, float] = (0.1, 0.9)
    """Lowest and highest success rate, 0 to 1, of a group that dynamic sampling keeps."""


@dataclass(frozen=True)
class LossConfig:
    """Advantages and the clipped surrogate."""

    advantage: Literal["absolute", "group", "rloo", "batch", "gae"] = "absolute"
    """Advantage of a trajectory: its return, or that relative to its group or to the rollout; or by a critic (gae)."""
    discount: float = 1.0
    """Discount, 0 to 1, per decision, counted back from the last one (only with --advantage absolute or gae)."""
    gae_lambda: float = 0.95
    """Lambda of the generalised advantage estimate, 0 to 1, per decision (only with --advantage gae)."""
    ratio_level: Literal["chunk", "token"] = "chunk"
    """Clip the ratio of chunk log-probs (mean over tokens) or each token's ratio (SimpleVLA-RL)."""
    clip_low: float = 0.2
    """Distance of the ratio below 1 beyond which it earns no more where A < 0."""
    clip_high: float = 0.28
    """Distance of the ratio above 1 beyond which it earns no more where A > 0."""
    kl_coef: float = 0.0
    """Weight of the exact KL divergence, in nats per token, from the teacher's distribution."""
    entropy_coef: float = 0.0
    """Weight of the bonus for entropy, in nats per token."""
    aggregation: Literal["auto", "decision", "trajectory"] = "auto"
    """All decisions (by executed token) or all trajectories weigh the same (auto: these for group, rloo and batch)."""


@dataclass(frozen=True)
class UpdateConfig:
    """The adapters and their optimizer."""

    n_epochs: int = 10
    """Passes over a rollout."""
    batch_size: int = 2
    """Decisions per optimizer step, over all ranks."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Decisions per forward and backward pass: a matter of memory alone (auto: as fits, up to a rank's share)."""
    lr: float = 1e-6
    """Learning rate of AdamW, per optimizer step."""
    warmup_lr: float | None = None
    """Learning rate in the warmup, per optimizer step (None: --lr)."""
    weight_decay: float = 0.01
    """Weight decay of AdamW: the share, times --lr, that a weight loses per optimizer step."""
    max_grad_norm: float = 1.0
    """L2 norm of the gradient above which it is scaled down (1000 times it: the step is skipped)."""
    target_kl: float | None = None
    """End an update when the approximate KL of a whole epoch, in nats per token, exceeds this (None: never)."""
    lora_rank: int = 16
    """Rank of the LoRA adapters, whose output is added as it is (alpha equals the rank)."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Recompute activations in the backward pass: slower, for less memory (auto: as many blocks as do not fit)."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation of teacher and student on held-out initial states, during training."""

    eval_interval: int = 5_000
    """Env steps between evaluations (also at step 0 and at the end)."""
    eval_trials: int = 1
    """Sampled episodes per task and held-out initial state; greedy ones are played once, as they repeat themselves
    (0: greedy ones alone)."""
    allow_zero_baseline: bool = False
    """Go on when the policy that acts first has no success in the first evaluation."""
    best_by: Literal["evaluation", "return"] = "evaluation"
    """What the best checkpoint maximises: the lower bound of evaluated success, or the moving average of the return."""


@dataclass(frozen=True)
class RunConfig:
    """Where the run is kept, how it is watched, and on how many GPUs it works."""

    name: str = "run"
    """Last part of the run folder's name."""
    output: str = "runs"
    """Folder that holds the run folders."""
    seed: int = 0
    """Seed of everything random."""
    data_parallel: bool = False
    """Use every visible GPU: a process (rank) for each plays and learns its share of every rollout and minibatch."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints are kept beside `best`."""
    max_hours: float | None = None
    """Stop, saved, after the first update that ends so many hours after this start (None: no limit)."""
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Where wandb keeps the records (auto: online with a wandb login, else offline). metrics.jsonl has them always.
    The environment variable WANDB_PROJECT names the project (vla-grpo without it)."""


@dataclass(frozen=True)
class TrainConfig:
    """Improve a vision-language-action policy on LIBERO tasks by reinforcement learning."""

    task: TaskConfig = TaskConfig()
    simulator: SimulatorConfig = SimulatorConfig()
    model: ModelConfig = ModelConfig()
    phases: PhaseConfig = PhaseConfig()
    rollout: RolloutConfig = RolloutConfig()
    loss: LossConfig = LossConfig()
    update: UpdateConfig = UpdateConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self) -> None:
        for section in vars(self).values():
            check_numbers(section)
        ids, train, held_out = self.task.task_ids, self.task.train_init_states, self.task.eval_init_states
        train = train if isinstance(train, tuple) else (-1, 0)  # fresh: none of the benchmark's
        rollout, loss = self.rollout, self.loss
        require(
            0 < len(ids) == len(set(ids)), f"--task-ids needs at least one task id, and none twice, got {ids}"
        )
        for flag, (first, end) in (("--train-init-states", train), ("--eval-init-states", held_out)):
            require(first < end, f"{flag} must be FIRST END with FIRST < END, got {first} {end}")
        disjoint = (
            train[1] <= held_out[0] or held_out[1] <= train[0] or held_out == (0, 50)
        )  # the published protocol
        require(
            disjoint,
            f"--train-init-states {train} and --eval-init-states {held_out} overlap (0 50 is allowed)",
        )
        compares = loss.advantage in ("group", "rloo") or rollout.dynamic_sampling
        alone = "--advantage group, rloo and --dynamic-sampling compare the episodes of a group: --group-size 2 or more"
        require(rollout.group_size >= 2 or not compares, alone)
        is_absolute, is_chunk = loss.advantage == "absolute", loss.ratio_level == "chunk"
        falls = f"--advantage {loss.advantage} can be negative, and a chunk's mean ratio keeps no single token from"
        require(is_absolute or not is_chunk, f"{falls} falling without bound: add --ratio-level token")
        ignored = f"--advantage {loss.advantage} ignores --discount: leave it out, or take --advantage absolute or gae"
        require(loss.discount == 1 or loss.advantage in ("absolute", "gae"), ignored)
        check_simulator(self.simulator, (self.task.task_suite,))
        has_choice = len(ids) > 1 or bool(self.simulator.perturbations)
        chooses = "--curriculum chooses among tasks and perturbations: give several --task-ids, or --perturb"
        require(has_choice or not rollout.curriculum, chooses)
        require("/" not in self.run.name, f"--name must be a plain word, got {self.run.name!r}")


# What a resumed run may change: where it ends, how it is watched, how much of the same computation is in memory at
# once, and where the same assets lie (`experiment.run_folder.reopen_run`). Everything else
# would break "resumed = straight".
CHANGEABLE_ON_RESUME = {
    "total_steps", "max_hours", "allow_zero_baseline", "wandb_mode", "keep_checkpoints",
    "micro_batch_size", "max_batch", "gradient_checkpointing", "memory_budget", "assets", "kept_tasks",
    "simulators",
}  # fmt: skip


@dataclass(frozen=True)
class EvalConfig:
    """Measure the success rate of a checkpoint on LIBERO tasks."""

    model: ModelConfig = ModelConfig()
    simulator: SimulatorConfig = SimulatorConfig()
    compare_with: str | None = None
    """Another checkpoint, or an earlier results file (*.json), to be compared on the same episodes (None: nothing)."""
    protocol: Literal["libero"] | None = None
    """libero: the published one, all tasks, a greedy episode from each of 50 initial states (None: as flags say)."""
    task_suite: tuple[Suite | Literal["all"], ...] = ("libero_spatial",)
    """Suites, one after the other; all: spatial, object, goal and 10, the four of the published tables."""
    task_ids: Annotated[tuple[int, ...] | None, TaskIds] = None
    """Task ids within each suite (None: all)."""
    trials: int = 50
    """Episodes per task, each from another initial state; more than there are: sampled ones start over."""
    first_init_state: int = 0
    """Id of the initial state of the first trial (40: the states that training leaves out by default)."""
    mode: Literal["auto", "greedy", "sample", "l1"] = "auto"
    """How the policy decides (auto: sample with --temperature, l1 for a pretrained L1 head, else greedy)."""
    temperature: float | None = None
    """Sampling temperature, by which the policy's logits are divided (None: 1, where --mode is sample)."""
    seed: int = 0
    """Seed of sampling and of perturbations; it changes nothing else where the policy is greedy."""
    out: str | None = None
    """Results file (docs/RESULTS_JSON.md; None: a new one in runs/). The same command goes on where it was stopped."""
    video: Literal["none", "failures", "all"] = "none"
    """Which episodes are kept as videos, in a folder beside the results file. Recording draws every env step."""

    def __post_init__(self) -> None:
        for section in (self, self.model, self.simulator):
            check_numbers(section)
        require(bool(self.task_suite), "--task-suite names no suite")
        check_simulator(self.simulator, self.suites, self.protocol)
        fits_bddl = self.simulator.bddl_file is None or (
            len(self.suites) == 1 and self.task_ids in (None, (0,))
        )
        require(fits_bddl, "--bddl-file is one task: one --task-suite, no --task-ids")
        values, defaults = vars(self) | vars(self.simulator), vars(EvalConfig) | vars(SimulatorConfig)
        fixed = ("trials", "first_init_state", "temperature", "task_ids", "max_env_steps", "bddl_file")
        changed = [name for name in fixed if values[name] != defaults[name]] + ["mode"] * (
            self.mode == "sample"
        )
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        greedy = (
            f"--protocol libero is all tasks of a suite, 50 initial states each, greedy: leave out {flags}"
        )
        require(self.protocol is None or not changed, greedy)

    @property
    def samples(self) -> bool:
        return self.mode == "sample" or (self.mode == "auto" and self.temperature is not None)

    @property
    def suites(self) -> tuple[Suite, ...]:
        named = (PUBLISHED_SUITES if suite == "all" else (suite,) for suite in self.task_suite)
        return tuple(dict.fromkeys(suite for suites in named for suite in suites))


to_dict = asdict  # of a configuration: what config.json holds


def from_dict(stored: Any, source: str) -> TrainConfig:
    """The inverse of `to_dict` after a trip through JSON; `source` names the file in errors. Raises BadInput."""
    try:
        config = TypeAdapter(TrainConfig).validate_json(json.dumps(stored), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the configuration"
        raise BadInput(f"{source}: {where} is {first['input']!r}: {first['msg']}") from None
    except BadInput as problem:
        raise BadInput(f"{source}: {problem}") from None
    # No default of this version may slip into another's run, and no setting may get lost.
    known, found = ({f"{part}.{name}" for part in d for name in d[part]} for d in (to_dict(config), stored))
    for name in sorted(known ^ found):
        raise BadInput(f"{source}: {name} is missing, or no setting of this version of the program")
    return config


def changed(config: TrainConfig, **settings: Any) -> TrainConfig:
    """`config` with other values of some fields, whichever sections they are in, as flags change them."""
    sections = {}
    for part, section in vars(config).items():
        sections[part] = replace(
            section, **{name: settings.pop(name) for name in vars(section) if name in settings}
        )
    assert not settings, f"no such settings: {settings}"
    return TrainConfig(**sections)


def differing_fields(a: TrainConfig, b: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configurations differ: name -> (value in a, value in b)."""
    flat_a, flat_b = ({k: v for part in to_dict(c).values() for k, v in part.items()} for c in (a, b))
    return {name: (flat_a[name], flat_b[name]) for name in flat_a if flat_a[name] != flat_b[name]}
