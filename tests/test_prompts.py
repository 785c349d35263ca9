"""Prompts and their ids against the original ones (tests/golden). The Llama-2 vocabulary itself is not distributed."""

import json
from pathlib import Path

import pytest

from tests.llama_like import llama_like_tokenizer
from vla.prompts import load_tokenizer, prompt, prompt_ids
from vla.tokens import BOS_ID, EMPTY_TOKEN_ID, EOS_ID, PAD_ID

PROMPTS = json.loads((Path(__file__).parent / "golden" / "prompts.json").read_text())


def test_special_ids_equal_reference():
    reference = [PROMPTS[name] for name in ("bos", "eos", "pad", "empty_token")]
    assert reference == [BOS_ID, EOS_ID, PAD_ID, EMPTY_TOKEN_ID]


@pytest.mark.parametrize("case", PROMPTS["cases"], ids=lambda case: repr(case["task"]))
def test_prompt_and_ids_equal_reference(case, tmp_path):
    llama_like_tokenizer().save(str(tmp_path / "tokenizer.json"))
    ids = prompt_ids(load_tokenizer(tmp_path), case["task"])
    assert prompt(case["task"]) == case["eval_prompt"]
    assert ids == case["eval_ids_with_29871"]
    assert ids == case["train_input_ids"][: len(ids)]  # so the policy reads what it was trained on


def test_padding_and_truncation_saved_in_the_file_do_not_change_the_ids(tmp_path):
    tokenizer = llama_like_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    task = "turn on the stove"
    assert prompt_ids(load_tokenizer(tmp_path), task) == prompt_ids(llama_like_tokenizer(), task)
