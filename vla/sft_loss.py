"""The loss of supervised fine-tuning, and what the logits say about held-out frames.

openvla-oft trains by cross-entropy over all 32,064 ids. Here only the 256 rows of action ids are computed: the other
rows of `lm_head` are zero, so each of their ids has the logit 0 and their share of the softmax is known without them.
So the logits keep their absolute level, and programs that take their argmax over the whole vocabulary find an action.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla.tokens import ACTION_TOKEN_IDS, NUM_BINS

ACTION_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
POSITION_DIMS = 3


def zero_other_rows(lm_head: nn.Linear) -> None:
    """Give every id that is no action token the logit 0. Training leaves these rows alone: nothing reads them."""
    with torch.no_grad():
        lm_head.weight[: ACTION_TOKEN_IDS.start] = 0.0
        lm_head.weight[ACTION_TOKEN_IDS.stop :] = 0.0


def target_distributions(soft_target_bins: float, device: torch.device) -> Tensor:
    """What the softmax should be for each action dimension and target column: (7, 256, 256) float32.

    One-hot for the gripper, and for all with soft_target_bins 0; else a Gaussian over the neighbouring bins with this
    standard deviation, so that a near miss costs little. Example: row 0 of distributions[0, 10] is column 10's mass.
    """
    columns = torch.arange(NUM_BINS, device=device)
    hard = torch.eye(NUM_BINS, device=device)
    if soft_target_bins == 0:
        return hard.expand(len(ACTION_NAMES), -1, -1)
    soft = torch.exp(-0.5 * ((columns - columns[:, None]) / soft_target_bins) ** 2)
    soft = soft / soft.sum(-1, keepdim=True)
    return torch.stack([*[soft] * (len(ACTION_NAMES) - 1), hard])


def action_loss(logits: Tensor, targets: Tensor, distributions: Tensor, vocabulary_size: int) -> Tensor:
    """Cross-entropy over the whole vocabulary against the target distributions, mean over tokens.

    logits (B, A, 256) float32; targets (B, A) columns, time-major; distributions as `target_distributions` makes them.
    """
    dims = torch.arange(targets.shape[1], device=targets.device) % len(distributions)
    weights = distributions[dims, targets]  # (B, A, 256), each summing to 1
    others = logits.new_full((), math.log(vocabulary_size - NUM_BINS))  # log of the sum of exp(0) over other ids
    log_total = torch.logaddexp(logits.logsumexp(-1), others)
    return (log_total - (weights * logits).sum(-1)).mean()


@torch.no_grad()
def batch_metrics(logits: Tensor, targets: Tensor) -> Tensor:
    """(token accuracy of the argmax, its mean distance in bins along x, y, z), (2,) on the logits' device."""
    found = logits.argmax(-1)
    distance = (found - targets).abs().float().unflatten(1, (-1, len(ACTION_NAMES)))
    return torch.stack([(found == targets).float().mean(), distance[..., :POSITION_DIMS].mean()])


@dataclass(frozen=True)
class Diagnosis:
    """How well and how sharply a policy predicts held-out frames. Lists have one entry per action dimension."""

    nll: float  # of the target token among the 256, nats
    accuracy: list[float]  # of the argmax
    argmax_error: list[float]  # mean distance in bins
    expected_error: list[float]  # of the mean of the distribution
    entropy: list[float]  # of the distribution at temperature 1, nats; 256 equal bins have 5.55

    def mean_accuracy(self) -> float:
        return sum(self.accuracy) / len(self.accuracy)

    def position_error(self) -> float:
        """Of the argmax along x, y, z, in bins."""
        return sum(self.argmax_error[:POSITION_DIMS]) / POSITION_DIMS

    def table(self) -> str:
        """Readable rows, one per action dimension."""
        rows = [f"{'':8}  accuracy  argmax error  error of the mean  entropy"]
        rows += [
            f"{name:8}  {100 * accuracy:6.1f} %  {argmax:7.2f} bins  {expected:12.2f} bins  {entropy:7.2f}"
            for name, accuracy, argmax, expected, entropy in zip(
                ACTION_NAMES, self.accuracy, self.argmax_error, self.expected_error, self.entropy, strict=True
            )
        ]
        return "\n".join(rows)


@torch.no_grad()
def diagnose(batches: Iterable[tuple[Tensor, Tensor]]) -> Diagnosis:
    """From (logits (B, A, 256), targets (B, A)) of all held-out frames."""
    sums, count = torch.zeros(()), 0
    for logits, targets in batches:
        columns = torch.arange(NUM_BINS, device=logits.device, dtype=torch.float32)
        log_probabilities = logits.log_softmax(-1)
        probabilities = log_probabilities.exp()
        found = logits.argmax(-1)
        values = torch.stack(
            [
                F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets),
                (found == targets).float(),
                (found - targets).abs().float(),
                (probabilities @ columns - targets).abs(),
                -(probabilities * log_probabilities).sum(-1),
            ]
        )
        sums = sums + values.unflatten(-1, (-1, len(ACTION_NAMES))).sum((1, 2))  # over frames and time
        count += targets.numel() // len(ACTION_NAMES)
    nll, *rows = (sums / count).tolist()
    return Diagnosis(sum(nll) / len(nll), *rows)
