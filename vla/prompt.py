"""The text half of the model's input: prompt template, tokenizer and prompt ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from errors import BadInput
from untrusted.json_file import as_object, brief, parse_json, required
from untrusted.plain_file import read_text
from vla.sentencepiece import read_sentencepiece_model

BOS_ID, EOS_ID, PAD_ID = 1, 2, 32000
EMPTY_TOKEN_ID = 29871  # "▁": ends every prompt of the training data, a by-product of tokenising "Out: " + actions
_TRIAL = "abcdefghijklmnopqrstuvwxyz 0123456789 é▁\n"  # letters, and what needs a fallback
_PARTS = ["Sequence", "Prepend", "Metaspace", "Punctuation", "Split", "Whitespace"]
_LONGEST_TEXT = 100  # in a part; Llama's have one character
_LLAMA_TOKENS = {BOS_ID: "<s>", EOS_ID: "</s>", EMPTY_TOKEN_ID: "▁"}


def prompt(instruction: str) -> str:
    """The sentence around the instruction on which OpenVLA was trained. No system prompt, nothing stripped."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


def prompt_ids(tokenizer: Tokenizer, instruction: str) -> list[int]:
    """Token ids of the prompt, BOS first and 29871 last."""
    # BOS is added here: whether the tokenizer would add it depends on how its file was saved.
    ids = [BOS_ID, *tokenizer.encode(prompt(instruction), add_special_tokens=False).ids]
    return ids if ids[-1] == EMPTY_TOKEN_ID else [*ids, EMPTY_TOKEN_ID]


def pad_prompts(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Prompts (P_i,) -> ids (B, P), padded on the right, and their lengths (B,).

    No lengths where all are equal: then nothing is padded, and attention needs no mask.
    """
    lengths = torch.tensor([len(ids) for ids in prompts])
    ids = pad_sequence(list(prompts), batch_first=True, padding_value=PAD_ID)
    return ids, lengths if bool((lengths != lengths[0]).any()) else None


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The checkpoint's Llama-2 tokenizer from tokenizer.json, or else from tokenizer.model. Local files only.

    Raises BadInput when there is neither, the file can't be used, or ids 1, 2 and 29871 aren't `<s>`, `</s>` and `▁`:
    the vocabulary of another model gives ids that this one reads as other words, and nothing else would tell.
    """
    json_path, model_path = Path(folder) / "tokenizer.json", Path(folder) / "tokenizer.model"
    if json_path.exists():
        path, tokenizer = json_path, _read_tokenizer_json(json_path)
    elif model_path.exists():
        path, tokenizer = model_path, read_sentencepiece_model(model_path)
    else:
        raise BadInput(
            f"{folder}: holds neither tokenizer.json nor tokenizer.model; copy one from the checkpoint's source"
        )
    for token_id, token in _LLAMA_TOKENS.items():
        found = tokenizer.id_to_token(token_id)
        if found != token:
            raise BadInput(f"{path}: id {token_id} is {found!r}, not {token!r}; the Llama-2 tokenizer is needed")
    try:
        tokenizer.encode(prompt(_TRIAL), add_special_tokens=False)
    except Exception as error:  # the library raises nothing more specific
        raise BadInput(f"{path}: cannot encode a prompt ({error}); download or copy it again") from error
    return tokenizer


def _read_tokenizer_json(path: Path) -> Tokenizer:
    text = read_text(path)
    _check_parts(as_object(parse_json(text, str(path)), str(path)), str(path))
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise BadInput(f"{path}: is not a tokenizer file ({error}); download or copy it again") from error
    tokenizer.no_padding()  # both may be saved in the file, and would change the ids
    tokenizer.no_truncation()
    return tokenizer


def _check_parts(content: dict[str, Any], where: str) -> None:
    """Raises BadInput for what the library would need years or GBs for: only parts of tokenizers like Llama-2's pass.

    Among the others are regular expressions, which can backtrack without end, and tables that are taken on trust.
    """
    waiting = [content.get("normalizer"), content.get("pre_tokenizer")]
    while waiting:
        part = waiting.pop()
        if (isinstance(part, dict) and not _is_tame(part)) or (isinstance(part, str) and len(part) > _LONGEST_TEXT):
            raise BadInput(f"{where}: has a part {brief(part)}; the Llama-2 tokenizer is needed")
        if isinstance(part, dict | list):
            waiting += part.values() if isinstance(part, dict) else part
    model = as_object(required(content, "model", where), f"{where}: model")
    vocabulary = as_object(required(model, "vocab", f"{where}: model"), f"{where}: vocab")
    added = content.get("added_tokens") or []
    if not isinstance(added, list):
        raise BadInput(f"{where}: added_tokens is {brief(added)}, expected a list")
    ids = [*vocabulary.values(), *(as_object(token, f"{where}: added_tokens").get("id") for token in added)]
    if not all(type(number) is int and 0 <= number <= PAD_ID for number in ids):
        # The library makes room for the largest id, and the model has no embeddings beyond.
        raise BadInput(f"{where}: has ids that are no numbers from 0 to {PAD_ID}; the Llama-2 tokenizer is needed")


def _is_tame(part: dict[str, Any]) -> bool:
    """Whether a part is known, without a regular expression, and replaces nothing by something longer."""
    if part.get("type") == "Replace":
        pattern, text = part.get("pattern"), part.get("content")
        return isinstance(pattern, dict) and isinstance(text, str) and len(text) <= len(str(pattern.get("String", "")))
    return "Regex" not in part and ("type" not in part or part["type"] in _PARTS)
