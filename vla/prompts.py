"""Turn an instruction into the token ids of the prompt that OpenVLA was trained on.

Source: openvla-oft @213c5ff, experiments/robot/openvla_utils.py.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from contracts import read_bytes, undamaged
from vla.tokens import BOS_ID, EMPTY_TOKEN_ID, PAD_ID

PROMPT_MULTIPLE = 16  # prompts of different lengths are padded to a multiple of this


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load a checkpoint folder's tokenizer. Raises BadInput when its file is missing or damaged."""
    path = Path(folder) / "tokenizer.json"
    content = read_bytes(path)
    with undamaged(path):
        tokenizer = Tokenizer.from_buffer(content)
    # The file may turn on padding and truncation, which would change the ids.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def prompt(instruction: str) -> str:
    """The prompt that OpenVLA was trained on. It has no system prompt, and spaces are not stripped."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


def prompt_ids(tokenizer: Tokenizer, instruction: str) -> list[int]:
    """Token ids of the prompt, BOS first and EMPTY_TOKEN_ID last.

    BOS is added here, because only some tokenizer files make the tokenizer add it.
    """
    ids = [BOS_ID, *tokenizer.encode(prompt(instruction), add_special_tokens=False).ids]
    return ids if ids[-1] == EMPTY_TOKEN_ID else [*ids, EMPTY_TOKEN_ID]


def pad_prompts(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Join prompts (P_i,) to ids (B, P), padded on the right, and their lengths (B,).

    If all lengths are equal, None is returned for them, so that no attention mask is needed. Otherwise P is a multiple
    of PROMPT_MULTIPLE, so that most batches have the same shape: CUDA graphs and compiled code are made per shape.
    """
    lengths = torch.tensor([len(ids) for ids in prompts])
    ids = pad_sequence(list(prompts), batch_first=True, padding_value=PAD_ID)
    if (lengths == lengths[0]).all():
        return ids, None
    num_padding = -ids.shape[1] % PROMPT_MULTIPLE
    return F.pad(ids, (0, num_padding), value=PAD_ID), lengths
