"""Every setting of training and evaluation: frozen dataclasses whose field docstrings are the text of `--help`.

"env steps" are 20 Hz control steps of training rollouts (the x axis of every curve).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import tyro

from configs.bounds import NOT_NEGATIVE, POSITIVE, POSITIVE_SHARE, SHARE, Range, check_numbers
from contracts import BadInput
from envs.assets import METAWORLD_LOOKS
from envs.perturb import KINDS, MAGNITUDES, Kind
from envs.tasks import METAWORLD

Suite = Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90", "metaworld_mt50"]
TaskIds = tyro.conf.arg(aliases=["--task-id"])
MAGNITUDE = Range(least=1, most=MAGNITUDES[-1])


@dataclass(frozen=True)
class TaskConfig:
    """What is trained on."""

    task_suite: Suite = "libero_spatial"
    """Suite that the tasks belong to: one of LIBERO's, or Meta-World's fifty."""
    task_ids: Annotated[tuple[int, ...], NOT_NEGATIVE, TaskIds] = (0,)
    """Task ids within the suite; several ids train one policy on all of them."""
    train_init_states: Annotated[tuple[int, int] | Literal["fresh"], NOT_NEGATIVE] = (0, 40)
    """First and one-past-last of the benchmark's initial states that training may use, or `fresh`: LIBERO's placement
    sampler draws another one for every group, and all of the benchmark's are held out."""
    eval_init_states: Annotated[tuple[int, int], NOT_NEGATIVE] = (40, 50)
    """First and one-past-last of the initial states that evaluation uses. With --train-init-states fresh it can
    be 0 50, as in the published protocol."""


@dataclass(frozen=True)
class SimulatorConfig:
    """How the simulator is run; the same for training and evaluation."""

    num_envs: Annotated[int, POSITIVE] = 1
    """Simulators of each rank: 1 runs in this process, more run in worker processes."""
    simulators: Literal["processes", "ray"] = "processes"
    """Where worker processes run: on this machine, or on the nodes of a Ray cluster (docs/SCALE_OUT.md)."""
    assets: str = "auto"
    """What objects look like: `official` (LIBERO's), `lowpoly` (ours) or a folder. auto: official for a 7B; for a small
    policy official on a GPU if it is installed and the policy knows it, else lowpoly; Meta-World has its own."""
    bddl_file: str | None = None
    """A BDDL file of your own, see docs/OWN_TASKS.md (None: the suite's tasks)."""
    max_env_steps: Annotated[int | None, POSITIVE] = None
    """Env steps after which an episode ends (None: the suite's; spatial 220, object 280, goal 300, 10: 520, 90: 400,
    metaworld_mt50: 200)."""
    kept_tasks: Annotated[int, POSITIVE] = 3
    """Tasks that each simulator keeps in memory: to build one again takes seconds."""
    perturb: tuple[Kind | Literal["all", "none"], ...] = ()
    """Kinds of change to the world (docs/OWN_TASKS.md). In training a group of episodes gets one of them, or none. An
    evaluation plays each of them, at each magnitude, beside the unperturbed episode of the same initial state."""
    magnitudes: Annotated[tuple[int, ...], MAGNITUDE] = (1, 3, 5)
    """How far the changes of --perturb go, in steps of 1 to 5."""

    @property
    def perturbations(self) -> tuple[str, ...]:
        """Labels of what --perturb and --magnitudes ask for, each once."""
        if "all" in self.perturb:
            kinds: tuple[str, ...] = KINDS
        else:
            kinds = tuple(kind for kind in self.perturb if kind != "none")
        labels = [f"{kind}-{magnitude}" for kind in kinds for magnitude in self.magnitudes]
        return tuple(dict.fromkeys(labels))


