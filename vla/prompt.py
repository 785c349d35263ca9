"""The text half of the model's input: prompt template, Llama-2's tokenizer, and prompt ids."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from contracts import BadInput

BOS_ID, EOS_ID, PAD_ID = 1, 2, 32000
EMPTY_TOKEN_ID = 29871  # "▁": ends every prompt of the training data, a by-product of tokenising "Out: " + actions


def prompt(instruction: str) -> str:
    """The sentence around the instruction on which OpenVLA was trained. No system prompt, nothing stripped."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


def prompt_ids(tokenizer: Tokenizer, instruction: str) -> list[int]:
    """Token ids of the prompt, BOS first (whether the tokenizer would add it depends on its file) and 29871 last."""
    ids = [BOS_ID, *tokenizer.encode(prompt(instruction), add_special_tokens=False).ids]
    return ids if ids[-1] == EMPTY_TOKEN_ID else [*ids, EMPTY_TOKEN_ID]


def pad_prompts(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Prompts (P_i,) -> ids (B, P), padded on the right, and their lengths (B,); None where all are equal: no mask."""
    lengths = torch.tensor([len(ids) for ids in prompts])
    ids = pad_sequence(list(prompts), batch_first=True, padding_value=PAD_ID)
    return ids, lengths if bool((lengths != lengths[0]).any()) else None


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The checkpoint's Llama-2 tokenizer.

    Raises BadInput also when ids 1, 2 and 29871 aren't `<s>`, `</s>` and `▁`: the vocabulary of another model gives ids
    that this one reads as other words, and nothing else would tell.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        repair = "copy it from its source (transformers' AutoTokenizer makes it of a tokenizer.model)"
        raise BadInput(f"{path} is missing: {repair}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise BadInput(f"{path}: is not a usable tokenizer file ({error}); download or copy it again") from error
    tokenizer.no_padding()  # both may be saved in the file, and would change the ids
    tokenizer.no_truncation()
    for token_id, token in ((BOS_ID, "<s>"), (EOS_ID, "</s>"), (EMPTY_TOKEN_ID, "▁")):
        if (found := tokenizer.id_to_token(token_id)) != token:
            raise BadInput(f"{path}: id {token_id} is {found!r}, not {token!r}; the Llama-2 tokenizer is needed")
    return tokenizer
