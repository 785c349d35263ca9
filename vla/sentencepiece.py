"""Llama's `tokenizer.model` (a SentencePiece BPE model) as a `tokenizers.Tokenizer`, without the sentencepiece package.

The file is a protobuf message; of it, only the pieces matter (sentencepiece_model.proto): field 1 of the model, each
with text (1), score (2) and type (3). The vocabulary is their order, and the score of a piece says how early two
neighbours are merged into it.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers

from errors import BadInput
from untrusted.plain_file import read_bytes

_LONGEST_PIECE = 1_000  # characters; Llama's have 16 at most, and the time to find its merges grows with the square
_NORMAL = 1  # the type of pieces that merging can make; the others are control symbols, bytes and <unk>
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf


def read_sentencepiece_model(path: Path) -> Tokenizer:
    """A tokenizer that gives the ids of the sentencepiece library. Raises BadInput when the file is no such model."""
    content = read_bytes(path)
    try:
        pieces = [_piece(value) for number, value in _fields(content) if number == 1]
    except (ValueError, LookupError, struct.error, AttributeError, TypeError) as error:
        raise BadInput(f"{path}: is not a SentencePiece model ({error}); download or copy it again") from error
    if not pieces:
        raise BadInput(f"{path}: holds no vocabulary; download or copy it again")
    vocabulary = {text: token_id for token_id, (text, _, _) in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, _merges(pieces, vocabulary), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    # Blanks are written as ▁, one of them before the text.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def _merges(pieces: list[tuple[str, float, int]], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of pieces that make up a piece, best score first: [("▁", "t"), ("e", "r"), ...]."""
    ranked = [
        (-score, vocabulary[text[:cut]], vocabulary[text[cut:]])
        for text, score, kind in pieces
        if kind == _NORMAL
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
    # Equal scores (Llama's runs of blanks) come in order of the ids, as in the tokenizer.json that Meta's file became.
    return [(pieces[left][0], pieces[right][0]) for _, left, right in sorted(ranked)]


def _piece(message: Any) -> tuple[str, float, int]:
    """(text, score, type) of one piece."""
    fields: dict[int, Any] = dict(_fields(message))
    text = fields[1].decode("utf-8")
    if len(text) > _LONGEST_PIECE:
        raise ValueError(f"a piece of {len(text)} characters")
    return text, struct.unpack("<f", fields.get(2, bytes(4)))[0], fields.get(3, _NORMAL)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of every field of a protobuf message."""
    position = 0
    while position < len(message):
        value: int | bytes
        tag, position = _varint(message, position)
        wire_type = tag & 7
        if wire_type == _VARINT:
            value, position = _varint(message, position)
        else:
            if wire_type == _BYTES:
                length, position = _varint(message, position)
            elif wire_type in (_FIXED32, _FIXED64):
                length = 4 if wire_type == _FIXED32 else 8
            else:
                raise ValueError(f"unknown wire type {wire_type} at byte {position}")
            value, position = message[position : position + length], position + length
            if position > len(message):
                raise ValueError(f"ends {position - len(message)} bytes early")
        yield tag >> 3, value


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """A base-128 number, low digits first, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):  # of 64 bits, 10 bytes at most
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"a number without end at byte {position}")