@dataclass(frozen=True)
class ModelConfig:
    """The pretrained policy and how it runs; the same for training and evaluation."""

    checkpoint: str | None = None
    """Folder or hub id of an OpenVLA-OFT checkpoint, or a trained adapter's folder (RUN/checkpoints/best)."""
    unnorm_key: str | None = None
    """Key of the dataset statistics (None: the one of the suite)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy runs (auto: on a GPU if there is one)."""
    frozen_weights: Literal["auto", "float32", "bf16", "int8", "fp8"] = "auto"
    """Precision of the frozen weights; adapters are float32. int8 and fp8 store the language model in half the memory.
    auto: bf16 on a GPU, float32 on a CPU, and the 8 bits that an adapter was trained on."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the network and, on a GPU, record its passes as CUDA graphs (auto: on a GPU; small networks are only
    recorded)."""
    memory_budget: Annotated[float | None, POSITIVE] = None
    """GiB of GPU memory that the policy may take (None: all that is free). A budget up to 10 % above what the GPU
    reports means all of the GPU, because cards report less than they are sold as (24 on an RTX 4090: its 23.6)."""
    max_batch: Annotated[int | None, POSITIVE] = None
    """Most observations that the policy decides on together (None: all that wait); fewer need less memory."""


@dataclass(frozen=True)
class PhaseConfig:
    """Who acts and which loss is minimised, as a function of env steps."""

    warmup: bool = True
    """--no-warmup: pure RL from step 0 (no warmup, no transition)."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 25_000
    """Env steps in which the teacher acts and the student learns to match it."""
    transition_steps: Annotated[int, NOT_NEGATIVE] = 5_000
    """Env steps in which the teacher acts with a probability that falls linearly from 1 to 0."""
    total_steps: Annotated[int, NOT_NEGATIVE] = 100_000
    """Env steps of the whole run."""
    warmup_actor: Literal["teacher", "student"] = "teacher"
    """Who acts in the warmup. student: the student learns what the teacher would do in the states that it reaches."""
    teacher: str = "auto"
    """The frozen teacher. `greedy`: the pretrained policy's most likely tokens; `l1`: the checkpoint's L1 head; `auto`:
    l1 if the checkpoint has such a head, else greedy; or another CHECKPOINT (folder, hub id or trained adapter), a
    stronger policy with the same inputs."""
    distill_student_temperature: Annotated[float, POSITIVE] = 1.0
    """Temperature of the student's logits in the warmup's loss. At --temperature the sampled student learns to match
    the teacher, at 1 the greedy one."""

    @property
    def teacher_checkpoint(self) -> str | None:
        """The other checkpoint that teaches; None: the one that is trained."""
        return None if self.teacher in ("auto", "greedy", "l1") else self.teacher


@dataclass(frozen=True)
class RolloutConfig:
    """The experience that an update learns from."""

    n_steps: Annotated[int, POSITIVE] = 512
    """Env steps of a rollout over all ranks. New episodes start until it is reached; running ones finish."""
    temperature: Annotated[float, POSITIVE] = 1.0
    """The student's logits are divided by it, for sampling and for log-probabilities alike."""
    physics: Literal["exact", "fast"] = "exact"
    """Physics of training episodes. fast: takes about a third of the time and differs slightly from LIBERO's.
    Evaluations are always exact."""
    group_size: Annotated[int, POSITIVE] = 1
    """Episodes from each drawn (task, initial state)."""
    curriculum: bool = False
    """Prefer tasks and perturbations that succeed about half of the time. Without it tasks take turns."""
    dynamic_sampling: bool = False
    """Drop groups whose success rate lies outside --group-success-bounds and collect others in their place, for at most
    --n-steps more env steps."""
    group_success_bounds: Annotated[tuple[float, float], SHARE] = (0.1, 0.9)
    """Lowest and highest success rate, from 0 to 1, of a group that dynamic sampling keeps."""


