"""Train a policy on demonstrations, and write it: what workshop.sft does once its flags are read.

A policy learns the tokens of the demonstrated chunks, or with --l1 their continuous actions. The loss of tokens is over
all ids, as openvla-oft's: the token head of a checkpoint that was trained by L1 regression gives words the highest
logits, while RL, like an argmax over all ids, needs action tokens there.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from contracts import BadInput, Observation, first_line, unfinished_folder, write_json
from envs.tasks import MAX_ENV_STEPS
from experiment.metrics import system_metrics
from experiment.provenance import provenance
from experiment.terminal import say, show_progress
from rl.optimizer_step import optimizer_step
from vla.device import choose_device, limit_memory
from vla.load_options import LoadOptions
from vla.memory import plan_update
from vla.pass_sizes import pass_sizes, shrink_until_it_fits
from vla.policy import Policy
from vla.tokens import ACTION_TOKEN_IDS, FIRST_ACTION_TOKEN, encode
from workshop.augment import augment_observations
from workshop.demo_files import KEY_SUFFIX
from workshop.sft_config import SftArgs
from workshop.sft_data import (
    Demos,
    Episodes,
    chunk_actions,
    chunk_tokens,
    make_observations,
    read_demos,
)
from workshop.whole_network import WholeNetwork

SFT_RUN_FILE = "sft_run.json"
METRICS_FILE = "sft_metrics.jsonl"
WEIGHT_DECAY = 0.02
PROPRIO_NOISE = 0.02  # on the robot's state, as a share of its standard deviation
MAX_GRAD_NORM = 1.0
MEASURED_AT_ONCE = 8  # frames
LARGEST_ALPHA = 16  # of adapters, as in openvla-oft
MEMORY_ADVICE = (
    "train adapters in place of all parameters (--lora-rank 32), lower --batch-size or --lora-rank, raise "
    "--memory-budget, close other programs on the GPU, or use a larger one"
)


Student = Policy | WholeNetwork
# (policy, observations, targets) -> mean loss and accuracy, (): `token_loss` or `regression_loss`.
Loss = Callable[[Student, Sequence[Observation], Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Frames:
    """What a policy sees, and what is to be learned there."""

    observations: list[Observation]  # N
    targets: Tensor  # (N, ...) on the CPU: `chunk_tokens` or `chunk_actions`

    def __len__(self) -> int:
        return len(self.observations)

    def __getitem__(self, rows: slice) -> "Frames":
        return Frames(self.observations[rows], self.targets[rows])


def fine_tune(args: SftArgs, argv: Sequence[str] = ()) -> Path:
    """Train and save a policy; returns the folder. Raises BadInput for what the user can repair.

    argv: the command line, which SFT_RUN_FILE records (from Python: none).
    """
    try:
        with unfinished_folder(args.out) as folder, tempfile.TemporaryDirectory() as scratch:
            device = choose_device(args.device, args.init)
            limit_memory(args.memory_budget, device)
            demos = read_demos(args, Path(scratch))
            policy = load_student(args, demos, device)
            train(args, demos, policy, folder)
            write_policy(args, demos, policy, argv, folder)
    except torch.OutOfMemoryError as error:
        raise BadInput(f"out of GPU memory ({first_line(error)}): {MEMORY_ADVICE}") from None
    say(f"wrote {args.out}")
    dataset = demos.unnorm_key.removesuffix(KEY_SUFFIX)
    suite = dataset if dataset in MAX_ENV_STEPS else "SUITE"
    say(f"Evaluate: python eval.py --checkpoint {args.out} --task-suite {suite} --task-ids ...")
    say(f"No success? Compare {args.out}/first_frame.png with that of a run (--flip, --assets)")
    return args.out


def load_student(args: SftArgs, demos: Demos, device: torch.device) -> Student:
    """The checkpoint to train, with the demonstrations' statistics: with adapters, or as a whole."""
    if args.lora_rank is None:
        return WholeNetwork(demos.init, demos.unnorm_key, device, trains_l1_head=args.l1)
    options = LoadOptions(
        task_suite=demos.unnorm_key,
        unnorm_key=demos.unnorm_key,
        statistics=str(demos.init.statistics_folder),
        num_images=demos.init.num_images,
        device=str(device),
        lora_rank=args.lora_rank,
        lora_alpha=min(args.lora_rank, LARGEST_ALPHA),
        l1_student="tokens",
        seed=args.seed,
    )
    return Policy.load(str(args.init), options)


