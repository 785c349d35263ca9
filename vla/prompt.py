"""The text half of the model's input: prompt template, tokenizer and prompt ids.

The tokenizer is Llama-2's, from tokenizer.json or from Meta's tokenizer.model. The latter is a SentencePiece BPE model:
the vocabulary is the order of its pieces, and the score of a piece says how early two neighbours are merged into it.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from contracts import BadInput

BOS_ID, EOS_ID, PAD_ID = 1, 2, 32000
EMPTY_TOKEN_ID = 29871  # "▁": ends every prompt of the training data, a by-product of tokenising "Out: " + actions
_LLAMA_TOKENS = {BOS_ID: "<s>", EOS_ID: "</s>", EMPTY_TOKEN_ID: "▁"}


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
    """The checkpoint's Llama-2 tokenizer from tokenizer.json, or else from tokenizer.model.

    Raises BadInput also when ids 1, 2 and 29871 aren't `<s>`, `</s>` and `▁`: the vocabulary of another model gives ids
    that this one reads as other words, and nothing else would tell.
    """
    json_path, model_path = Path(folder) / "tokenizer.json", Path(folder) / "tokenizer.model"
    path, read = (json_path, Tokenizer.from_file) if json_path.exists() else (model_path, _read_sentencepiece)
    if not path.exists():
        raise BadInput(f"{folder}: holds neither tokenizer.json nor tokenizer.model; copy one from its source")
    try:
        tokenizer = read(str(path))
        tokenizer.no_padding()  # both may be saved in the file, and would change the ids
        tokenizer.no_truncation()
    except Exception as error:  # the library raises nothing more specific
        raise BadInput(f"{path}: is not a usable tokenizer file ({error}); download or copy it again") from error
    for token_id, token in _LLAMA_TOKENS.items():
        if (found := tokenizer.id_to_token(token_id)) != token:
            raise BadInput(f"{path}: id {token_id} is {found!r}, not {token!r}; the Llama-2 tokenizer is needed")
    return tokenizer


def _read_sentencepiece(path: str) -> Tokenizer:
    """A tokenizer that gives the ids of the sentencepiece library, which is not needed for it."""
    from transformers.utils.sentencepiece_model_pb2_new import ModelProto  # generated, needs protobuf alone

    pieces = list(ModelProto.FromString(Path(path).read_bytes()).pieces)
    ids = {piece.piece: token_id for token_id, piece in enumerate(pieces)}
    # All pairs of pieces that make up a piece, best score first: [("▁", "t"), ("e", "r"), ...]. Equal scores (Llama's
    # runs of blanks) come in order of the ids, as in the tokenizer.json that Meta's file became.
    ranked = sorted(
        (-piece.score, ids[piece.piece[:cut]], ids[piece.piece[cut:]])
        for piece in pieces
        if piece.type == 1  # normal; the others are control symbols, bytes and <unk>, which merging cannot make
        for cut in range(1, len(piece.piece))
        if piece.piece[:cut] in ids and piece.piece[cut:] in ids
    )
    merges = [(pieces[left].piece, pieces[right].piece) for _, left, right in ranked]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    # Blanks are written as ▁, one of them before the text.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer
