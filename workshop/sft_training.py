"""Train a policy on demonstrations and write it: what workshop.sft does once its flags are read."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from contracts import BadInput, Observation, first_line, unfinished_folder, write_json
from experiment.checkpoints import write_trainer_state
from experiment.file_lock import locked
from experiment.metrics import system_metrics
from experiment.provenance import provenance
from experiment.stopping import interruptible
from experiment.terminal import say, show_progress
from vla.device import choose_device, limit_memory
from vla.loading import LoadOptions
from vla.memory import plan_update
from vla.policy import Policy
from workshop.sft_check import SHOWN_EPISODES, check_written
from workshop.sft_config import SftArgs
from workshop.sft_data import Demos, make_observations, read_demos
from workshop.sft_update import (
    LEARN_ACTIONS,
    LEARN_TOKENS,
    Objective,
    Student,
    augment_observations,
    make_student_optimizer,
    proprio_noise_scale,
    training_step,
)
from workshop.whole_network import WholeNetwork

SFT_RUN_FILE = "sft_run.json"
METRICS_FILE = "sft_metrics.jsonl"
STATE_FILE = "sft_training.pt"  # of an unfinished training
LARGEST_ALPHA = 16  # of adapters, as in openvla-oft


@dataclass(frozen=True)
class Lesson:
    """What a training learns from, and what it is measured on. Targets are those of the objective."""

    frames: list[Observation]  # N; not cropped if training augments them
    targets: Tensor  # (N, ...)
    noise_scale: np.ndarray  # (D,): see `proprio_noise_scale`
    held_out_frames: list[Observation]  # cropped as in evaluation
    held_out_targets: Tensor | None  # None: no frames are held out


@dataclass(frozen=True)
class Training:
    """A training under way, whose state STATE_FILE holds."""

    out: Path
    scratch: Path  # beside `out`: the state is written there before it replaces the one in `out`
    settings: dict[str, object]  # a training goes on only with the same ones
    policy: Student
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    records: list[dict[str, float]] = field(default_factory=list)  # the lines of METRICS_FILE


def fine_tune(args: SftArgs, argv: Sequence[str] = ()) -> Path:
    """Train, save, and check what was saved; returns the folder.

    argv: the command line, which SFT_RUN_FILE records (from Python: none).
    Raises BadInput for what the user can repair, and KeyboardInterrupt after saving a training that was interrupted.
    """
    state_file = args.out / STATE_FILE
    if args.out.exists() and not state_file.exists():
        raise BadInput(f"--out {args.out} exists already, without an unfinished training: name a new folder")
    lock = locked(args.out.with_name(f".{args.out.name}.lock"), f"--out {args.out}")
    with lock, unfinished_folder(args.out) as scratch:
        device = choose_device(args.device, args.init)
        limit_memory(args.memory_budget, device)
        demos = read_demos(args, scratch)
        run = {
            "arguments": json.loads(json.dumps(asdict(args), default=str)),
            "train_episodes": len(demos.train),
            "train_frames": sum(len(images) for _, images in demos.train),
            **provenance(argv),
        }
        run["steps"], outputs = train_and_save(args, demos, device, scratch)
        write_json(args.out / SFT_RUN_FILE, run)
        check_written(args, demos, outputs, device)
        if run["steps"] < args.steps:
            raise KeyboardInterrupt
        state_file.unlink()
    return args.out


def train_and_save(args: SftArgs, demos: Demos, device: torch.device, scratch: Path) -> tuple[int, Tensor]:
    """Returns the number of steps taken, and the trained network's outputs on the first episodes.

    Outputs are logits (N, A, 256); with --l1 the normalised actions of the L1 head, (N, 8, D).
    """
    policy = load_policy(args, demos, device)
    steps_taken = train(args, demos, policy, scratch)
    if isinstance(policy, Policy):
        policy.save_adapter(args.out, looks=" ".join(demos.looks))
    else:
        policy.save(args.out, demos.looks, getattr(torch, args.save_dtype))
    observations = make_observations(demos.train[:SHOWN_EPISODES])
    return steps_taken, objective_of(args).outputs(policy, observations)


def load_policy(args: SftArgs, demos: Demos, device: torch.device) -> Student:
    """The checkpoint to train, with the demonstrations' statistics: with adapters, or as a whole."""
    if args.lora_rank is None:
        return WholeNetwork(demos.init, demos.unnorm_key, device, trains_l1_head=args.l1)
    options = LoadOptions(
        task_suite=demos.unnorm_key,
        unnorm_key=demos.unnorm_key,
        statistics=str(demos.init.statistics_folder),
        device=device,
        lora_rank=args.lora_rank,
        lora_alpha=min(args.lora_rank, LARGEST_ALPHA),
        seed=args.seed,
    )
    return Policy.load(str(args.init), options)