@dataclass(frozen=True)
class LossConfig:
    """Advantages and the clipped surrogate."""

    advantage: Literal["absolute", "group", "rloo", "batch", "gae"] = "absolute"
    """Advantage of a trajectory. absolute: its return; group, rloo: relative to its group; batch: relative to the
    rollout; gae: relative to what a critic expects."""
    discount: Annotated[float, POSITIVE_SHARE] = 1.0
    """Discount per decision, counted back from the last one (only with --advantage absolute or gae)."""
    gae_lambda: Annotated[float, SHARE] = 0.95
    """Lambda of the generalised advantage estimate, per decision (only with --advantage gae)."""
    ratio_level: Literal["chunk", "token"] = "chunk"
    """What is clipped: one ratio of a chunk's mean log-prob, or the ratio of each token (as SimpleVLA-RL does)."""
    clip_low: Annotated[float, POSITIVE_SHARE] = 0.2
    """Where the advantage is negative, the ratio is clipped at 1 minus this."""
    clip_high: Annotated[float, POSITIVE_SHARE] = 0.28
    """Where the advantage is positive, the ratio is clipped at 1 plus this."""
    kl_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the exact KL divergence from the teacher's distribution, in nats per token."""
    entropy_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the bonus for entropy, in nats per token."""
    aggregation: Literal["auto", "decision", "trajectory"] = "auto"
    """What weighs the same: every executed token, or every trajectory (auto: trajectory for --advantage group, rloo and
    batch)."""


@dataclass(frozen=True)
class UpdateConfig:
    """The adapters and their optimizer."""

    n_epochs: Annotated[int, POSITIVE] = 10
    """Passes over a rollout."""
    batch_size: Annotated[int, POSITIVE] = 2
    """Decisions per optimizer step, over all ranks."""
    micro_batch_size: Annotated[int | Literal["auto"], POSITIVE] = "auto"
    """Decisions per forward and backward pass; it changes memory and speed, not the result (auto: as many as fit)."""
    lr: Annotated[float, POSITIVE] = 1e-6
    """Learning rate of AdamW, per optimizer step."""
    warmup_lr: Annotated[float | None, POSITIVE] = None
    """Learning rate in the warmup, per optimizer step (None: --lr)."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.01
    """Weight decay of AdamW: a weight loses this share, times --lr, per optimizer step."""
    max_grad_norm: Annotated[float, POSITIVE] = 1.0
    """L2 norm to which a larger gradient is scaled down; above 1000 times this the step is skipped."""
    target_kl: Annotated[float | None, POSITIVE] = None
    """End an update when the approximate KL of a whole epoch, in nats per token, exceeds this (None: never)."""
    lora_rank: Annotated[int, POSITIVE] = 16
    """Rank of the LoRA adapters, whose output is added as it is (alpha equals the rank)."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Recompute activations in the backward pass: slower, with less memory (auto: as many blocks as do not fit)."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation of teacher and student on held-out initial states, during training."""

    eval_interval: Annotated[int, POSITIVE] = 5_000
    """Env steps between evaluations (also at step 0 and at the end)."""
    eval_trials: Annotated[int, NOT_NEGATIVE] = 1
    """Sampled episodes per task and held-out initial state (0: none). Greedy ones would repeat themselves, so one is
    played."""
    allow_zero_baseline: bool = False
    """Train although the policy that acts first had no success in the first evaluation."""
    best_by: Literal["evaluation", "return"] = "evaluation"
    """What the best checkpoint maximises: the lower bound of the evaluated success rate, or the moving average of the
    return in training."""


@dataclass(frozen=True)
class RunConfig:
    """Where the run is kept, how it is watched, and on how many GPUs it works."""

    name: str = "run"
    """Last part of the run folder's name."""
    output: str = "runs"
    """Folder that holds the run folders."""
    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Seed of everything random."""
    data_parallel: bool = False
    """Use every visible GPU: for each a process (rank) plays and learns its share of every rollout and minibatch."""
    keep_checkpoints: Annotated[int, POSITIVE] = 2
    """Number of the newest checkpoints that are kept beside `best`."""
    max_hours: Annotated[float | None, POSITIVE] = None
    """Save and stop after the first update that ends so many hours after this start (None: no limit)."""
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Where wandb keeps the metrics (auto: online with a wandb login, else offline); metrics.jsonl always has them. The
    environment variable WANDB_PROJECT names the project (vla-grpo without it)."""


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
        check_task_ids(self.task)
        check_init_states(self.task)
        check_groups(self.rollout, self.loss)
        check_ratio_level(self.loss)
        check_discount(self.loss)
        check_simulator(self.simulator, (self.task.task_suite,))
        check_curriculum(self.rollout, self.task, self.simulator)
        if "/" in self.run.name:
            raise BadInput(f"--name must be a plain word, got {self.run.name!r}")


def check_task_ids(task: TaskConfig) -> None:
    if not task.task_ids or len(set(task.task_ids)) < len(task.task_ids):
        raise BadInput(f"--task-ids needs at least one task id, and none twice, got {task.task_ids}")


