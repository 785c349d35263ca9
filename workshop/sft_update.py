"""The parts of a supervised step: what is learned, frames as training sees them, and the step itself.

A policy learns the tokens of the demonstrated chunks, or with --l1 their continuous actions. The loss of tokens is over
all ids, as openvla-oft's: the token head of a checkpoint that was trained by L1 regression gives words the highest
logits, while RL, like an argmax over all ids, needs action tokens there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from contracts import BadInput, Observation
from rl.optimizer import Statistics, accumulate_gradient, optimizer_step
from vla.dataset_statistics import DatasetStatistics
from vla.policy import Policy
from vla.tokens import FIRST_ACTION_TOKEN, encode
from workshop.augment import augment
from workshop.sft_data import Episodes, chunk_actions, chunk_tokens
from workshop.whole_network import WholeNetwork

WEIGHT_DECAY = 0.02
MAX_GRAD_NORM = 1.0
NETWORK_BETAS = (0.9, 0.98)  # of AdamW, for all parameters of a small network
PROPRIO_NOISE = 0.02  # on the robot's state, as a share of its standard deviation

Student = Policy | WholeNetwork


@dataclass(frozen=True)
class Objective:
    """What a policy learns of the demonstrations: how targets, losses, outputs and measurements are computed."""

    make_targets: Callable[[Episodes, DatasetStatistics], Tensor]
    # (policy, observations, targets) -> mean loss and accuracy, ()
    loss: Callable[[Student, Sequence[Observation], Tensor], tuple[Tensor, Tensor]]
    outputs: Callable[[Student, Sequence[Observation]], Tensor]  # on the CPU, without gradient
    measure: Callable[[Tensor, Tensor], dict[str, float]]  # (outputs, targets) of held-out frames -> metrics


def make_student_optimizer(policy: Student) -> torch.optim.Optimizer:
    """AdamW over all that the policy trains. Its learning rate is set step by step."""
    optimizer = policy.make_optimizer(lr=0.0, weight_decay=WEIGHT_DECAY)
    if isinstance(policy, WholeNetwork):
        optimizer.param_groups[0]["betas"] = NETWORK_BETAS
    return optimizer


def proprio_noise_scale(observations: Sequence[Observation]) -> np.ndarray:
    """The standard deviation of the noise on each number of the robot's state, (D,)."""
    return PROPRIO_NOISE * np.std([observation.proprio for observation in observations], axis=0)


def augment_observations(
    observations: Sequence[Observation],
    noise_scale: np.ndarray,
    augment_images: bool,
    generator: torch.Generator,
) -> list[Observation]:
    """The observations with noise on their robot states and, if `augment_images`, random crops and colours.

    All draws come from `generator`, on whose device the images are augmented.
    """
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
    objective: Objective,
    policy: Student,
    optimizer: torch.optim.Optimizer,
    observations: Sequence[Observation],
    targets: Tensor,
    lr: float,
    micro_batch_size: int,
) -> tuple[int, dict[str, float]]:
    """Take an optimizer step on the mean loss of the frames.

    The gradient is summed over micro-batches, which become smaller if memory runs out. Returns the size that fits, for
    the next step, and loss, accuracy and the gradient's norm. Raises BadInput for a training that has diverged, and
    when nothing fits into memory.
    """
    optimizer.param_groups[0]["lr"] = lr

    def loss_of_rows(rows: slice) -> tuple[Tensor, Statistics]:
        loss, accuracy = objective.loss(policy, observations[rows], targets[rows])
        share = len(observations[rows]) / len(observations)
        return share * loss, {"loss": share * loss.detach(), "accuracy": share * accuracy}

    size_that_fits, statistics = accumulate_gradient(
        policy, optimizer, len(observations), loss_of_rows, micro_batch_size
    )
    gradient_norm = optimizer_step(optimizer, MAX_GRAD_NORM)
    optimizer.zero_grad(set_to_none=True)
    if gradient_norm.isnan():
        raise BadInput(
            "the training has diverged: a gradient is not finite, or enormous; begin again with a lower --lr"
        )
    metrics = {name: sum(part[name].item() for part in statistics) for name in ("loss", "accuracy")}
    return size_that_fits, metrics | {"grad_norm": gradient_norm.item()}


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
    predicted = predict_actions(policy, observations)
    loss = (predicted - actions.to(predicted)).abs().mean()
    accuracy = share_of_equal_tokens(predicted.detach().cpu(), actions)
    return loss, loss.new_tensor(accuracy)


def predict_actions(policy: Student, observations: Sequence[Observation]) -> Tensor:
    """The L1 head's normalised actions, (B, 8, D) float32, with gradient to all that learns."""
    assert policy.action_head is not None
    _, hidden = policy.chunk_outputs(observations)
    return policy.action_head(hidden.float())


def share_of_equal_tokens(predicted: Tensor, actions: Tensor) -> float:
    """The share of normalised actions, both (..., D) on the CPU, that become the same action token."""
    return float((encode(predicted.numpy()) == encode(actions.numpy())).mean())


@torch.no_grad()
def in_batches(
    compute: Callable[[Sequence[Observation]], Tensor], observations: Sequence[Observation]
) -> Tensor:
    """What `compute` returns for the observations, (N, ...) on the CPU; it gets 8 of them at a time."""
    starts = range(0, len(observations), 8)
    return torch.cat([compute(observations[start : start + 8]).cpu() for start in starts])


def logits_of(policy: Student, observations: Sequence[Observation]) -> Tensor:
    """The action tokens' logits, (N, A, 256) float32 on the CPU, without gradient."""
    return in_batches(policy.chunk_logits, observations)


def actions_of(policy: Student, observations: Sequence[Observation]) -> Tensor:
    """The L1 head's normalised actions, (N, 8, D) float32 on the CPU, without gradient."""
    return in_batches(partial(predict_actions, policy), observations)


def measure_tokens(logits: Tensor, tokens: Tensor) -> dict[str, float]:
    """How well held-out frames are predicted: nats per action token, and the share of tokens that are right."""
    targets = tokens - FIRST_ACTION_TOKEN
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    accuracy = (logits.argmax(-1) == targets).float().mean()
    return {"held_out/nll": nll.item(), "held_out/accuracy": accuracy.item()}


def measure_actions(predicted: Tensor, actions: Tensor) -> dict[str, float]:
    """How well held-out frames are predicted: mean absolute error, and the share of tokens that are right."""
    error = (predicted - actions).abs().mean()
    return {"held_out/l1": error.item(), "held_out/accuracy": share_of_equal_tokens(predicted, actions)}


LEARN_TOKENS = Objective(chunk_tokens, token_loss, logits_of, measure_tokens)
LEARN_ACTIONS = Objective(chunk_actions, regression_loss, actions_of, measure_actions)
