"""Prompts and their ids against the original ones (tests/golden). The Llama-2 vocabulary itself is not distributed."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.llama_like import llama_like_tokenizer
from vla.prompts import load_tokenizer, prompt, prompt_ids
from vla.tokens import BOS_ID, EMPTY_TOKEN_ID, EOS_ID, PAD_ID

PROMPTS = json.loads((Path(__file__).parent / "golden" / "prompts.json").read_text())
each_case = pytest.mark.parametrize("case", PROMPTS["cases"], ids=lambda case: repr(case["task"]))


def test_special_ids_equal_reference():
    reference = [PROMPTS[name] for name in ("bos", "eos", "pad", "empty_token")]
    assert reference == [BOS_ID, EOS_ID, PAD_ID, EMPTY_TOKEN_ID]


@each_case
def test_prompt_and_ids_equal_reference(case):
    def encode(text: str, add_special_tokens: bool) -> SimpleNamespace:
        """Answers with the reference's ids."""
        assert text == case["eval_prompt"]
        return SimpleNamespace(ids=case["eval_ids_processor"][0 if add_special_tokens else 1 :])

    assert prompt(case["task"]) == case["eval_prompt"]
    ids = prompt_ids(SimpleNamespace(encode=encode), case["task"])
    assert ids == case["eval_ids_with_29871"]
    assert ids == case["train_input_ids"][: len(ids)]  # so the policy reads what it was trained on


@each_case
def test_ids_of_a_llama_like_tokenizer_equal_reference(case, tmp_path):
    llama_like_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert prompt_ids(load_tokenizer(tmp_path), case["task"]) == case["eval_ids_with_29871"]


def test_padding_and_truncation_saved_in_the_file_do_not_change_the_ids(tmp_path):
    tokenizer = llama_like_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    task = "turn on the stove"
    assert prompt_ids(load_tokenizer(tmp_path), task) == prompt_ids(llama_like_tokenizer(), task)
