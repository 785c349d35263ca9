"""The id layout is Llama-2's: proven with the golden prompts of the reference's tokenizer."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from vla.prompt import load_tokenizer, prompt, prompt_ids
from vla.tiny_tokenizer import vocabulary, write_tokenizer

PROMPTS = json.loads((Path(__file__).parent / "golden" / "prompts.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def test_special_ids_are_llama_2s(tokenizer):
    assert [tokenizer.id_to_token(i) for i in (0, 1, 2, 29871, 32000)] == ["<unk>", "<s>", "</s>", "▁", "<PAD>"]
    assert PROMPTS["bos"], PROMPTS["pad"] == (1, 32000)


def test_prompts_begin_and_end_like_the_references(tokenizer):
    for case in PROMPTS["cases"]:
        ids = prompt_ids(tokenizer, case["task"])
        assert (ids[0], ids[-1]) == (case["eval_ids_with_29871"][0], case["eval_ids_with_29871"][-1]) == (1, 29871)
        assert 0 not in ids
        assert not set(ids) & set(range(31744, 32064))


def test_different_instructions_have_different_ids(tokenizer):
    tasks = {case["task"].lower() for case in PROMPTS["cases"]}
    assert len({tuple(prompt_ids(tokenizer, task)) for task in tasks}) == len(tasks)


def test_action_string_becomes_the_references_training_ids(tokenizer):
    """After "Out: " come 29871 and one id per action, as in the reference's training example."""
    characters = {token_id: token for token, token_id in vocabulary().items()}
    case = PROMPTS["cases"][0]
    actions = "".join(characters[token_id] for token_id in case["train_action_ids"])
    ids = tokenizer.encode(prompt(case["task"]) + " " + actions).ids
    assert ids == [*prompt_ids(tokenizer, case["task"]), *case["train_action_ids"]]


def test_every_action_id_is_one_character(tokenizer):
    for token_id in range(31744, 32000):
        assert len(tokenizer.decode([token_id])) == 1


def test_words_of_instructions_are_one_token_and_others_are_spelled(tokenizer):
    assert len(tokenizer.encode("black ramekin").ids) == 1 + 2
    spelled = tokenizer.encode("zebra").tokens
    assert spelled == ["<s>", "▁", "z", "e", "b", "r", "a"]


def test_transformers_reads_the_folder_to_the_same_ids(folder, tokenizer):
    theirs = AutoTokenizer.from_pretrained(folder)
    text = prompt("pick up the black bowl")
    assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (32000, 1, 2)
