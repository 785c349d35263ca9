"""Supervised fine-tuning of an OpenVLA-OFT policy on demonstrations: cross-entropy on the action tokens of a chunk.

    python -m workshop.sft --demos FOLDER --out FOLDER [--llm-dim 96 | --init CHECKPOINT] [--steps 6000]

FOLDER: of workshop.demos, a LeRobot v3 dataset or RLDS data (workshop/foreign_demos.py).

All parameters are trained: from random weights in the sizes given, or from a checkpoint. The output is a checkpoint
folder like any other, with sft_metrics.jsonl and sft_run.json (how it was made). Ctrl-C saves what there is.

openvla-oft trains by cross-entropy over all 32,064 ids. Here only the rows of 256 action ids are computed: other rows
of `lm_head` are zero, so their ids have the logit 0, their share of the softmax is known, and an argmax finds none.
"""

import json
import math
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.cli import main_guard, parse_flags
from contracts import BadInput, read_json, write_json
from envs.tasks import METAWORLD
from vla.checkpoint import CheckpointInfo, inspect_checkpoint, load_network, resolve_checkpoint, save_checkpoint
from vla.model import OpenVLAOFT
from vla.policy import choose_device
from vla.preprocessing import ImageProcessor, load_tokenizer
from vla.tokens import ACTION_TOKEN_IDS, NUM_BINS, load_statistics
from workshop.demo_files import CHUNK_LENGTH, LIBERO_SIZES, METAWORLD_SIZES
from workshop.foreign_demos import Flip, find_demos
from workshop.sft_data import Frames, augment, dataset_statistics, make_frames, read_episodes, split_episodes
from workshop.tiny import TinySize, make_tiny_checkpoint

SFT_RUN_FILE = "sft_run.json"
WEIGHT_DECAY = 0.02
ADAM_BETAS = (0.9, 0.98)
MAX_GRAD_NORM = 1.0
FINAL_LR = 0.01  # of the largest learning rate, where the cosine ends
PROPRIO_NOISE = 0.02  # on the robot's state, as a share of its standard deviation
METRICS = ("loss", "accuracy", "xyz_bin_error", "grad_norm")
ACTION_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")


