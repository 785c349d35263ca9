"""Questions to a policy whose wrong answers no error message would ever tell.

Most are asked before the run; `check_first_ratio` is asked in every update. Each answers in one sentence or raises:
SelfCheckError where the program computes something else than it claims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from contracts import BadInput, Observation, SelfCheckError, first_line
from rl.optimizer import ADAM_EPS, make_optimizer
from rl.randomness import torch_generator
from vla.policy import Policy
from vla.preprocessing import synthetic_observations
from vla.tokens import FIRST_ACTION_TOKEN

SMALLEST_EFFECT = 1e-5  # relative to the largest logit; without any connection the effect is exactly 0
SMALLEST_ACTION_MASS = 0.5  # a head trained on action tokens puts nearly all of its probability on them
# Limits of |log-prob when sampling - log-prob when learning| of a token: on a GPU their kernels round differently.
LOGPROB_LIMIT = {"float32": 1e-4, "bf16": 0.25, "int8": 0.5, "fp8": 1.0}
FIRST_RATIO_LIMIT = 0.05  # of the mean |ratio - 1| before any optimizer step
# The gain in nats that the gradient promises for a trial step: small, and larger than bfloat16's noise.
PROMISED_GAIN = 0.2
# Limits of gain / promise. Seen were 0.90 to 1.06 with networks from 32 wide, and 0.4 or less where rounding had
# swallowed what the adapters add.
GAIN_LIMITS = (0.6, 1.6)
REINSTALL = "a library of this installation is broken; run: pip install -r requirements.txt"


def made_up_observation(policy: Policy) -> Observation:
    return synthetic_observations(policy.num_images, policy.statistics.proprio, count=1)[0]


@torch.no_grad()
def attention_probe(policy: Policy) -> str:
    """A change of the last action slot's input moves the first slot's logits: attention is bidirectional.

    With causal attention success is 50 to 60 % instead of 98.
    """
    network = policy.network
    inputs = policy.model_inputs([made_up_observation(policy)])
    embeddings, is_real = network.embed(*inputs)
    first = network.first_output_position(embeddings, *inputs[1:3])
    changed = embeddings.clone()
    beginning_of_sequence = embeddings[:, 0]  # any vector that is not zero would do
    changed[:, int(first) + network.num_action_tokens] = beginning_of_sequence
    before = network.action_logits(network.decode(embeddings, is_real, first))
    after = network.action_logits(network.decode(changed, is_real, first))
    effect = _relative_effect(before[:, 0], after[:, 0])
    if not effect >= SMALLEST_EFFECT:  # also for NaN
        raise BadInput(f"attention is causal: no action slot sees the slots after it; {REINSTALL}")
    return f"attention is bidirectional: the last slot moves the first slot's logits by {effect:.1e} of their size"


@torch.no_grad()
def image_probe(policy: Policy) -> str:
    """Black and white images give different logits: it has happened that a library dropped the images."""
    observation = made_up_observation(policy)
    black = replace(observation, images=np.zeros_like(observation.images))
    white = replace(observation, images=np.full_like(observation.images, 255))
    effect = _relative_effect(policy.chunk_logits([black]), policy.chunk_logits([white]))
    if not effect >= SMALLEST_EFFECT:  # also for NaN
        raise BadInput(f"the policy ignores its images; {REINSTALL}, or download the checkpoint again")
    return f"the policy sees its images: black and white ones differ by {effect:.1e} of the logits' size"


def _relative_effect(before: Tensor, after: Tensor) -> float:
    return ((after - before).abs().max() / before.abs().max().clamp_min(1e-30)).item()


@torch.no_grad()
def token_probe(policy: Policy, observation: Observation, must_be_trained: bool) -> str:
    """The action tokens' share of the vocabulary's probability; small in heads of checkpoints trained by regression."""
    logits, other_logsumexp = policy.logits_and_other_logsumexp([observation])
    mass = (logits.logsumexp(-1) - other_logsumexp).sigmoid().mean().item()
    finding = f"{100 * mass:.1f} % of the token head's probability lies on action tokens"
    if must_be_trained and not mass >= SMALLEST_ACTION_MASS:
        raise BadInput(
            f"{finding}: it was not trained on them, and a token policy cannot start from it; use a checkpoint that "
            "was (README, Train), one with an action head (--teacher l1), or go on with --allow-zero-baseline"
        )
    return finding


def check_logits_path(policy: Policy, observation: Observation, temperature: float) -> str:
    """Sampling and learning agree about the policy: the sampled tokens' log-probs are those that the update sees."""
    acted = policy.act([observation], "sample", temperature, [torch_generator(0, "self-check")])
    logits = policy.chunk_logits([observation])  # with gradient, as the update's pass
    recomputed = policy.token_logprobs(logits, acted.tokens, temperature).detach().cpu()
    difference = (recomputed - acted.logprobs).abs().max().item()
    limit = LOGPROB_LIMIT[policy.frozen_weights]
    if not difference <= limit:  # also for NaN
        raise SelfCheckError(
            f"sampling and learning disagree about the policy: log-probs of the same tokens differ by {difference:.3g} "
            f"(limit {limit}); see whether --compile off or --frozen-weights float32 changes it"
        )
    return f"sampled and recomputed log-probs differ by at most {difference:.1e}"


