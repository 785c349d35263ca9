"""Supervised fine-tuning of an OpenVLA-OFT policy on demonstrations: cross-entropy on the action tokens of a chunk.

    python -m workshop.sft --demos FOLDER --out FOLDER [--llm-dim 96 | --init CHECKPOINT] [--steps 6000]
    python -m workshop.sft --demos FOLDER --out FOLDER --num-images 1 --no-proprio    # as public token-head checkpoints
    python -m workshop.sft --demos FOLDER --out FOLDER --l1                           # as public L1 checkpoints
    python -m workshop.sft --demos FOLDER --out FOLDER --init CHECKPOINT --lora-rank 32    # a 7B, too

--demos names a folder of workshop.demos, a LeRobot dataset (v2 or v3) or RLDS data (workshop/foreign_demos.py).

Without --lora-rank all parameters are trained: from random weights in the sizes given, or from a checkpoint; the output
is a checkpoint folder like any other. With --lora-rank the same parameters are trained as by RL, in as much memory:
adapters on every linear map, including the token head, and the proprio projector; the output is an adapter folder,
which train_grpo.py and eval.py take as --checkpoint. Both hold sft_metrics.jsonl, sft_run.json (how it was made) and
first_frame.png (what the network sees).

Every five minutes weights and optimizer are saved, in sft_training.pt. After a kill or a crash the same command goes on
from there, to the same weights. Ctrl-C writes the checkpoint of what has been trained so far; the same command goes on
after that, too.

With --l1 an action head learns the continuous actions, by their mean absolute error, together with all other parameters
but the token head's: that one keeps its random rows. Such a checkpoint acts, and teaches, by its action head.
"""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from command_line import handle_stop_signals, main_guard, parse_flags
from configs.config import TrainConfig, changed
from contracts import Observation, unfinished_folder, write_json
from experiment.file_lock import lock_file
from experiment.metrics import system_metrics
from experiment.provenance import provenance
from experiment.stopping import interruptible
from rl.update import Learner, update
from vla.device import choose_device, limit_memory
from vla.loading import LoadOptions
from vla.policy import Policy
from workshop.sft_check import SHOWN_EPISODES, check_written
from workshop.sft_config import SftArgs
from workshop.sft_data import Demos, chunk_actions, chunk_tokens, make_observations, read_demos
from workshop.sft_progress import (
    SAVE_EVERY_S,
    SFT_RUN_FILE,
    STATE_FILE,
    Progress,
    begin_or_go_on,
    check_output_folder,
    remove_progress,
    save_progress,
    tolerate_full_disk,
)
from workshop.sft_update import (
    SUPERVISED,
    actions_of,
    augment_observations,
    demonstration_batch,
    held_out_metrics,
    held_out_regression_metrics,
    logits_of,
    proprio_noise_scale,
    regression_step,
    supervised_learner,
    update_config,
)
from workshop.whole_network import WholeNetwork

METRICS_FILE = "sft_metrics.jsonl"
LARGEST_ALPHA = 16  # of adapters, as in openvla-oft
# What is recorded of each step, and its name among the metrics of `update`.
RECORDED = {"loss": "distill/loss", "accuracy": "distill/accuracy", "grad_norm": "train/grad_norm"}


def fine_tune(args: SftArgs) -> Path:
    """Train, save, and check what was saved; returns the folder. Raises BadInput for what the user can repair."""
    arguments = json.loads(json.dumps(asdict(args), default=str))
    check_output_folder(args.out, arguments)
    lock = lock_file(args.out.with_name(f".{args.out.name}.lock"), f"--out {args.out}")
    with contextlib.closing(lock), unfinished_folder(args.out) as scratch:
        device = choose_device(args.device, args.init)
        limit_memory(args.memory_budget, device)
        demos = read_demos(args, scratch)
        run = {
            "arguments": arguments,
            "train_episodes": len(demos.train),
            "train_frames": sum(len(images) for _, images in demos.train),
            **provenance(sys.argv[1:]),
        }
        progress, outputs = train_and_save(args, demos, device, run)
        check_written(args, demos, outputs, device)
        finished = {"steps": progress.steps, "seconds": progress.seconds}
        write_json(args.out / SFT_RUN_FILE, run | finished)
        if progress.steps == args.steps:
            remove_progress(args.out)
    return args.out


def train_and_save(
    args: SftArgs, demos: Demos, device: torch.device, run: dict[str, object]
) -> tuple[Progress, Tensor]:
    """Returns what was reached, and the trained network's outputs on the first episodes.

    Outputs are logits (N, A, 256); with --l1 the normalised actions of the L1 head, (N, 8, D).
    """
    policy = load_policy(args, demos, device)
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / SFT_RUN_FILE, run)
    progress = train(args, demos, policy)
    if isinstance(policy, Policy):
        policy.save_adapter(args.out, looks=" ".join(demos.looks))
    else:
        policy.save(args.out, demos.looks, getattr(torch, args.save_dtype))
    observations = make_observations(demos.train[:SHOWN_EPISODES])
    outputs = actions_of(policy, observations) if args.l1 else logits_of(policy, observations)
    return progress, outputs