@dataclass(frozen=True)
class SftArgs:
    """Fine-tune an OpenVLA-OFT policy on demonstrations. All parameters are trained; meant for small policies."""

    demos: tuple[str, ...]
    """Folders of demonstrations (workshop.demos), LeRobot v3 datasets or RLDS folders; of the two also hub ids."""
    out: Path
    """Folder to write; must not exist."""
    init: str | None = None
    """Checkpoint to start from, folder or hub id (None: random weights in the sizes below)."""
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
    lr: float = 1.5e-3
    """Largest learning rate, after the warm-up. From there on, a cosine."""
    warmup_steps: int = 200
    """Optimizer steps of the warm-up."""
    augment: bool = True
    """Crop and colour training images at random, as OpenVLA-OFT does."""
    seed: int = 0
    """Seed of the random weights, the held-out episodes, the batches and the augmentation."""
    save_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the stored weights; training is in float32 (bfloat16 autocast on a GPU)."""
    log_every: int = 100
    """Optimizer steps per log line, with a measurement on the held-out episodes."""
    device: str = "auto"
    """Device to train on: cpu, cuda, cuda:1 and so on (auto: a GPU if there is one)."""

    def __post_init__(self) -> None:
        if self.init is not None and self.size != TinySize():
            raise BadInput("--size is for random weights, a checkpoint has its own sizes: leave out --init or --size")
        if not 0 <= self.holdout < 1:
            raise BadInput(f"--holdout {self.holdout}: expected a share from 0 up to below 1")
        if min(self.steps, self.batch_size, self.log_every, self.warmup_steps + 1) < 1 or not self.lr > 0:
            raise BadInput("--steps, --batch-size, --log-every and --lr must be above 0, --warmup-steps not below it")


def fine_tune(args: SftArgs) -> Path:
    """Train, save and measure; returns the checkpoint folder. Raises BadInput for what the user can repair."""
    if args.out.exists():
        raise BadInput(f"--out {args.out} exists already: name a new folder")
    device, started = choose_device(args.device), time.monotonic()
    folders, key = find_all(args.demos, args.task_suite)
    is_metaworld = args.task_suite == METAWORLD
    sizes = METAWORLD_SIZES if is_metaworld else LIBERO_SIZES
    with tempfile.TemporaryDirectory() as scratch:
        random_weights: Any = {"seed": args.seed, "num_images": args.num_images or 2, "size": args.size}
        random_weights["metaworld"] = is_metaworld
        folder = resolve_checkpoint(args.init) if args.init else make_tiny_checkpoint(Path(scratch), **random_weights)
        init = inspect_checkpoint(folder, args.num_images)
        processor, tokenizer = ImageProcessor.load(init.folder), load_tokenizer(init.folder)
        network = load_trainable(init, device, sizes)
        episodes = read_episodes(folders, init.num_images, processor.image_size, args.flip)
        if any((episode.actions.shape[1], episode.proprio.shape[1]) != sizes for episode, _ in episodes):
            raise BadInput(f"--task-suite {args.task_suite}: the demonstrations are another simulator's")
        looks = {*init.looks, *(episode.looks for episode, _ in episodes)} - {""}
        train_episodes, held_out_episodes = split_episodes(episodes, args.holdout, args.seed)
        args.out.mkdir(parents=True)
        entries = {key: dataset_statistics([episode for episode, _ in episodes], not is_metaworld)}
        write_json(args.out / "dataset_statistics.json", entries)
        statistics = load_statistics(args.out)[key]
        frames = make_frames(train_episodes, statistics, tokenizer, device, cropped=not args.augment)
        held_out = make_frames(held_out_episodes, statistics, tokenizer, device) if held_out_episodes else None
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
        run = {
            "command": shlex.join(["python", "-m", "workshop.sft", *sys.argv[1:]]),
            "arguments": json.loads(json.dumps(asdict(args), default=str)),
            "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else "",
            "torch": torch.__version__,
            "train_episodes": len(train_episodes),
            "train_frames": len(frames.targets),
        }
        print(f"{sum(p.numel() for p in network.parameters()):,} parameters, {len(frames.targets)} frames")
        del episodes, train_episodes, held_out_episodes  # gigabytes of images, which the frames have now
        run["steps"] = train(network, frames, held_out, processor, args)
        save_policy(args.out, network, init, entries, getattr(torch, args.save_dtype), sorted(looks))
    write_json(args.out / SFT_RUN_FILE, run | {"seconds": time.monotonic() - started})
    if held_out is not None:
        saved = load_trainable(inspect_checkpoint(args.out), device, sizes)
        print(f"held out, weights as saved: {held_out_metrics(saved, held_out, processor, args.batch_size)}")
    return args.out


def find_all(demos: Sequence[str], task_suite: str | None) -> tuple[list[Path], str]:
    """The folders of the demonstrations, and the key of the statistics. Raises BadInput."""
    folders, names = zip(*(find_demos(given) for given in demos), strict=True)
    keys = {f"{task_suite}_no_noops"} if task_suite else {name or "libero_spatial_no_noops" for name in names}
    if len(keys) > 1:
        raise BadInput(f"--demos of several names ({', '.join(sorted(keys))}): name their suite with --task-suite")
    return list(folders), keys.pop()


def train(
    network: OpenVLAOFT, frames: Frames, held_out: Frames | None, processor: ImageProcessor, args: SftArgs
) -> int:
    """The loop; returns steps done. The network stays in eval mode, which differs from training in no layer."""
    with torch.no_grad():  # training leaves these rows alone: nothing reads them
        network.language_model.lm_head.weight[: ACTION_TOKEN_IDS.start] = 0.0
        network.language_model.lm_head.weight[ACTION_TOKEN_IDS.stop :] = 0.0
    parameters = list(network.requires_grad_(True).parameters())
    # Matrices alone decay. Rows of words that no text has stay zero: they get no gradient.
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=ADAM_BETAS, fused=True)
    device = frames.targets.device
    generator = torch.Generator(device).manual_seed(args.seed)
    noise_scale = PROPRIO_NOISE * frames.proprio.std(0)  # (8,) or (4,)
    metrics: list[Tensor] = []
    started, step = time.monotonic(), 0
    try:
        for step in range(1, args.steps + 1):
            batch = frames.rows(
                torch.randint(len(frames.targets), (args.batch_size,), device=device, generator=generator)
            )
            if args.augment:
                images = augment(batch.images.flatten(0, 1), generator).view_as(batch.images)
                batch = replace(batch, images=images)
            noise = noise_scale * torch.randn(batch.proprio.shape, device=device, generator=generator)
            batch = replace(batch, proprio=(batch.proprio + noise).clamp(-1, 1))  # as normalised
            logits = chunk_logits(network, batch, processor)
            loss = action_loss(logits, batch.targets, network.language_model.config.vocab_size)
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step - 1, args)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            metrics.append(torch.stack([loss.detach(), *match(logits, batch.targets), grad_norm]))
            if step % args.log_every == 0 or step == args.steps:
                means = torch.stack(metrics).mean(0).tolist()  # waits for the device
                record = {"step": step} | dict(zip(METRICS, means, strict=True))
                if not math.isfinite(record["loss"]):
                    raise BadInput(f"the loss is {record['loss']} after {step} steps: give a smaller --lr")
                record["seconds"] = time.monotonic() - started
                if held_out is not None:
                    record |= held_out_metrics(network, held_out, processor, args.batch_size)
                with (args.out / "sft_metrics.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                print(", ".join(f"{name} {value:.4g}" for name, value in record.items()), flush=True)
                metrics.clear()
    except KeyboardInterrupt:
        print(f"interrupted in step {step}: saving")
    return step


def chunk_logits(network: OpenVLAOFT, batch: Frames, processor: ImageProcessor) -> Tensor:
    """(B, A, 256) float32"""
    constants = torch.tensor([processor.means, processor.stds], device=batch.images.device)
    mean, std = constants[..., None, None]  # each (2, 3, 1, 1): DINOv2, SigLIP
    pixels = ((batch.images[:, :, None].float() / 255 - mean) / std).flatten(1, 3)  # (B, 6n, S, S)
    with torch.autocast(pixels.device.type, dtype=torch.bfloat16, enabled=pixels.is_cuda):
        return network(pixels, batch.prompts, batch.prompt_lengths, batch.proprio)[0]


def action_loss(logits: Tensor, targets: Tensor, vocabulary_size: int) -> Tensor:
    """Cross-entropy over the whole vocabulary, mean over tokens. logits (B, A, 256) float32; targets (B, A) columns."""
    others = logits.new_full((), math.log(vocabulary_size - NUM_BINS))  # log of the sum of exp(0) over other ids
    log_total = torch.logaddexp(logits.logsumexp(-1), others)
    return (log_total - logits.gather(-1, targets[..., None]).squeeze(-1)).mean()


@torch.no_grad()
def match(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Token accuracy of the argmax, and its mean distance in bins along x, y, z."""
    found = logits.argmax(-1)
    distance = (found - targets).abs().float().unflatten(1, (CHUNK_LENGTH, -1))
    return (found == targets).float().mean(), distance[..., :3].mean()