def check_init_states(task: TaskConfig) -> None:
    """Success is measured on initial states that training has not seen."""
    for flag, states in (
        ("--train-init-states", task.train_init_states),
        ("--eval-init-states", task.eval_init_states),
    ):
        if states != "fresh" and states[0] >= states[1]:
            raise BadInput(f"{flag} must be FIRST END with FIRST < END, got {states[0]} {states[1]}")
    if task.train_init_states == "fresh":  # none of the benchmark's states
        return
    first, end = task.train_init_states
    first_held_out, end_held_out = task.eval_init_states
    if first < end_held_out and first_held_out < end:
        raise BadInput(
            f"--train-init-states {first} {end} and --eval-init-states {first_held_out} {end_held_out} overlap, so "
            f"success would be measured on states that were trained on: use --train-init-states fresh, or as default "
            "0 40 and 40 50"
        )


def check_groups(rollout: RolloutConfig, loss: LossConfig) -> None:
    compares_episodes = loss.advantage in ("group", "rloo") or rollout.dynamic_sampling
    if compares_episodes and rollout.group_size < 2:
        raise BadInput(
            "--advantage group, rloo and --dynamic-sampling compare the episodes of a group: --group-size 2 or more"
        )


def check_ratio_level(loss: LossConfig) -> None:
    if loss.advantage != "absolute" and loss.ratio_level == "chunk":
        raise BadInput(
            f"--advantage {loss.advantage} can be negative, and a chunk's mean ratio keeps no single token from "
            "falling without bound: add --ratio-level token"
        )


def check_discount(loss: LossConfig) -> None:
    if loss.discount != 1 and loss.advantage not in ("absolute", "gae"):
        raise BadInput(
            f"--advantage {loss.advantage} ignores --discount: leave it out, or take --advantage absolute or gae"
        )


def check_simulator(
    simulator: SimulatorConfig, suites: tuple[Suite, ...], protocol: str | None = None
) -> None:
    """Meta-World is another simulator: what only LIBERO has is refused for it."""
    if METAWORLD not in suites:
        return
    if len(suites) > 1:
        raise BadInput(f"{METAWORLD} is no suite of LIBERO: give it a command of its own")
    is_given = {
        "--assets": simulator.assets not in ("auto", METAWORLD_LOOKS),
        "--bddl-file": simulator.bddl_file is not None,
        "--perturb": bool(simulator.perturbations),
        "--protocol": protocol is not None,
    }
    flags = " and ".join(flag for flag in is_given if is_given[flag])
    if flags:
        raise BadInput(f"{flags}: LIBERO's alone; leave it out for {METAWORLD}")


def check_curriculum(rollout: RolloutConfig, task: TaskConfig, simulator: SimulatorConfig) -> None:
    has_choice = len(task.task_ids) > 1 or bool(simulator.perturbations)
    if rollout.curriculum and not has_choice:
        raise BadInput(
            "--curriculum chooses among tasks and perturbations: give several --task-ids, or --perturb"
        )


# What a resumed run may change: where it ends, how it is watched, how much of the same computation is in memory at
# once, and where the same assets lie (`experiment.run_folder.reopen_run`). With anything else it would no longer equal
# a run that was never stopped.
CHANGEABLE_ON_RESUME = {
    "total_steps",
    "max_hours",
    "allow_zero_baseline",
    "wandb_mode",
    "keep_checkpoints",
    "micro_batch_size",
    "max_batch",
    "gradient_checkpointing",
    "memory_budget",
    "assets",
    "kept_tasks",
    "simulators",
}


def changed(config: TrainConfig, **settings: Any) -> TrainConfig:
    """`config` with other values of some fields, whichever sections they are in, as flags change them."""
    sections = {}
    for section_name, section in vars(config).items():
        changes = {name: settings.pop(name) for name in vars(section) if name in settings}
        sections[section_name] = replace(section, **changes)
    assert not settings, f"no such settings: {settings}"
    return TrainConfig(**sections)


def differing_fields(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[object, object]]:
    """Fields in which two configurations differ: name -> (value before, value after)."""
    fields_before = _flat(before)
    fields_after = _flat(after)
    return {
        name: (value, fields_after[name])
        for name, value in fields_before.items()
        if value != fields_after[name]
    }


def _flat(config: TrainConfig) -> dict[str, object]:
    """Name -> value of all fields, which are unique over all sections."""
    return {name: value for section in vars(config).values() for name, value in vars(section).items()}
