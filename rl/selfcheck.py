"""Questions to a loaded policy whose wrong answers no error message would ever give.

Each returns its finding in one sentence or raises: SelfCheckError where the program computes other than it claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from configs.config import require
from contracts import BadInput, Observation, SelfCheckError, first_line
from rl.rollout import torch_generator
from rl.update import ADAM_EPS, make_optimizer
from vla.policy import Policy
from vla.preprocessing import synthetic_observations
from vla.tokens import FIRST_ACTION_TOKEN

SMALLEST_EFFECT = 1e-5  # relative to the largest logit; without any connection the effect is exactly 0
SMALLEST_ACTION_MASS = 0.5  # a head trained on action tokens puts nearly all of its probability on them
# Of |log-prob when sampling - log-prob when learning| of a token: on a GPU their kernels round differently.
LOGPROB_LIMIT = {"float32": 1e-4, "bf16": 0.25, "int8": 0.5, "fp8": 1.0}
PROMISED_GAIN = (
    0.2  # of an optimizer step that is taken as a test, in nats: small, and more than bfloat16's noise
)
# Of the promise. Seen: 0.90 to 1.06 with networks from 32 wide, and 0.4 or less where rounding swallowed adapters.
GAIN_LIMITS = (0.6, 1.6)
REINSTALL = "a library of this installation is broken; run: pip install -r requirements.txt"


def made_up_observation(policy: Policy) -> Observation:
    return synthetic_observations(policy.num_images, policy.statistics.proprio, count=1)[0]


@torch.no_grad()
def attention_probe(policy: Policy) -> str:
    """A changed last placeholder moves the first slot's logits. (Causal attention: 50-60 % success instead of 98.)"""
    network = policy.network
    inputs = policy.model_inputs([made_up_observation(policy)])
    embeddings, is_real = network.embed(*inputs)
    first = network.first_output_position(embeddings, *inputs[1:3])
    changed = embeddings.clone()
    changed[:, int(first) + network.num_action_tokens] = embeddings[:, 0]  # any vector that is not zero: BOS
    before, after = (network.action_logits(network.decode(x, is_real, first)) for x in (embeddings, changed))
    effect = _relative_effect(before[:, 0], after[:, 0])
    require(
        effect >= SMALLEST_EFFECT, f"attention is causal: no action slot sees the slots after it; {REINSTALL}"
    )
    return f"attention is bidirectional: the last slot moves the first slot's logits by {effect:.1e} of their size"


@torch.no_grad()
def image_probe(policy: Policy) -> str:
    """Black and white images have to give different logits: it has happened that a library dropped them."""
    seen = made_up_observation(policy)
    black, white = (replace(seen, images=np.full_like(seen.images, value)) for value in (0, 255))
    before, after = (policy.chunk_logits([observation]) for observation in (black, white))
    effect = _relative_effect(before, after)
    require(
        effect >= SMALLEST_EFFECT,
        f"the policy ignores its images; {REINSTALL}, or download the checkpoint again",
    )
    return f"the policy sees its images: black and white ones differ by {effect:.1e} of the logits' size"


@torch.no_grad()
def token_probe(policy: Policy, observation: Observation, must_be_trained: bool) -> str:
    """The action tokens' share of the vocabulary's probability; small in heads of checkpoints trained by regression."""
    logits, others = policy.logits_and_other_logsumexp([observation])
    mass = (logits.logsumexp(-1) - others).sigmoid().mean().item()
    finding = f"{100 * mass:.1f} % of the token head's probability lies on action tokens"
    require(
        mass >= SMALLEST_ACTION_MASS or not must_be_trained,
        f"{finding}: it was not trained on them, and a token policy cannot start from it; use a checkpoint that was "
        "(README, Train), one with an action head (--teacher l1), or go on with --allow-zero-baseline",
    )
    return finding


def check_logits_path(policy: Policy, observation: Observation, temperature: float) -> str:
    """Sampling and learning agree about the policy: the sampled tokens' log-probs are those that the update sees."""
    acted = policy.act([observation], "sample", temperature, [torch_generator(0, "self-check")])
    logits = policy.chunk_logits([observation])  # with gradient, as the update's pass
    learned = policy.token_logprobs(logits, acted.tokens, temperature).detach().cpu()
    difference, limit = (learned - acted.logprobs).abs().max().item(), LOGPROB_LIMIT[policy.frozen_weights]
    if not difference <= limit:
        raise SelfCheckError(
            f"sampling and learning disagree about the policy: log-probs of the same tokens differ by {difference:.3g} "
            f"(limit {limit}); see whether --compile off or --frozen-weights float32 changes it"
        )
    return f"sampled and recomputed log-probs differ by at most {difference:.1e}"


def check_learning(policy: Policy, observation: Observation, micro_batch_size: int) -> str:
    """Learn a micro-batch, the largest thing that happens: it fits into memory and leads where the gradient says.

    It may not: layers and recorded passes keep copies of the parameters, and rounding may swallow what a step changes.
    """
    on_gpu = policy.device.type == "cuda"
    try:
        gain = _gain_of_a_promising_step(policy, [observation] * (micro_batch_size if on_gpu else 1))
    except torch.OutOfMemoryError as error:
        raise BadInput(
            f"out of GPU memory in one update of {micro_batch_size} decisions ({first_line(error)}); lower "
            "--micro-batch-size, keep --gradient-checkpointing on, or lower --lora-rank"
        ) from None
    finding = f"an optimizer step that promises {PROMISED_GAIN} nats brings {gain:.4f}"
    if not GAIN_LIMITS[0] * PROMISED_GAIN <= gain <= GAIN_LIMITS[1] * PROMISED_GAIN:
        raise SelfCheckError(
            f"{finding}: the policy does not follow its parameters, training would lead nowhere; try --compile off or "
            "--frozen-weights float32"
        )
    return finding


def _gain_of_a_promising_step(policy: Policy, observations: Sequence[Observation]) -> float:
    """What an optimizer step that promises PROMISED_GAIN brings; it and its opposite are taken back at once.

    Raised is the log-prob of the least likely tokens, whose gradient never vanishes. AdamW's first step moves by
    lr * g / (|g| + eps), so the promise is lr * sum(g^2 / (|g| + eps)); half the difference of both steps is free of
    the loss's curvature.
    """
    trained = [parameter for _, parameter in policy.named_trainable_parameters()]
    logits = policy.chunk_logits(observations)
    tokens = logits.argmin(-1).cpu() + FIRST_ACTION_TOKEN
    policy.token_logprobs(logits, tokens, 1.0).mean().neg().backward()
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    slope = sum((g.square() / (g.abs() + ADAM_EPS)).sum().item() for g in gradients)
    lr = PROMISED_GAIN / slope if slope > 0 else 0.0

    def after_a_step() -> float:
        before = [parameter.detach().to("cpu", copy=True) for parameter in trained]
        optimizer = make_optimizer(trained, lr, weight_decay=0.0)
        policy.watch(optimizer)
        optimizer.step()
        del optimizer  # its moments need not fit beside the pass
        moved = policy.token_logprobs(policy.chunk_logits(observations), tokens, 1.0).mean().item()
        with torch.no_grad():
            for parameter, value in zip(trained, before, strict=True):
                parameter.copy_(value)
        return moved

    ahead = after_a_step()
    for gradient in gradients:
        gradient.neg_()
    gain = (ahead - after_a_step()) / 2
    for parameter in trained:
        parameter.grad = None
    return gain


def _relative_effect(before: Tensor, after: Tensor) -> float:
    return ((after - before).abs().max() / before.abs().max().clamp_min(1e-30)).item()
