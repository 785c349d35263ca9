"""Questions to a loaded policy whose wrong answers no error message would ever give.

* Is attention bidirectional? Under a causal mask success falls from 98 % to 50-60 %.
* Does the policy see the images at all? It has happened that a library dropped them, and every image got one action.
* Was the language-model head trained on action tokens? Checkpoints trained by L1 regression have an untouched one, and
  reinforcement learning from it finds no success in days.

All ask for behaviour, not for version numbers. Each returns its finding in one sentence or raises BadInput.
"""

from dataclasses import replace

import numpy as np
import torch

from contracts import Observation
from errors import BadInput
from vla import preprocessing
from vla.policy import Policy
from vla.tokens import ACTION_TOKEN_IDS

_IMAGE_SIZE = 256  # of LIBERO's cameras
_INSTRUCTION = "pick up the black bowl and place it on the plate"
_SMALLEST_ACTION_MASS = 0.5  # a head trained on action tokens puts nearly all of its probability on them
_SMALLEST_EFFECT = 1e-5  # relative to the largest logit; without any connection the effect is exactly 0


@torch.no_grad()
def attention_probe(policy: Policy) -> str:
    """Change the last placeholder's embedding: the logits of the first slot, far before it, have to move."""
    network = policy.network
    inputs = policy.model_inputs([_observation(policy, brightness=0)])
    embeddings, is_real = network.embed(*inputs)
    first = network.first_output_position(embeddings, *inputs[1:3])
    changed = embeddings.clone()
    last_placeholder = int(first) + network.num_action_tokens
    changed[:, last_placeholder] = embeddings[:, 0]  # any vector that is not zero: BOS
    before, after = (network.action_logits(network.decode(x, is_real, first)) for x in (embeddings, changed))
    effect = _relative_effect(before[:, 0], after[:, 0])
    if effect < _SMALLEST_EFFECT:
        raise BadInput(
            "attention is causal: an action slot does not see the slots after it; a library of this installation "
            "changes the attention mask; run: pip install -r requirements.txt"
        )
    return f"attention is bidirectional: the last slot moves the first slot's logits by {effect:.1e} of their size"


@torch.no_grad()
def image_probe(policy: Policy) -> str:
    """Black and white images have to give different logits."""
    black = _observation(policy, brightness=0)
    white = replace(black, images=np.full_like(black.images, 255))
    before, after = (policy.chunk_logits([observation]) for observation in (black, white))
    effect = _relative_effect(before, after)
    if effect < _SMALLEST_EFFECT:
        raise BadInput(
            "the policy ignores its images: black and white ones give the same logits; the checkpoint is broken, or a "
            "library of this installation is; run: pip install -r requirements.txt, or download the checkpoint again"
        )
    return f"the policy sees its images: black and white ones differ by {effect:.1e} of the logits' size"


@torch.no_grad()
def action_mass_probe(policy: Policy, observation: Observation, must_be_trained: bool) -> str:
    """Share of the whole vocabulary's probability that lies on the 256 action tokens, mean over the chunk.

    Raises BadInput when it is below one half although the token head `must_be_trained`.
    """
    _, hidden = policy.chunk_outputs([observation])
    assert hidden is not None, "they were asked for"
    probabilities = policy.network.vocabulary_logits(hidden).softmax(-1)
    mass = probabilities[..., ACTION_TOKEN_IDS.start : ACTION_TOKEN_IDS.stop].sum(-1).mean().item()
    finding = f"{100 * mass:.1f} % of the token head's probability lies on action tokens"
    if must_be_trained and mass < _SMALLEST_ACTION_MASS:
        raise BadInput(
            f"{finding}: it was not trained on them, and a token policy cannot start from it; use a checkpoint that "
            "was (README, Train), one with an action head (--teacher l1), or go on with --allow-zero-baseline"
        )
    return finding


def _observation(policy: Policy, brightness: int) -> Observation:
    """A uniform image, the arm in the middle of its range."""
    proprio = policy.statistics.proprio
    middle = np.zeros(0) if proprio is None else (proprio.q01 + proprio.q99) / 2
    shape = (policy.num_images, _IMAGE_SIZE, _IMAGE_SIZE, 3)
    return Observation(np.full(shape, brightness, dtype=np.uint8), middle, _INSTRUCTION)


def synthetic_observations(policy: Policy, count: int = 8, seed: int = 0) -> list[Observation]:
    """Smooth random images and states within the policy's ranges: inputs where no stored ones are at hand."""
    return preprocessing.synthetic_observations(policy.num_images, policy.statistics.proprio, count, seed)


def _relative_effect(before: torch.Tensor, after: torch.Tensor) -> float:
    return ((after - before).abs().max() / before.abs().max().clamp_min(1e-30)).item()
