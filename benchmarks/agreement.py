"""How far two computations of the same log-probabilities are apart, in words."""

from torch import Tensor


def describe_agreement(logprobs: Tensor, reference: Tensor) -> str:
    """Of the same tokens: (B, A) each."""
    apart = logprobs - reference
    chunks, tokens = ((x.exp() - 1).abs().mean() for x in (apart.mean(-1), apart))
    return (
        f"log-probs apart by {apart.abs().mean():.4f} on average, {apart.abs().max():.4f} at most; "
        f"mean |ratio - 1| of chunks {chunks:.4f}, of tokens {tokens:.4f}"
    )
