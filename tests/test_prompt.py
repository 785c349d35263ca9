"""Prompts against the original tokenizer's ids (tests/golden/prompts.json); the vocabulary itself isn't distributed."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

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


@pytest.mark.parametrize("content", [None, b"", b"{}", b"version https://git-lfs.github.com/spec/v1\noid sha256:0"])
def test_a_file_that_is_missing_or_no_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput, match="is missing" if content is None else "is not a usable tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert str(path) in str(caught.value)
