"""Supervised fine-tuning of an OpenVLA-OFT policy on demonstrations: cross-entropy on the 56 action tokens of a chunk.

    python -m vla.sft --demos FOLDER --out FOLDER [--size.llm-dim 96] [--steps 6000]
    python -m vla.sft --demos FOLDER --out FOLDER --init CHECKPOINT

All parameters are trained: from random weights in the sizes given, or from a checkpoint. Meant for small policies. The
output is a checkpoint folder like any other, with the data's statistics, records, curves and a model card. Ctrl-C ends
the training early and saves what there is.
"""

import math
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from command_line import answer_at_once, main_guard, parse_flags
from vla.settings import SftArgs, TinySize

parse = partial(parse_flags, SftArgs, prog="python -m vla.sft")

if __name__ == "__main__":
    answer_at_once("vla.sft", parse)  # before the seconds that the imports below take

import timm
import torch
import transformers

from contracts import write_json
from errors import BadInput
from vla.checkpoint import inspect_checkpoint
from vla.policy import choose_device
from vla.preprocessing import ImageProcessor
from vla.prompt import load_tokenizer
from vla.sft_card import write_card, write_run
from vla.sft_checkpoint import initial_checkpoint, load_trainable, network_facts, save_policy
from vla.sft_data import EpisodeArrays, PixelScale, dataset_statistics, make_data, read_episodes, split_episodes
from vla.sft_learner import Learner
from vla.sft_report import git_commit, held_out_metrics, plot_curves, step_line, write_record
from vla.tokens import load_statistics

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def check(args: SftArgs) -> None:
    """Raises BadInput for flags that cannot work, before anything is read."""
    if args.out.exists():
        raise BadInput(f"--out {args.out} exists already: name a new folder")
    if not args.demos:
        raise BadInput("--demos: name at least one folder of demonstrations")
    if args.init is not None and args.size != TinySize():
        raise BadInput("--size is for random weights, a checkpoint has its own sizes: leave out --init or --size")
    if not 0 <= args.holdout < 1:
        raise BadInput(f"--holdout {args.holdout}: expected a share from 0 up to below 1")
    if args.size.image_size % args.size.patch_size:
        raise BadInput(
            f"--size.image-size {args.size.image_size} is no multiple of --size.patch-size {args.size.patch_size}"
        )
    for name, least in (("log_every", 1), ("eval_every", 1), ("workers", 1)):
        if getattr(args, name) < least:
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: expected {least} or more")
    if args.eval_every % args.log_every:
        raise BadInput(f"--eval-every {args.eval_every} is no multiple of --log-every {args.log_every}")
    if beyond := [step for step in args.checkpoint_at if not 1 <= step <= args.learner.steps]:
        raise BadInput(f"--checkpoint-at {beyond[0]}: expected steps from 1 to {args.learner.steps}")
    args.learner.check()


def fine_tune(args: SftArgs) -> Path:
    """Train, save and measure; returns the checkpoint folder. Raises BadInput for what the user can repair."""
    check(args)
    device, key = choose_device(args.device), f"{args.task_suite}_no_noops"
    with initial_checkpoint(args.init, args.size, args.num_images, args.learner.seed) as init:
        processor, tokenizer = ImageProcessor.load(init.folder), load_tokenizer(init.folder)
        network = load_trainable(init, device)
        episodes = read_episodes(args.demos, init.num_images, processor.image_size, args.workers)
        train_episodes, held_out_episodes = split_episodes(episodes, args.holdout, args.learner.seed)

        args.out.mkdir(parents=True)
        statistics = {key: dataset_statistics(episodes)}
        write_json(args.out / "dataset_statistics.json", statistics)
        data = make_data(
            train_episodes, held_out_episodes, load_statistics(args.out)[key], tokenizer, device, args.learner.augment
        )
        learner = Learner(network, data, PixelScale.of(processor, device), args.learner)
        facts = {"network": network_facts(network, init), "data": data_facts(train_episodes, held_out_episodes, key)}
        for name, entries in facts.items():
            print(f"{name}: " + ", ".join(f"{entry.replace('_', ' ')} {value}" for entry, value in entries.items()))
        del episodes, train_episodes, held_out_episodes  # gigabytes of images, which `data` has now

        def save(folder: Path, steps: int, seconds: float) -> None:
            save_policy(folder, network, init, statistics, DTYPES[args.save_dtype])
            write_run(folder, provenance(args, device) | facts | {"steps": steps, "seconds": seconds})
            write_card(folder)

        steps, seconds = train(learner, args, save)
        plot_curves(args.out)
        save(args.out, steps, seconds)
    measure_saved(learner, args.out, device)
    return args.out


def train(learner: Learner, args: SftArgs, save: Callable[[Path, int, float], None]) -> tuple[int, float]:
    """The loop; returns steps done and seconds taken. Ctrl-C and --max-minutes end it like the last step does."""
    started = logged_at = time.monotonic()
    end = math.inf if args.max_minutes is None else started + 60 * args.max_minutes
    logged, step, last = 0, 0, args.learner.steps
    try:
        for step in range(1, last + 1):
            learner.step(step - 1)
            if step % args.log_every == 0 or step == last:
                record = {"step": step} | learner.take_metrics()  # waits for the device
                now = time.monotonic()
                record["samples_per_s"] = (step - logged) * args.learner.batch_size / (now - logged_at)
                record["seconds"] = now - started
                if not math.isfinite(record["loss"]):
                    raise BadInput(f"the loss is {record['loss']} after {step} steps: give a smaller --lr")
                if step % args.eval_every == 0 or step == last:
                    record |= held_out_metrics(learner.diagnosis())
                write_record(args.out, record)
                print(step_line(record, last), flush=True)
                logged, logged_at = step, time.monotonic()
            if step in args.checkpoint_at:
                save(args.out / f"step_{step:06}", step, time.monotonic() - started)
            if time.monotonic() >= end:
                print(f"--max-minutes {args.max_minutes:g} are over after {step} steps: saving")
                break
    except KeyboardInterrupt:
        print(f"interrupted after some {step} steps: saving")
    return step, time.monotonic() - started


def measure_saved(learner: Learner, folder: Path, device: torch.device) -> None:
    """Print how the weights predict held-out frames as they were saved, rounding included."""
    saved = load_trainable(inspect_checkpoint(folder), device)
    if (diagnosis := learner.diagnosis(saved)) is not None:
        print(f"held-out frames, weights as saved: {diagnosis.nll:.3f} nats per token\n{diagnosis.table()}")


def data_facts(train: Sequence[EpisodeArrays], held_out: Sequence[EpisodeArrays], key: str) -> dict[str, Any]:
    return {
        "train_episodes": len(train),
        "train_frames": sum(len(episode.images) for episode in train),
        "held_out_episodes": len(held_out),
        "instructions": sorted({episode.instruction for episode in [*train, *held_out]}),
        "statistics_key": key,
    }


def provenance(args: SftArgs, device: torch.device) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "-m", "vla.sft", *sys.argv[1:]]),
        "arguments": asdict(args),
        "commit": git_commit(),
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in (torch, timm, transformers)},
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    }


def main(argv: Sequence[str]) -> None:
    print(f"wrote {fine_tune(parse(argv))}")


if __name__ == "__main__":
    sys.exit(main_guard("vla.sft", main))
