"""Prompts against the original tokenizer's ids (tests/golden/prompts.json); the vocabulary itself isn't distributed.

Ids and merges of the SentencePiece model are by hand.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers.utils.sentencepiece_model_pb2_new import ModelProto

from contracts import BadInput
from vla.prompt import BOS_ID, EMPTY_TOKEN_ID, EOS_ID, PAD_ID, load_tokenizer, prompt, prompt_ids

GOLDEN = json.loads((Path(__file__).parent / "golden" / "prompts.json").read_text())
CASES = GOLDEN["cases"]
SPECIAL = {"<unk>": 0, "<s>": BOS_ID, "</s>": EOS_ID, "▁": EMPTY_TOKEN_ID}


def word_tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
    """One id a word, as small checkpoints have it; adds BOS by itself like the released files."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    return tokenizer


def test_special_ids_equal_reference():
    assert [GOLDEN[name] for name in ("bos", "eos", "pad", "empty_token")] == [BOS_ID, EOS_ID, PAD_ID, EMPTY_TOKEN_ID]


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["task"]))
def test_prompt_and_ids_equal_reference(case):
    def encode(text: str, add_special_tokens: bool) -> SimpleNamespace:
        assert text == case["eval_prompt"]
        return SimpleNamespace(ids=case["eval_ids_processor"][0 if add_special_tokens else 1 :])

    assert prompt(case["task"]) == case["eval_prompt"]
    ids = prompt_ids(SimpleNamespace(encode=encode), case["task"])
    assert ids == case["eval_ids_with_29871"]
    assert ids == case["train_input_ids"][: len(ids)]  # so the policy reads what it was trained on


def test_empty_token_is_not_appended_twice():
    tokenizer = word_tokenizer({**SPECIAL, ":": EMPTY_TOKEN_ID})
    ids = prompt_ids(tokenizer, "go")
    assert ids[0] == BOS_ID
    assert ids[-2:] != [EMPTY_TOKEN_ID, EMPTY_TOKEN_ID]
    assert ids[-1] == EMPTY_TOKEN_ID


def test_padding_and_truncation_saved_in_the_file_do_not_change_the_ids(tmp_path):
    tokenizer = word_tokenizer({**SPECIAL, "stove": 5})
    expected = prompt_ids(tokenizer, "turn on the stove")
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert prompt_ids(load_tokenizer(tmp_path), "turn on the stove") == expected
    assert 5 in expected


@pytest.mark.parametrize(("token", "token_id"), [("<s>", 7), ("</s>", 7), ("▁", 28705)])
def test_the_vocabulary_of_another_model_is_refused(tmp_path, token, token_id):
    word_tokenizer({**SPECIAL, token: token_id}).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadInput, match=r"tokenizer\.json.*Llama-2"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
@pytest.mark.parametrize("content", [b"", b"{}", b"version https://git-lfs.github.com/spec/v1\noid sha256:0"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_tokenizer_says_which_files_are_needed(tmp_path):
    with pytest.raises(BadInput, match=r"tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)


# tokenizer.model

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
    ("a", -5.0, NORMAL),
    ("b", -6.0, NORMAL),
    ("<", -7.0, NORMAL),
    ("s>", -7.0, NORMAL),
    ("s", -7.0, NORMAL),
    (">", -7.0, NORMAL),
]
# Filler up to the id that Llama's blank has.
PIECES += [(f"filler {i}", -9.0, CONTROL) for i in range(EMPTY_TOKEN_ID - len(PIECES))] + [("▁", -4.0, NORMAL)]
IDS = {text: token_id for token_id, (text, _, _) in enumerate(PIECES)}


def model_file() -> bytes:
    pieces = [ModelProto.SentencePiece(piece=text, score=score, type=kind) for text, score, kind in PIECES]
    return ModelProto(pieces=pieces).SerializeToString()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "tokenizer.model").write_bytes(model_file())
    return load_tokenizer(folder)


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
        ("<s>", ["▁", "<", "s>"]),  # control symbols are never merged from text
    ],
)
def test_pieces_merge_by_score(tokenizer, text, pieces):
    assert tokenizer.encode(text, add_special_tokens=False).ids == [IDS[piece] for piece in pieces]


@pytest.mark.parametrize("cut", [1, 100])
def test_a_truncated_model_is_named(tmp_path, cut):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model_file()[:-cut])
    with pytest.raises(BadInput, match=r"tokenizer\.model: is not a usable tokenizer file"):
        load_tokenizer(tmp_path)
