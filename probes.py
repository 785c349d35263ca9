"""Checks of a policy, before a run, for faults that raise no error by themselves but make the results wrong.

A check returns a sentence about what it measured, or raises: BadInput for what the user can repair, SelfCheckError
where the program contradicts itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from contracts import BadInput, Observation, SelfCheckError, first_line
from vla.model import OpenVLAOFT
from vla.policy import Policy
from vla.preprocessing import MADE_UP_INSTRUCTION, synthetic_observations
from vla.tokens import FIRST_ACTION_TOKEN, token_logprobs

# Effect of an input on the logits, relative to the largest one; exactly 0 if the input is not read.
SMALLEST_EFFECT = 1e-5
# Observations that a check decides on at once. The code of a large network is compiled for one observation alone, and
# for all other batch sizes together: those of rollouts and updates.
CHECKED_BATCH = 2
# Limits of |log-prob when sampling - log-prob when learning| of a token. On a GPU the two use different kernels, which
# round differently.
LOGPROB_LIMIT = {"float32": 1e-4, "bf16": 0.25, "int8": 0.5}
# The gain, in nats, that the gradient predicts for a trial step: small, but larger than bfloat16's noise.
PROMISED_GAIN = 0.2
ADAM_EPS = 1e-8  # torch's default
# Limits of measured gain / predicted gain. Measured were 0.90 to 1.06 with networks of width 32 and more, and 0.4 or
# less where rounding swallowed what the adapters add.
GAIN_LIMITS = (0.6, 1.6)
REINSTALL = "a library of this installation is broken; run: pip install -r requirements.txt"


def made_up_observation(policy: Policy, instruction: str = MADE_UP_INSTRUCTION) -> Observation:
    """An observation that fits the policy; always the same, and not from a simulator."""
    return synthetic_observations(policy.num_images, policy.statistics.proprio, 1, instruction)[0]


@torch.no_grad()
def attention_probe(policy: Policy, observation: Observation) -> str:
    """Check that attention is bidirectional: changing the last action slot's input moves the first slot's logits.

    With causal attention the success rate is 50 to 60 % instead of 98. Raises BadInput.
    """
    network = policy.network
    inputs = policy.model_inputs([observation] * CHECKED_BATCH)
    embeddings, lengths = network.embed(*inputs)
    first = network.output_positions(embeddings, lengths)[0, 0]
    changed = embeddings.clone()
    beginning_of_sequence = embeddings[:, 0]  # any vector that is not zero would do
    changed[:, int(first) + network.num_action_tokens] = beginning_of_sequence
    before, after = (_first_slot_logits(network, slots, lengths) for slots in (embeddings, changed))
    effect = _relative_effect(before, after)
    if effect < SMALLEST_EFFECT:
        raise BadInput(f"attention is causal: no action slot sees the slots after it; {REINSTALL}")
    return f"attention is bidirectional: the last slot moves the first slot's logits by {effect:.1e} of their size"


def _first_slot_logits(network: OpenVLAOFT, embeddings: Tensor, lengths: Tensor | None) -> Tensor:
    """The logits (B, 256) of the first action token, from the language model's input."""
    positions = network.output_positions(embeddings, lengths)
    hidden = network.run_layers(embeddings, lengths, positions)
    return network.action_logits(network.language_model.model.norm(hidden))[:, 0]


@torch.no_grad()
def image_probe(policy: Policy, observation: Observation) -> str:
    """Check that images reach the logits: black and white ones give different logits. Raises BadInput.

    With a broken library version the images once were not read at all. Whether decisions depend on them is another
    question.
    """
    black = replace(observation, images=np.zeros_like(observation.images))
    white = replace(observation, images=np.full_like(observation.images, 255))
    effect = _relative_effect(*(policy.chunk_logits([image] * CHECKED_BATCH) for image in (black, white)))
    if effect < SMALLEST_EFFECT:
        raise BadInput(f"the policy ignores its images; {REINSTALL}, or download the checkpoint again")
    return f"images reach the logits: black and white ones differ by {effect:.1e} of the logits' size"