def train(args: SftArgs, demos: Demos, policy: Student, folder: Path) -> None:
    """Take `args.steps` optimizer steps, and write METRICS_FILE into the folder."""
    loss = regression_loss if args.l1 else token_loss
    frames = make_frames(args, demos, demos.train, cropped=not args.augment)
    held_out = make_frames(args, demos, demos.held_out) if demos.held_out else None
    noise_scale = PROPRIO_NOISE * np.std([one.proprio for one in frames.observations], axis=0)
    micro_batch_size = args.batch_size
    if isinstance(policy, Policy):  # before the optimizer takes its memory
        plan = plan_update(policy, "auto", args.batch_size)
        micro_batch_size = plan.micro_batch_size
    optimizer = policy.make_optimizer(lr=0.0, weight_decay=WEIGHT_DECAY)
    generator = torch.Generator(policy.device).manual_seed(args.seed)
    say(f"{len(frames)} frames, {args.batch_size} a step, {micro_batch_size} at a time")
    started = time.monotonic()
    unrecorded: list[dict[str, float]] = []  # the metrics of the steps since the last record
    with show_progress("training", args.steps, "steps") as activity:
        for step in range(1, args.steps + 1):
            optimizer.param_groups[0]["lr"] = args.learning_rate(step - 1)
            batch = draw_batch(args, frames, noise_scale, generator)
            metrics = training_step(loss, policy, optimizer, batch, micro_batch_size)
            unrecorded.append(metrics)
            activity.advance(1)

            if step % args.log_every == 0 or step == args.steps:
                means = {name: fmean(one[name] for one in unrecorded) for name in metrics}
                record = {"step": step, **means, "seconds": time.monotonic() - started}
                if held_out is not None:
                    record["held_out/loss"], record["held_out/accuracy"] = measure(loss, policy, held_out)
                say(", ".join(f"{name} {value:.4g}" for name, value in record.items()))
                with (folder / METRICS_FILE).open("a") as file:
                    file.write(json.dumps(record | system_metrics()) + "\n")
                unrecorded.clear()


def make_frames(args: SftArgs, demos: Demos, episodes: Episodes, cropped: bool = True) -> Frames:
    """All frames of episodes with the targets of the loss; cropped as in evaluation, or not yet."""
    make_targets = chunk_actions if args.l1 else chunk_tokens
    targets = make_targets(episodes, demos.init.statistics[demos.unnorm_key])
    return Frames(make_observations(episodes, cropped), targets)


def draw_batch(args: SftArgs, frames: Frames, noise_scale: np.ndarray, generator: torch.Generator) -> Frames:
    """Draw frames at random, with replacement; augment their pictures, and add noise to their robot states."""
    rows = torch.randint(
        len(frames), (args.batch_size,), device=generator.device, generator=generator
    ).tolist()
    observations = [frames.observations[row] for row in rows]
    augmented = augment_observations(observations, noise_scale, args.augment, generator)
    return Frames(augmented, frames.targets[rows])


def training_step(
    loss: Loss, policy: Student, optimizer: torch.optim.Optimizer, frames: Frames, micro_batch_size: int
) -> dict[str, float]:
    """Take an optimizer step on the mean loss of the frames. Returns loss, accuracy and the gradient's norm.

    The gradient is summed over micro-batches, which become smaller if memory runs out. Raises BadInput for a training
    that has diverged, and when nothing fits into memory.
    """

    def accumulate(size_to_try: int) -> list[dict[str, Tensor]]:
        optimizer.zero_grad(set_to_none=True)  # what a first try has added
        statistics = []
        start = 0
        for size in pass_sizes(len(frames), size_to_try, policy.few_sizes):
            part = frames[start : start + size]
            statistics.append(add_gradient(loss, policy, part, size / len(frames)))
            start += size
        return statistics

    _, statistics = shrink_until_it_fits(
        policy.network, micro_batch_size, accumulate, learns=True, advice=MEMORY_ADVICE
    )
    norm = optimizer_step(optimizer, MAX_GRAD_NORM).item()
    optimizer.zero_grad(set_to_none=True)
    if math.isnan(norm):
        raise BadInput("the training has diverged: a gradient is not finite, or enormous; lower --lr")
    metrics = {name: sum(part[name].item() for part in statistics) for name in ("loss", "accuracy")}
    return metrics | {"grad_norm": norm}


