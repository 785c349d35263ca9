"""The parts of a supervised step: frames as training sees them, and as a batch for RL's own update.

A demonstration is a rollout that somebody else has played. The loss is over all ids, as openvla-oft's
(`Phase.SUPERVISED`): the token head of a checkpoint that was trained by L1 regression gives words the highest logits,
while RL, like an argmax over all ids, needs action tokens there.

With --l1 there are no tokens to learn, so RL's update does not apply: `regression_step` takes its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from configs.config import TrainConfig, changed
from contracts import Observation
from rl.optimizer import optimizer_step
from rl.phases import Phase, PhaseState
from rl.trajectory import Batch, Decision, Episode, Trajectory, flatten
from rl.update import Learner, check_steps_taken, make_learner
from vla.memory import fit_to_memory
from vla.policy import Policy
from vla.tokens import FIRST_ACTION_TOKEN, encode
from workshop.augment import augment
from workshop.sft_config import SftArgs
from workshop.whole_network import WholeNetwork

SUPERVISED = PhaseState(Phase.SUPERVISED, epsilon=1.0, warmup_progress=0.0, transition_progress=0.0)
WEIGHT_DECAY = 0.02
NETWORK_BETAS = (0.9, 0.98)  # of AdamW, for all parameters of a small network
PROPRIO_NOISE = 0.02  # on the robot's state, as a share of its standard deviation


def update_config(policy: Policy | WholeNetwork, args: SftArgs) -> TrainConfig:
    """The settings of RL's update for one supervised step. Its learning rate is set step by step."""
    micro_batch_size = args.batch_size
    if isinstance(policy, Policy):
        micro_batch_size = fit_to_memory(policy, "auto", "auto", args.batch_size)
    return changed(
        TrainConfig(),
        seed=args.seed,
        n_epochs=1,
        batch_size=args.batch_size,
        micro_batch_size=micro_batch_size,
        weight_decay=WEIGHT_DECAY,
    )


def supervised_learner(policy: Policy | WholeNetwork, config: TrainConfig) -> Learner:
    """The policy with its optimizer, as RL's update takes them."""
    # A WholeNetwork has all members of a Policy that the update uses.
    learner = make_learner(cast("Policy", policy), config)
    if isinstance(policy, WholeNetwork):
        learner.optimizer.param_groups[0]["betas"] = NETWORK_BETAS
    return learner


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


def demonstration_batch(
    policy: Policy | WholeNetwork, observations: Sequence[Observation], tokens: Tensor
) -> Batch:
    """Frames and the demonstrated tokens, (B, A) int64, as a batch of RL: one trajectory, played by the teacher."""
    decisions = [
        Decision(observation, frame_tokens, by_teacher=True, executed=policy.chunk_length)
        for observation, frame_tokens in zip(observations, tokens, strict=True)
    ]
    episode = Episode(index=0, task_id=0, init_state_id=None, group=0)
    return flatten([Trajectory(episode, decisions)], policy.action_dim)


def regression_step(
    learner: Learner, observations: Sequence[Observation], actions: Tensor, config: TrainConfig, step: int
) -> dict[str, float]:
    """Take an optimizer step of L1 regression; returns those metrics of `update` that workshop.sft records.

    The loss is openvla-oft's, the mean absolute error of the L1 head's normalised actions. actions: (B, 8, D), the
    demonstrated ones. Raises BadInput for a diverged training.
    """
    optimizer = learner.optimizer
    optimizer.param_groups[0]["lr"] = config.update.lr
    predicted = predict_actions(learner.policy, observations)
    loss = (predicted - actions.to(predicted)).abs().mean()
    loss.backward()
    gradient_norm = optimizer_step(optimizer, config.update.max_grad_norm).item()
    optimizer.zero_grad(set_to_none=True)
    check_steps_taken([gradient_norm], step)
    return {
        "distill/loss": loss.item(),
        "distill/accuracy": share_of_equal_tokens(predicted.detach().cpu(), actions),
        "train/grad_norm": gradient_norm,
    }


def predict_actions(policy: Policy | WholeNetwork, observations: Sequence[Observation]) -> Tensor:
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


def logits_of(policy: Policy | WholeNetwork, observations: Sequence[Observation]) -> Tensor:
    """The action tokens' logits, (N, A, 256) float32 on the CPU, without gradient."""
    return in_batches(policy.chunk_logits, observations)


def actions_of(policy: Policy | WholeNetwork, observations: Sequence[Observation]) -> Tensor:
    """The L1 head's normalised actions, (N, 8, D) float32 on the CPU, without gradient."""
    return in_batches(partial(predict_actions, policy), observations)


def held_out_metrics(
    policy: Policy | WholeNetwork, observations: Sequence[Observation], tokens: Tensor
) -> dict[str, float]:
    """How well a policy predicts held-out frames: nats per action token, and the share of tokens that are right."""
    logits = logits_of(policy, observations)
    targets = tokens - FIRST_ACTION_TOKEN
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    accuracy = (logits.argmax(-1) == targets).float().mean()
    return {"held_out/nll": nll.item(), "held_out/accuracy": accuracy.item()}


def held_out_regression_metrics(
    policy: Policy | WholeNetwork, observations: Sequence[Observation], actions: Tensor
) -> dict[str, float]:
    """How well an L1 head predicts held-out frames: mean absolute error, and the share of tokens that are right."""
    predicted = actions_of(policy, observations)
    error = (predicted - actions).abs().mean()
    return {"held_out/l1": error.item(), "held_out/accuracy": share_of_equal_tokens(predicted, actions)}
