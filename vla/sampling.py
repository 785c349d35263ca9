"""Drawing action tokens from logits, and the log-probability of what was drawn."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vla.action_tokenizer import FIRST_ACTION_TOKEN


def sample_tokens(logits: Tensor, temperature: float, generators: Sequence[torch.Generator] | None = None) -> Tensor:
    """One token id per position, (B, A) int64, from softmax(logits / temperature); logits (B, A, 256).

    The cumulative distribution is inverted in float64 with uniform numbers of one CPU generator per row (None: torch's
    default one). A row's draw is therefore the same in every batch and on every device, up to the logits' own noise.
    """
    batch, num_tokens, num_bins = logits.shape
    sources = generators if generators is not None else [torch.default_generator] * batch
    uniform = torch.stack([torch.rand(num_tokens, dtype=torch.float64, generator=source) for source in sources])
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    # The last sum is 1 up to rounding; scaling by it keeps every draw inside.
    threshold = uniform.to(logits.device) * cumulative[..., -1]
    columns = torch.searchsorted(cumulative, threshold[..., None], right=True).squeeze(-1)
    return columns.clamp(max=num_bins - 1) + FIRST_ACTION_TOKEN


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log_softmax(logits / temperature) at the tokens: (B, A, 256) and ids (B, A) -> (B, A)."""
    columns = (tokens - FIRST_ACTION_TOKEN).to(logits.device)
    return (logits / temperature).log_softmax(-1).gather(-1, columns[..., None]).squeeze(-1)
