"""Supervised fine-tuning of an OpenVLA-OFT policy on demonstrations: cross-entropy on the action tokens of a chunk.

    python -m workshop.sft --demos FOLDER --out FOLDER [--llm-dim 96 | --init CHECKPOINT] [--steps 6000]
    python -m workshop.sft --demos FOLDER --out FOLDER --init CHECKPOINT --lora-rank 32    # a 7B, too

FOLDER: of workshop.demos, a LeRobot v3 dataset or RLDS data (workshop/foreign_demos.py).

Without --lora-rank all parameters are trained: from random weights in the sizes given, or from a checkpoint; the output
is a checkpoint folder like any other. With it what RL trains is trained, in as much memory: adapters on every linear
map, the token head's among them, and the proprio projector; the output is an adapter folder, which train_grpo.py and
eval.py take as --checkpoint. Both hold sft_metrics.jsonl, sft_run.json (how it was made) and first_frame.png (what the
network sees). Ctrl-C saves what there is.
"""

import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from configs.cli import main_guard, parse_flags
from configs.config import Suite, check_numbers
from contracts import BadInput, SelfCheckError, write_json
from envs.tasks import METAWORLD
from experiment.metrics import system_metrics
from experiment.provenance import provenance
from experiment.stopping import interruptible
from vla.checkpoint import CheckpointInfo, inspect_checkpoint
from vla.dataset_statistics import STATISTICS_FILE
from vla.device import choose_device, limit_memory
from vla.hub import resolve_checkpoint
from vla.loading import LoadOptions
from vla.policy import Policy
from vla.preprocessing import ImageProcessor
from vla.tokens import FIRST_ACTION_TOKEN
from workshop.demo_files import CHUNK_LENGTH, LIBERO_SIZES, METAWORLD_SIZES
from workshop.foreign_demos import Flip, find_demos
from workshop.sft_data import (
    Episodes,
    chunk_tokens,
    dataset_statistics,
    make_observations,
    read_episodes,
    split_episodes,
)
from workshop.sft_update import WholeNetwork, held_out_metrics, logits_of, supervised_steps
from workshop.tiny import TinySize, make_tiny_checkpoint

SFT_RUN_FILE = "sft_run.json"
LR, ADAPTER_LR = 1.5e-3, 5e-4  # of a small network, and as openvla-oft has it
MOST_ALPHA = 16  # of adapters, as openvla-oft has it
FINAL_LR = 0.01  # of the largest learning rate, where the cosine ends
LOGGED = ("loss", "accuracy", "grad_norm")
SHOWN_EPISODES = 4  # of those trained on, on which what was written is checked
CLEAR = 1.0  # nat between the two likeliest tokens: where rounded weights or other kernels do not decide
LEAST_SAME = 0.98  # of the clear tokens, before and after saving


