"""The hidden states of a frozen trunk (`vla.model`): computed once for an observation, then kept for the updates.

One tensor (S, D) for each observation, without padding, in the network's dtype: an update that starts from it computes
what it would compute from the observation. In the 7B network with one image it has 2.8 MB.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vla.preprocessing import send
from vla.prompts import PROMPT_MULTIPLE

# What a trunk computes: the hidden states (B, S, D) of a batch, and the lengths (B,) of its rows; None: none is padded.
TrunkStates = tuple[Tensor, Tensor | None]
# The hidden states for some observations; None for those that were not kept.
KeptStates = Sequence[Tensor | None]


def split_rows(hidden: Tensor, lengths: Tensor | None) -> list[Tensor]:
    """The rows of a batch as views without padding; the arguments are `TrunkStates`."""
    if lengths is None:
        return list(hidden.unbind())
    return [row[:length] for row, length in zip(hidden, lengths.tolist(), strict=True)]


def join_rows(rows: Sequence[Tensor], prompt_length: int, device: torch.device) -> TrunkStates:
    """The opposite of `split_rows`: a batch on `device`, padded as `vla.prompts` pads, and the lengths of its rows.

    prompt_length: of the first row's prompt; all that is not prompt has the same length in every row.
    """
    on_device = [row.to(device, non_blocking=True) for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    if (lengths == lengths[0]).all():
        return torch.stack(on_device), None
    batch = pad_sequence(on_device, batch_first=True)
    longest_prompt = batch.shape[1] - len(rows[0]) + prompt_length
    return F.pad(batch, (0, 0, 0, -longest_prompt % PROMPT_MULTIPLE)), send(lengths, device)


def store(rows: Sequence[Tensor], device: torch.device | None) -> list[Tensor | None]:
    """Copies of rows on `device`, so that the rest of their batch can be freed; None for all rows if it is None.

    Copies of GPU tensors in main memory are pinned, so that neither copying them nor fetching them makes the CPU wait.
    """
    if device is None:
        return [None] * len(rows)
    pinned = device.type == "cpu" and rows[0].is_cuda
    copies: list[Tensor | None] = []
    for row in rows:
        copy = torch.empty(row.shape, dtype=row.dtype, device=device, pin_memory=pinned)
        copies.append(copy.copy_(row, non_blocking=True))
    return copies