def load_policy(args: SftArgs, demos: Demos, device: torch.device) -> Policy | WholeNetwork:
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


def train(args: SftArgs, demos: Demos, policy: Policy | WholeNetwork) -> Progress:
    """Take `args.steps` optimizer steps, or fewer when interrupted; returns what was reached."""
    statistics = demos.init.statistics[demos.unnorm_key]
    make_targets = chunk_actions if args.l1 else chunk_tokens
    measure = held_out_regression_metrics if args.l1 else held_out_metrics
    frames = make_observations(demos.train, cropped=not args.augment)
    targets = make_targets(demos.train, statistics)  # tokens (N, A), or with --l1 actions (N, 8, D)
    held_out_frames = make_observations(demos.held_out)
    held_out_targets = make_targets(demos.held_out, statistics) if demos.held_out else None
    noise_scale = proprio_noise_scale(frames)
    config = update_config(policy, args)
    learner = supervised_learner(policy, config)
    generator = torch.Generator(policy.device).manual_seed(args.seed)
    print(
        f"{len(frames)} frames, {args.batch_size} a step, {config.update.micro_batch_size} at a time",
        flush=True,
    )

    progress = begin_or_go_on(args.out, learner, generator, len(frames))
    started = time.monotonic() - progress.seconds
    saved_at = progress.seconds
    saved_steps = progress.steps
    try:
        with interruptible():
            while progress.steps < args.steps:
                metrics = take_step(
                    args, learner, config, frames, targets, noise_scale, generator, progress.steps
                )
                progress.unrecorded.append([metrics[name] for name in RECORDED.values()])
                progress.steps += 1
                progress.seconds = time.monotonic() - started

                # Record the means since the last record, and measure on the held-out frames.
                is_last = progress.steps == args.steps
                if progress.steps % args.log_every == 0 or is_last:
                    held_out = {}
                    if held_out_targets is not None:
                        held_out = measure(policy, held_out_frames, held_out_targets)
                    record_means(args.out, progress, held_out)

                # Save, so that a kill loses little.
                if progress.seconds - saved_at >= SAVE_EVERY_S or is_last:
                    saved_at = progress.seconds
                    with tolerate_full_disk(args.out / STATE_FILE):
                        save_progress(args.out, learner, generator, progress)
                        saved_steps = progress.steps
    except KeyboardInterrupt:
        print(
            f"interrupted after {progress.steps} steps: saving; the same command goes on after step {saved_steps}"
        )
    return progress


def take_step(
    args: SftArgs,
    learner: Learner,
    config: TrainConfig,
    frames: Sequence[Observation],
    targets: Tensor,
    noise_scale: np.ndarray,
    generator: torch.Generator,
    step: int,
) -> dict[str, float]:
    """Take one optimizer step; returns its metrics. targets: tokens (N, A), or with --l1 actions (N, 8, D)."""
    # 1. Draw frames at random, with replacement.
    rows = torch.randint(
        len(frames), (args.batch_size,), device=learner.policy.device, generator=generator
    ).tolist()
    observations = [frames[row] for row in rows]

    # 2. Augment their pictures, and add noise to their robot states.
    observations = augment_observations(observations, noise_scale, args.augment, generator)

    # 3. One optimizer step: RL's own update, as if a teacher had played these frames; or L1 regression.
    step_config = changed(config, lr=args.learning_rate(step))
    if args.l1:
        return regression_step(learner, observations, targets[rows], step_config, step)
    batch = demonstration_batch(learner.policy, observations, targets[rows])
    return update(learner, batch, SUPERVISED, step_config, step)


def record_means(out: Path, progress: Progress, held_out: dict[str, float]) -> None:
    """Record the means of the steps since the last record: show them, and write all records to the metrics file."""
    means = torch.tensor(progress.unrecorded).mean(0).tolist()
    progress.unrecorded.clear()
    record = {"step": progress.steps} | dict(zip(RECORDED, means, strict=True))
    record |= {"seconds": progress.seconds} | held_out | system_metrics()
    progress.records.append(record)
    print(", ".join(f"{name} {value:.4g}" for name, value in record.items()), flush=True)
    path = out / METRICS_FILE
    with tolerate_full_disk(path):
        path.write_text("".join(json.dumps(record) + "\n" for record in progress.records), encoding="utf-8")


def main(argv: Sequence[str]) -> None:
    args = parse_flags(SftArgs, argv, prog="python -m workshop.sft")
    handle_stop_signals(signal.default_int_handler)  # so that temporary files are removed
    print(f"wrote {fine_tune(args)}")


if __name__ == "__main__":
    sys.exit(main_guard("workshop.sft", main))