def add_gradient(loss: Loss, policy: Student, frames: Frames, share: float) -> dict[str, Tensor]:
    """Add the gradient of some frames' share of the loss, and return what they add to loss and accuracy.

    The autograd graph ends with this function, as `vla.cuda_graphs` needs it.
    """
    mean_loss, accuracy = loss(policy, frames.observations, frames.targets)
    (share * mean_loss).backward()
    return {"loss": share * mean_loss.detach(), "accuracy": share * accuracy}


@torch.no_grad()
def measure(loss: Loss, policy: Student, frames: Frames) -> tuple[float, float]:
    """Mean loss and accuracy on frames, without training."""
    sums = torch.zeros(2, device=policy.device)
    for start in range(0, len(frames), MEASURED_AT_ONCE):
        part = frames[start : start + MEASURED_AT_ONCE]
        sums += len(part) * torch.stack(loss(policy, part.observations, part.targets))
    mean_loss, accuracy = (sums / len(frames)).tolist()
    return mean_loss, accuracy


def token_loss(policy: Student, observations: Sequence[Observation], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of tokens, (B, A) int64, over all ids, and the share of tokens that are right; means, ()."""
    logits, other_logsumexp = logits_and_other_logsumexp(policy, observations)
    targets = tokens.to(logits.device) - FIRST_ACTION_TOKEN
    choice_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    # Add -log of the probability that lies on action tokens, log(1 + exp(others - actions)).
    mass_loss = F.softplus(other_logsumexp - logits.logsumexp(-1)).mean()
    return choice_loss + mass_loss, (logits.argmax(-1) == targets).float().mean()


def logits_and_other_logsumexp(policy: Student, observations: Sequence[Observation]) -> tuple[Tensor, Tensor]:
    """The action tokens' logits (B, A, 256), and the log-sum-exp of the logits of all other ids (B, A)."""
    logits, hidden = policy.chunk_outputs(observations)
    if isinstance(policy, WholeNetwork):
        return logits, logits.new_full(logits.shape[:2], policy.other_logsumexp)
    all_logits = policy.network.language_model.lm_head(hidden).float()
    smaller_ids = all_logits[..., : ACTION_TOKEN_IDS.start]
    larger_ids = all_logits[..., ACTION_TOKEN_IDS.stop :]
    return logits, torch.logaddexp(smaller_ids.logsumexp(-1), larger_ids.logsumexp(-1))


def regression_loss(
    policy: Student, observations: Sequence[Observation], actions: Tensor
) -> tuple[Tensor, Tensor]:
    """openvla-oft's loss of an L1 head, the mean absolute error of normalised actions (B, 8, D), and the share of
    actions that become the right token; both ()."""
    assert policy.l1_head is not None
    _, hidden = policy.chunk_outputs(observations)
    predicted = policy.l1_head(hidden.float())
    loss = (predicted - actions.to(predicted)).abs().mean()
    predicted_tokens = encode(predicted.detach().cpu().numpy())
    return loss, loss.new_tensor((predicted_tokens == encode(actions.numpy())).mean())


def write_policy(args: SftArgs, demos: Demos, policy: Student, argv: Sequence[str], folder: Path) -> None:
    """Write the trained policy, how it was made and what it sees."""
    if isinstance(policy, Policy):
        policy.save_adapter(folder, looks=" ".join(demos.looks))
    else:
        policy.save(folder, demos.looks)
    first_observation = make_observations(demos.train[:1])[0]
    pictures = list(policy.model_inputs.images_of(first_observation))
    Image.fromarray(np.concatenate(pictures, axis=1)).save(folder / "first_frame.png")
    run = {
        "arguments": json.loads(json.dumps(asdict(args), default=str)),
        "train_episodes": len(demos.train),
        "train_frames": sum(len(images) for _, images in demos.train),
        **provenance(argv),
    }
    write_json(folder / SFT_RUN_FILE, run)