def train(args: SftArgs, demos: Demos, policy: Student, scratch: Path) -> int:
    """Take `args.steps` optimizer steps, or fewer when interrupted; returns how many were taken."""
    objective = objective_of(args)
    lesson = prepare_lesson(args, demos, objective)
    micro_batch_size = plan_micro_batch(args, policy)  # before the optimizer takes its memory
    training = begin_training(args, policy, scratch, settings_of(args, len(lesson.frames)))
    optimizer = training.optimizer
    generator = training.generator
    last_record = training.records[-1] if training.records else {"step": 0, "seconds": 0.0}
    steps_taken = int(last_record["step"])
    started = time.monotonic() - last_record["seconds"]
    say(f"{len(lesson.frames)} frames, {args.batch_size} a step, {micro_batch_size} at a time")
    say(f"beginning after step {steps_taken} of {args.steps}")
    unrecorded: list[dict[str, float]] = []  # the metrics of the steps since the last record
    try:
        with (
            interruptible(),
            show_progress("training", args.steps - steps_taken, "steps") as activity,
        ):
            while steps_taken < args.steps:
                # 1. Draw frames at random, with replacement.
                rows = torch.randint(
                    len(lesson.frames), (args.batch_size,), device=policy.device, generator=generator
                ).tolist()
                observations = [lesson.frames[row] for row in rows]

                # 2. Augment their pictures, and add noise to their robot states.
                observations = augment_observations(observations, lesson.noise_scale, args.augment, generator)

                # 3. One optimizer step.
                lr = args.learning_rate(steps_taken)
                micro_batch_size, metrics = training_step(
                    objective, policy, optimizer, observations, lesson.targets[rows], lr, micro_batch_size
                )
                unrecorded.append(metrics)
                steps_taken += 1
                activity.advance(1)

                # 4. Record the means since the last record, measure on the held-out frames, and save the training.
                if steps_taken % args.log_every == 0 or steps_taken == args.steps:
                    means = {name: fmean(step[name] for step in unrecorded) for name in metrics}
                    record = {"step": steps_taken, **means, "seconds": time.monotonic() - started}
                    record |= measure_held_out(objective, policy, lesson)
                    add_record(training, record | system_metrics())
                    unrecorded.clear()
    except KeyboardInterrupt:
        say(f"interrupted after {steps_taken} steps: saving; the same command goes on from the last record")
    return steps_taken


def prepare_lesson(args: SftArgs, demos: Demos, objective: Objective) -> Lesson:
    """Make all frames and targets once."""
    statistics = demos.init.statistics[demos.unnorm_key]
    frames = make_observations(demos.train, cropped=not args.augment)
    held_out_targets = objective.make_targets(demos.held_out, statistics) if demos.held_out else None
    return Lesson(
        frames=frames,
        targets=objective.make_targets(demos.train, statistics),
        noise_scale=proprio_noise_scale(frames),
        held_out_frames=make_observations(demos.held_out),
        held_out_targets=held_out_targets,
    )


def plan_micro_batch(args: SftArgs, policy: Student) -> int:
    """How many frames of an optimizer step are computed at once. A whole small network tries all of them first."""
    if not isinstance(policy, Policy):
        return args.batch_size
    return plan_update(policy, "auto", "auto", args.batch_size).micro_batch_size


def begin_training(args: SftArgs, policy: Student, scratch: Path, settings: dict[str, object]) -> Training:
    """A new training, or the unfinished one in `args.out`. Raises BadInput if that one cannot go on."""
    optimizer = make_student_optimizer(policy)
    generator = torch.Generator(policy.device).manual_seed(args.seed)
    training = Training(args.out, scratch, settings, policy, optimizer, generator)
    if (args.out / STATE_FILE).exists():
        restore_training(training)
    else:
        save_training(training)  # at once, which shows whether there is space for it
    return training


def settings_of(args: SftArgs, num_frames: int) -> dict[str, object]:
    """What two commands must have in common for the second one to go on with the training of the first."""
    settings = json.loads(json.dumps(asdict(args), default=str)) | {"train_frames": num_frames}
    del settings["out"]
    return settings


def objective_of(args: SftArgs) -> Objective:
    return LEARN_ACTIONS if args.l1 else LEARN_TOKENS


def measure_held_out(objective: Objective, policy: Student, lesson: Lesson) -> dict[str, float]:
    """The metrics on the held-out frames, if there are any."""
    if lesson.held_out_targets is None:
        return {}
    return objective.measure(objective.outputs(policy, lesson.held_out_frames), lesson.held_out_targets)


def add_record(training: Training, record: dict[str, float]) -> None:
    """Show a record and save the training. If the disk cannot be written, the training goes on."""
    training.records.append(record)
    say(", ".join(f"{name} {value:.4g}" for name, value in record.items()))
    try:
        save_training(training)
    except OSError as error:
        place = error.filename or training.out
        say(f"{place} could not be written ({error.strerror}); training goes on")


def save_training(training: Training) -> None:
    """Write state and metrics into the output folder; the state is whole as soon as it is there. Raises OSError."""
    contents: dict[str, object] = {
        "settings": training.settings,
        "records": training.records,
        "parameters": {
            name: tensor.detach() for name, tensor in training.policy.named_trainable_parameters()
        },
        "optimizer": training.optimizer.state_dict(),
        "generator": training.generator.get_state(),
    }
    draft = training.scratch / STATE_FILE
    try:
        write_trainer_state(draft, contents)
        training.out.mkdir(exist_ok=True)
        os.replace(draft, training.out / STATE_FILE)
    finally:
        draft.unlink(missing_ok=True)  # on a full disk the checkpoint needs its space
    lines = [json.dumps(record) + "\n" for record in training.records]
    (training.out / METRICS_FILE).write_text("".join(lines), encoding="utf-8")


def restore_training(training: Training) -> None:
    """Restore the state that the output folder holds. Raises BadInput if it is damaged, or another training's."""
    path = training.out / STATE_FILE
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise nearly any exception in torch
        raise BadInput(f"{path} cannot be read ({first_line(error)}): begin in a new --out") from error
    settings = training.settings
    differing = [name for name in settings if stored["settings"].get(name) != settings[name]]
    if differing:
        names = ", ".join(differing)
        raise BadInput(f"{path} is a training with other values of {names}: give its own, or a new --out")
    with torch.no_grad():
        for name, parameter in training.policy.named_trainable_parameters():
            parameter.copy_(stored["parameters"][name])
    # Clear the optimizer's old moments first: a full GPU has no room for the old and the new ones together.
    training.optimizer.state.clear()
    training.optimizer.load_state_dict(stored["optimizer"])
    training.generator.set_state(stored["generator"])
    training.records.extend(stored["records"])