def _relative_effect(before: Tensor, after: Tensor) -> float:
    """The largest change of a logit, relative to the largest logit. Raises BadInput for logits that are not finite."""
    if not (before.isfinite().all() and after.isfinite().all()):
        raise BadInput(
            "the policy's logits are not finite although its weights are: a number in its config.json or "
            "preprocessor_config.json is wrong, weights are too large, or its training diverged; use another one"
        )
    return ((after - before).abs().max() / before.abs().max().clamp_min(1e-30)).item()


def check_logits_path(policy: Policy, observation: Observation, temperature: float) -> str:
    """Check that an update computes the same log-probs for sampled tokens as sampling did. Raises SelfCheckError."""
    observations = [observation] * CHECKED_BATCH
    generators = [torch.Generator().manual_seed(seed) for seed in range(CHECKED_BATCH)]
    acted = policy.act(observations, "sample", temperature, generators)
    logits = policy.chunk_logits(observations, acted.kept)  # with gradient, as in an update
    recomputed = token_logprobs(logits, acted.tokens, temperature).detach().cpu()
    difference = (recomputed - acted.logprobs).abs().max().item()
    limit = LOGPROB_LIMIT[policy.frozen_weights]
    if not difference <= limit:  # also for NaN
        raise SelfCheckError(
            f"sampling and learning disagree about the policy: log-probs of the same tokens differ by {difference:.3g} "
            f"(limit {limit}); see whether --compile off or --frozen-weights float32 changes it"
        )
    return f"sampled and recomputed log-probs differ by at most {difference:.1e}"


def check_learning(policy: Policy, observation: Observation, micro_batch_size: int) -> str:
    """Check with a trial step on one micro-batch that an update fits into memory and changes the policy as predicted.

    An update needs more memory than anything else in a run. A step may have no effect if a layer or a recorded CUDA
    graph keeps an old copy of the parameters, or if rounding swallows the change. Raises BadInput when memory runs out,
    SelfCheckError when the step's gain is far from the predicted one.
    """
    num_observations = micro_batch_size if policy.device.type == "cuda" else 1
    try:
        gain = _gain_of_trial_step(policy, [observation] * num_observations)
    except torch.OutOfMemoryError as error:
        raise BadInput(
            f"out of GPU memory in one update of {micro_batch_size} decisions ({first_line(error)}); lower "
            "--micro-batch-size, or in a new run --lora-rank"
        ) from None
    finding = f"an optimizer step with a predicted gain of {PROMISED_GAIN} nats brings {gain:.4f}"
    lowest, highest = GAIN_LIMITS
    if not lowest * PROMISED_GAIN <= gain <= highest * PROMISED_GAIN:
        raise SelfCheckError(
            f"{finding}: the policy does not follow its parameters, training would have no effect; try --compile off "
            "or --frozen-weights float32"
        )
    return finding


def _gain_of_trial_step(policy: Policy, observations: Sequence[Observation]) -> float:
    """How much a trial step with the predicted gain PROMISED_GAIN raises a log-prob, in nats. The step is undone.

    The log-prob is that of the least likely tokens, whose gradient never vanishes. AdamW's first step moves a parameter
    by lr * g / (|g| + eps), so the predicted gain is lr * sum(g^2 / (|g| + eps)). The result is half the difference
    between this step and the opposite one, in which the loss's curvature cancels out.
    """
    parameters = [parameter for _, parameter in policy.named_trainable_parameters()]
    logits = policy.chunk_logits(observations)
    tokens = logits.argmin(-1).cpu() + FIRST_ACTION_TOKEN
    token_logprobs(logits, tokens, 1.0).mean().neg().backward()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    slope = sum((gradient.square() / (gradient.abs() + ADAM_EPS)).sum().item() for gradient in gradients)
    lr = PROMISED_GAIN / slope if slope > 0 else 0.0
    values_before = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
    logprobs: list[float] = []  # after a step along the gradient, and after one against it
    for _ in range(2):
        # The optimizer with its moments is gone before the forward pass needs memory.
        policy.make_optimizer(lr, weight_decay=0.0).step()
        logits = policy.chunk_logits(observations)
        logprobs.append(token_logprobs(logits, tokens, 1.0).mean().item())
        with torch.no_grad():
            for parameter, value in zip(parameters, values_before, strict=True):
                parameter.copy_(value)
        for gradient in gradients:
            gradient.neg_()
    for parameter in parameters:
        parameter.grad = None
    ahead, back = logprobs
    return (ahead - back) / 2
