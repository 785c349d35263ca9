"""SentencePiece models written here byte by byte; ids and merges by hand."""

import struct

import pytest

from contracts import BadInput
from vla.sentencepiece import read_sentencepiece_model

UNKNOWN, CONTROL, BYTE, NORMAL = 2, 3, 6, 1
PIECES = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    ("▁a", -1.0, NORMAL),
    ("ab", -2.0, NORMAL),
    ("▁ab", -3.0, NORMAL),
    ("bb", -0.5, NORMAL),
    ("▁", -4.0, NORMAL),
    ("a", -5.0, NORMAL),
    ("b", -6.0, NORMAL),
]
IDS = {text: token_id for token_id, (text, _, _) in enumerate(PIECES)}


def varint(value: int) -> bytes:
    low = bytes([value & 0x7F])
    return low if value < 0x80 else bytes([value & 0x7F | 0x80]) + varint(value >> 7)


def length_delimited(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def model_file(pieces) -> bytes:
    """As the library writes it: the type is left out where it is NORMAL; other fields surround the pieces."""
    message = b""
    for text, score, kind in pieces:
        piece = length_delimited(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score)
        message += length_delimited(1, piece + (b"" if kind == NORMAL else varint(3 << 3) + varint(kind)))
    trainer = length_delimited(2, varint(3 << 3) + varint(2) + varint(4 << 3) + varint(32000))
    return message + trainer + varint(9 << 3 | 1) + bytes(8)


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model_file(PIECES))
    return read_sentencepiece_model(tmp_path / "tokenizer.model")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a", ["▁a"]),
        ("ab", ["▁ab"]),
        ("abb", ["▁a", "bb"]),  # bb scores best of all, so it is merged before ab can be
        ("aab", ["▁a", "ab"]),
        ("b a", ["▁", "b", "▁a"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("\n", ["▁", "<0x0A>"]),
        ("", []),
    ],
)
def test_pieces_merge_by_score(tokenizer, text, pieces):
    assert tokenizer.encode(text, add_special_tokens=False).ids == [IDS[piece] for piece in pieces]


def test_ids_are_the_order_of_the_file(tokenizer):
    assert [tokenizer.id_to_token(token_id) for token_id in range(len(PIECES))] == [text for text, _, _ in PIECES]


def test_control_symbols_are_never_merged_from_text(tmp_path):
    pieces = [*PIECES, ("<", -7.0, NORMAL), ("s>", -7.0, NORMAL), ("s", -7.0, NORMAL), (">", -7.0, NORMAL)]
    (tmp_path / "tokenizer.model").write_bytes(model_file(pieces))
    tokens = read_sentencepiece_model(tmp_path / "tokenizer.model").encode("<s>", add_special_tokens=False).tokens
    assert tokens == ["▁", "<", "s>"]


@pytest.mark.parametrize("cut", [1, 2, 5, 100])
def test_a_truncated_file_is_named(tmp_path, cut):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model_file(PIECES)[:-cut])
    with pytest.raises(BadInput, match=r"tokenizer\.model"):
        read_sentencepiece_model(path)


def test_a_message_without_pieces_is_refused(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(length_delimited(2, b""))
    with pytest.raises(BadInput, match="no vocabulary"):
        read_sentencepiece_model(path)


@pytest.mark.parametrize(
    "content",
    [b"\x08" + b"\xff" * 1_000_000 + b"\1", model_file([("a" * 1_000_000, 0.0, NORMAL)])],
    ids=["number", "piece"],
)
def test_what_would_take_forever_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(BadInput, match=r"tokenizer\.model: is not a SentencePiece model"):
        read_sentencepiece_model(tmp_path / "tokenizer.model")
