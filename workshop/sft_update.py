"""The parts of supervised training: frames as it sees them, the losses, and the optimizer step.

A policy learns the tokens of the demonstrated chunks, or with --l1 their continuous actions. The loss of tokens is over
all ids, as openvla-oft's: the token head of a checkpoint that was trained by L1 regression gives words the highest
logits, while RL, like an argmax over all ids, needs action tokens there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from contracts import BadInput, Observation
from rl.optimizer import Statistics, accumulate_gradient, optimizer_step
from vla.policy import Policy
from vla.tokens import FIRST_ACTION_TOKEN, encode
from workshop.augment import augment
from workshop.whole_network import WholeNetwork

MAX_GRAD_NORM = 1.0
MEASURED_AT_ONCE = 8  # frames

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


def augment_observations(
    observations: Sequence[Observation],
    noise_scale: np.ndarray,
    augment_images: bool,
    generator: torch.Generator,
) -> list[Observation]:
    """The observations with noise on their robot states and, if `augment_images`, random crops and colours."""
    device = generator.device
    images = np.stack([observation.images for observation in observations])
    if augment_images:
        planes = torch.from_numpy(images).to(device).movedim(-1, 2)  # (B, n, 3, S, S)
        augmented = augment(planes.flatten(0, 1), generator).view(planes.shape)
        images = augmented.movedim(2, -1).cpu().numpy()
    noise = torch.randn(len(observations), len(noise_scale), device=device, generator=generator)
    states = np.stack([observation.proprio for observation in observations])
    states = states + noise_scale * noise.cpu().numpy()
    return [
        replace(observation, images=pictures, proprio=state)
        for observation, pictures, state in zip(observations, images, states, strict=True)
    ]


def training_step(
    loss: Loss, policy: Student, optimizer: torch.optim.Optimizer, frames: Frames, micro_batch_size: int
) -> tuple[int, dict[str, float]]:
    """Take an optimizer step on the mean loss of the frames.

    The gradient is summed over micro-batches, which become smaller if memory runs out. Returns the size that fits, for
    the next step, and loss, accuracy and the gradient's norm. Raises BadInput for a training that has diverged, and
    when nothing fits into memory.
    """

    def loss_of_rows(rows: slice) -> tuple[Tensor, Statistics]:
        part = frames[rows]
        share = len(part) / len(frames)
        mean_loss, accuracy = loss(policy, part.observations, part.targets)
        return share * mean_loss, {"loss": share * mean_loss.detach(), "accuracy": share * accuracy}

    size_that_fits, statistics = accumulate_gradient(
        policy, optimizer, len(frames), loss_of_rows, micro_batch_size
    )
    norm = optimizer_step(optimizer, MAX_GRAD_NORM).item()
    optimizer.zero_grad(set_to_none=True)
    if math.isnan(norm):
        raise BadInput(
            "the training has diverged: a gradient is not finite, or enormous; begin again with a lower --lr"
        )
    metrics = {name: sum(part[name].item() for part in statistics) for name in ("loss", "accuracy")}
    return size_that_fits, metrics | {"grad_norm": norm}


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
    logits, other_logsumexp = policy.logits_and_other_logsumexp(observations)
    targets = tokens.to(logits.device) - FIRST_ACTION_TOKEN
    choice_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    # Add -log of the probability that lies on action tokens, log(1 + exp(others - actions)).
    mass_loss = F.softplus(other_logsumexp - logits.logsumexp(-1)).mean()
    return choice_loss + mass_loss, (logits.argmax(-1) == targets).float().mean()


def regression_loss(
    policy: Student, observations: Sequence[Observation], actions: Tensor
) -> tuple[Tensor, Tensor]:
    """openvla-oft's loss of an L1 head, the mean absolute error of normalised actions (B, 8, D), and the share of
    actions that become the right token; both ()."""
    assert policy.action_head is not None
    _, hidden = policy.chunk_outputs(observations)
    predicted = policy.action_head(hidden.float())
    loss = (predicted - actions.to(predicted)).abs().mean()
    predicted_tokens = encode(predicted.detach().cpu().numpy())
    return loss, loss.new_tensor((predicted_tokens == encode(actions.numpy())).mean())