@dataclass(frozen=True)
class SftArgs:
    """Fine-tune an OpenVLA-OFT policy on demonstrations: all parameters of a small one, or adapters."""

    demos: tuple[str, ...]
    """Folders of demonstrations (workshop.demos), LeRobot v3 datasets or RLDS folders; of the two also hub ids."""
    out: Path
    """Folder to write; must not exist."""
    init: str | None = None
    """Checkpoint to start from, folder or hub id (None: random weights in the sizes below)."""
    lora_rank: int | None = None
    """Rank of adapters to train in place of all parameters: what a 7B needs. openvla-oft's is 32."""
    memory_budget: float | None = None
    """GiB of GPU memory that training may take (None: all that is free). Adapters of a 7B fit into 24."""
    size: TinySize = field(default_factory=TinySize)
    num_images: Literal[1, 2] | None = None
    """Images per decision: 1 (agentview) or 2 (and wrist). None: what --init has, or 2."""
    flip: Flip = "none"
    """How pictures of LeRobot and RLDS data must be mirrored to be upright as openvla's are. both: LIBERO's own."""
    task_suite: str | None = None
    """Suite that the statistics are named after (None: the LeRobot or RLDS dataset's name, else libero_spatial)."""
    holdout: float = 0.05
    """Share of the episodes that is kept from training, to be measured on."""
    steps: int = 6000
    """Optimizer steps."""
    batch_size: int = 256
    """Frames per optimizer step."""
    lr: float | None = None
    """Largest learning rate, after the warm-up; from there on, a cosine (None: 1.5e-3, of adapters 5e-4)."""
    warmup_steps: int = 200
    """Optimizer steps of the warm-up."""
    augment: bool = True
    """Crop and colour training images at random, as OpenVLA-OFT does."""
    seed: int = 0
    """Seed of the random weights, the held-out episodes, the batches and the augmentation."""
    save_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the stored weights; training is in float32 (bfloat16 autocast on a GPU). Adapters are float32."""
    log_every: int = 100
    """Optimizer steps per log line, with a measurement on the held-out episodes."""
    device: str = "auto"
    """Device to train on: cpu, cuda, cuda:1 and so on (auto: a GPU if there is one)."""

    def __post_init__(self) -> None:
        if self.init is not None and self.size != TinySize():
            raise BadInput(
                "--size is for random weights, a checkpoint has its own sizes: leave out --init or --size"
            )
        if self.lora_rank is not None and (self.init is None or self.num_images is not None):
            raise BadInput(
                "--lora-rank puts adapters on a policy: give it by --init, and leave out --num-images"
            )
        check_numbers(self)

    @property
    def largest_lr(self) -> float:
        return (LR if self.lora_rank is None else ADAPTER_LR) if self.lr is None else self.lr

    def learning_rate(self, step: int) -> float:
        """Of step 0, 1, ...: linear warm-up, then half a cosine down to one hundredth."""
        warmup = min(1.0, (step + 1) / (self.warmup_steps + 1))
        progress = max(0.0, step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.largest_lr * warmup * (FINAL_LR + (1 - FINAL_LR) * cosine)


@dataclass(frozen=True)
class Demos:
    """The demonstrations, and the checkpoint that is to learn them."""

    init: CheckpointInfo  # with the statistics of the demonstrations
    key: str  # of these
    looks: list[str]
    train: Episodes
    held_out: Episodes


def fine_tune(args: SftArgs) -> Path:
    """Train, save and check what was saved; returns the folder. Raises BadInput for what the user can repair."""
    if args.out.exists():
        raise BadInput(f"--out {args.out} exists already: name a new folder")
    device, started = choose_device(args.device, args.init), time.monotonic()
    limit_memory(args.memory_budget, device)
    with tempfile.TemporaryDirectory() as scratch:
        demos = read_demos(args, Path(scratch))
        run = {
            "arguments": json.loads(json.dumps(asdict(args), default=str)),
            "train_episodes": len(demos.train),
            "train_frames": sum(len(images) for _, images in demos.train),
            **provenance(sys.argv[1:]),
        }
        run["steps"], logits = train(args, demos, device)
    write_json(args.out / SFT_RUN_FILE, run | {"seconds": time.monotonic() - started})
    check_written(args, demos, logits, device)
    return args.out


def read_demos(args: SftArgs, scratch: Path) -> Demos:
    """`scratch` gets their statistics, and random weights if training starts from those. Raises BadInput."""
    folders, key = find_all(args.demos, args.task_suite)
    is_metaworld = args.task_suite == METAWORLD
    random_weights: Any = {"seed": args.seed, "num_images": args.num_images or 2, "size": args.size}
    random_weights["metaworld"] = is_metaworld
    folder = (
        resolve_checkpoint(args.init)
        if args.init
        else make_tiny_checkpoint(scratch / "init", **random_weights)
    )
    init, processor = inspect_checkpoint(folder, args.num_images), ImageProcessor.load(folder)
    if init.config.chunk_length != CHUNK_LENGTH:
        found = f"--init {folder}: chunks of {init.config.chunk_length} actions"
        raise BadInput(f"{found}; demonstrations have {CHUNK_LENGTH}: give another checkpoint")
    episodes = read_episodes(folders, init.num_images, processor.image_size, args.flip)
    sizes = METAWORLD_SIZES if is_metaworld else LIBERO_SIZES
    if any((episode.actions.shape[1], episode.proprio.shape[1]) != sizes for episode, _ in episodes):
        raise BadInput(f"--task-suite {args.task_suite}: the demonstrations are another simulator's")
    entries = {key: dataset_statistics([episode for episode, _ in episodes], not is_metaworld)}
    write_json(scratch / STATISTICS_FILE, entries)
    init = inspect_checkpoint(folder, args.num_images, statistics=str(scratch))
    looks = sorted({*init.looks, *(episode.looks for episode, _ in episodes)} - {""})
    return Demos(init, key, looks, *split_episodes(episodes, args.holdout, args.seed))


def find_all(demos: Sequence[str], task_suite: str | None) -> tuple[list[Path], str]:
    """The folders of the demonstrations, and the key of the statistics. Raises BadInput."""
    folders, names = zip(*(find_demos(given) for given in demos), strict=True)
    keys = {f"{task_suite}_no_noops"} if task_suite else {name or "libero_spatial_no_noops" for name in names}
    if len(keys) > 1:
        raise BadInput(
            f"--demos of several names ({', '.join(sorted(keys))}): name their suite with --task-suite"
        )
    return list(folders), keys.pop()


def train(args: SftArgs, demos: Demos, device: torch.device) -> tuple[int, Tensor]:
    """Train and save; returns steps done, and the logits (N, A, 256) on the first episodes."""
    policy: Policy | WholeNetwork
    if args.lora_rank is None:
        policy = WholeNetwork(demos.init, demos.key, device)
    else:
        options = LoadOptions(
            task_suite=demos.key,
            unnorm_key=demos.key,
            statistics=str(demos.init.statistics_folder),
            lora_rank=args.lora_rank,
            lora_alpha=min(args.lora_rank, MOST_ALPHA),
            seed=args.seed,
            device=device,
        )
        policy = Policy.load(str(args.init), options)
    statistics = demos.init.statistics[demos.key]
    frames, tokens = (
        make_observations(demos.train, cropped=not args.augment),
        chunk_tokens(demos.train, statistics),
    )
    measure = None
    if demos.held_out:
        held_out = make_observations(demos.held_out), chunk_tokens(demos.held_out, statistics)
        measure = partial(held_out_metrics, policy, *held_out)
    done = follow(supervised_steps(policy, frames, tokens, args), measure, args)
    shown = make_observations(demos.train[:SHOWN_EPISODES])
    if isinstance(policy, Policy):
        policy.save_adapter(args.out, looks=" ".join(demos.looks))
    else:
        policy.save(args.out, demos.looks, getattr(torch, args.save_dtype))
    return done, logits_of(policy, shown)


def follow(steps: Iterator[Tensor], measure: Callable[[], dict[str, float]] | None, args: SftArgs) -> int:
    """Let the steps be taken, record what is LOGGED of them, measure; returns how many were done."""
    args.out.mkdir(parents=True)
    metrics: list[Tensor] = []
    started, step = time.monotonic(), 0
    try:
        with interruptible():
            for step, of_step in enumerate(steps, 1):
                metrics.append(of_step)
                if step % args.log_every == 0 or step == args.steps:
                    means = torch.stack(metrics).mean(0).tolist()
                    record = {"step": step} | dict(zip(LOGGED, means, strict=True))
                    record["seconds"] = time.monotonic() - started
                    record |= (measure() if measure else {}) | system_metrics()
                    with (args.out / "sft_metrics.jsonl").open("a", encoding="utf-8") as file:
                        file.write(json.dumps(record) + "\n")
                    print(", ".join(f"{name} {value:.4g}" for name, value in record.items()), flush=True)
                    metrics.clear()
    except KeyboardInterrupt:
        print(f"interrupted after {step} steps: saving")
    return step


def check_written(args: SftArgs, demos: Demos, before: Tensor, device: torch.device) -> None:
    """Load what was written as every program will, and compare its greedy tokens with those `before` (N, A, 256).

    A policy of a low loss that never succeeds is most often not read as it was trained: without its token head, by
    statistics of other data, on pictures that are cropped or turned otherwise.
    """
    gc.collect()  # the network that was trained: there may be no memory for two
    torch.cuda.empty_cache()
    key, out = demos.key, str(args.out)
    options = LoadOptions(
        task_suite=key,
        unnorm_key=key,
        device=device,
        frozen_weights="auto" if args.lora_rank else "float32",
        compile="off",
    )
    policy = Policy.load(out, options)
    episodes = demos.train[:SHOWN_EPISODES]
    shown = make_observations(episodes)
    Image.fromarray(np.concatenate([*policy.view(shown[0])], axis=1)).save(args.out / "first_frame.png")
    tokens, best = logits_of(policy, shown).argmax(-1) + FIRST_ACTION_TOKEN, before.topk(2)
    right = (tokens == chunk_tokens(episodes, policy.statistics)).float().mean().item()
    as_before = (tokens == best.indices[..., 0] + FIRST_ACTION_TOKEN)[
        best.values.diff(dim=-1)[..., 0] < -CLEAR
    ]
    same = as_before.float().mean().nan_to_num(1.0).item()
    found = f"{out}, read again: {same:.1%} of {len(as_before)} clear tokens on training frames are as before saving"
    if same < LEAST_SAME:
        raise SelfCheckError(f"{found}: what was written is not what was trained")
    suite = key.removesuffix("_no_noops")
    flags = f"--checkpoint {out} --task-suite {suite if suite in get_args(Suite) else 'SUITE'}"
    print(
        f"{found}, {right:.1%} of all are as demonstrated; statistics: {key}. Evaluate it, and go on by RL:\n"
        f"  python eval.py {flags}\n  python train_grpo.py {flags}\n"
        f"No success although most tokens are as demonstrated? Compare {out}/first_frame.png, what it was trained on, "
        "with first_frame.png of a run (--flip, --assets)"
    )


def main(argv: Sequence[str]) -> None:
    print(f"wrote {fine_tune(parse_flags(SftArgs, argv, prog='python -m workshop.sft'))}")


if __name__ == "__main__":
    sys.exit(main_guard("workshop.sft", main))