def check_first_ratio(statistics: Mapping[str, float]) -> float:
    """The mean |ratio - 1| of an update's first minibatch: before any step the update sees the policy that acted."""
    error = statistics["ratio_error"] / statistics["decisions"]
    if not error <= FIRST_RATIO_LIMIT:  # also for NaN
        raise SelfCheckError(
            f"first minibatch: mean |ratio - 1| = {error:.4f} before any optimizer step (limit {FIRST_RATIO_LIMIT}): "
            "the update does not see the policy that acted (its weights, temperature, preprocessing and precision)"
        )
    return error


def check_learning(policy: Policy, observation: Observation, micro_batch_size: int) -> str:
    """Learn a micro-batch, the largest thing that happens: it fits into memory and leads where the gradient says.

    It may not: layers and recorded CUDA graphs keep copies of the parameters, and rounding may swallow what a step
    changes.
    """
    num_observations = micro_batch_size if policy.device.type == "cuda" else 1
    try:
        gain = _gain_of_trial_step(policy, [observation] * num_observations)
    except torch.OutOfMemoryError as error:
        raise BadInput(
            f"out of GPU memory in one update of {micro_batch_size} decisions ({first_line(error)}); lower "
            "--micro-batch-size, keep --gradient-checkpointing on, or lower --lora-rank"
        ) from None
    finding = f"an optimizer step that promises {PROMISED_GAIN} nats brings {gain:.4f}"
    lowest, highest = GAIN_LIMITS
    if not lowest * PROMISED_GAIN <= gain <= highest * PROMISED_GAIN:
        raise SelfCheckError(
            f"{finding}: the policy does not follow its parameters, training would lead nowhere; try --compile off or "
            "--frozen-weights float32"
        )
    return finding


def _gain_of_trial_step(policy: Policy, observations: Sequence[Observation]) -> float:
    """By how much an optimizer step that promises PROMISED_GAIN raises a log-prob, in nats. The policy stays as it is.

    The log-prob is that of the least likely tokens, whose gradient never vanishes. AdamW's first step moves by
    lr * g / (|g| + eps), so it promises lr * sum(g^2 / (|g| + eps)). Half the difference between the step and its
    opposite is free of the loss's curvature.
    """
    parameters = [parameter for _, parameter in policy.named_trainable_parameters()]
    logits = policy.chunk_logits(observations)
    tokens = logits.argmin(-1).cpu() + FIRST_ACTION_TOKEN
    policy.token_logprobs(logits, tokens, 1.0).mean().neg().backward()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    slope = sum((gradient.square() / (gradient.abs() + ADAM_EPS)).sum().item() for gradient in gradients)
    lr = PROMISED_GAIN / slope if slope > 0 else 0.0
    ahead = _logprob_after_step(policy, observations, tokens, parameters, lr)
    for gradient in gradients:
        gradient.neg_()
    back = _logprob_after_step(policy, observations, tokens, parameters, lr)
    for parameter in parameters:
        parameter.grad = None
    return (ahead - back) / 2


def _logprob_after_step(
    policy: Policy,
    observations: Sequence[Observation],
    tokens: Tensor,
    parameters: Sequence[nn.Parameter],
    lr: float,
) -> float:
    """The tokens' mean log-prob after an optimizer step, which is taken back."""
    values_before = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
    optimizer = make_optimizer(parameters, lr, weight_decay=0.0)
    policy.watch(optimizer)
    optimizer.step()
    del optimizer  # its moments need not fit into memory beside the pass
    logprob = policy.token_logprobs(policy.chunk_logits(observations), tokens, 1.0).mean().item()
    with torch.no_grad():
        for parameter, value in zip(parameters, values_before, strict=True):
            parameter.copy_(value)
    return logprob