@torch.no_grad()
def held_out_metrics(network: OpenVLAOFT, frames: Frames, processor: ImageProcessor, size: int) -> dict[str, float]:
    """How well and how sharply a policy predicts held-out frames; entropy in nats, 256 equal bins have 5.55."""
    batches = [frames.rows(slice(start, start + size)) for start in range(0, len(frames.targets), size)]
    logits = torch.cat([chunk_logits(network, batch, processor) for batch in batches])
    accuracy, error = match(logits, frames.targets)
    nll = F.cross_entropy(logits.flatten(0, 1), frames.targets.flatten())
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).unflatten(1, (CHUNK_LENGTH, -1)).mean((0, 1))
    metrics = {"nll": nll, "accuracy": accuracy, "xyz_bin_error": error}
    names = (*ACTION_NAMES[: len(entropy) - 1], ACTION_NAMES[-1])
    metrics |= {f"entropy_{name}": value for name, value in zip(names, entropy, strict=True)}
    return {f"held_out/{name}": value.item() for name, value in metrics.items()}


def learning_rate(step: int, args: SftArgs) -> float:
    """Of step 0, 1, ...: linear warm-up, then half a cosine down to one hundredth."""
    warmup = min(1.0, (step + 1) / (args.warmup_steps + 1))
    progress = max(0.0, step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return args.lr * warmup * (FINAL_LR + (1 - FINAL_LR) * cosine)


def load_trainable(info: CheckpointInfo, device: torch.device, sizes: tuple[int, int] = LIBERO_SIZES) -> OpenVLAOFT:
    """The network in float32. Raises BadInput when it decides on other things than demonstrations of `sizes` hold."""
    action_dim, proprio_dim = sizes
    network = load_network(info, CHUNK_LENGTH * action_dim, device, torch.float32)
    projector = network.proprio_projector
    chunk, proprio = info.config.chunk_length, proprio_dim if projector is None else projector.proprio_dim
    if (chunk, proprio) != (CHUNK_LENGTH, proprio_dim):
        raise BadInput(
            f"--init {info.folder}: chunks of {chunk} actions and a robot state of {proprio} values; demonstrations "
            f"have {CHUNK_LENGTH} and {proprio_dim}: give another checkpoint"
        )
    return network


def save_policy(
    folder: Path, network: OpenVLAOFT, init: CheckpointInfo, statistics: dict[str, Any], dtype: torch.dtype,
    looks: list[str],
) -> None:  # fmt: skip
    """A whole checkpoint folder: weights in `dtype`, `statistics` {key: entry}, the other files those of `init`.

    An L1 head of `init` stays behind: it reads hidden states that training has changed. As the head is also how the
    number of images is found out, config.json states that number.
    """
    config = read_json(init.folder / "config.json")
    name = str(dtype).removeprefix("torch.")
    changes = {"num_images_in_input": init.num_images, "norm_stats": statistics, "torch_dtype": name, "looks": looks}
    text_config = config.get("text_config", {}) | {"torch_dtype": name}
    save_checkpoint(folder, network, config | changes | {"text_config": text_config}, dtype=dtype)
    for file in init.folder.iterdir():  # the others are written anew
        if "token" in file.name or "processor" in file.name:
            shutil.copyfile(file, folder / file.name)


def main(argv: Sequence[str]) -> None:
    print(f"wrote {fine_tune(parse_flags(SftArgs, argv, prog='python -m workshop.sft'))}")


if __name__ == "__main__":
    sys.exit(main_guard("workshop.sft", main))
