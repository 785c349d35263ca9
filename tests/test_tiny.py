"""The small checkpoint has the real folder format, and the whole program can load it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.small_checkpoint import make_small_checkpoint
from vla.preprocessing import load_tokenizer, prompt, prompt_ids

GOLDEN = Path(__file__).parent / "golden" / "checkpoint"
PROMPTS = json.loads((GOLDEN.parent / "prompts.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_small_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint", l1_head=True)


def _generic(keys) -> set[str]:
    """Keys with block and layer numbers left out, so that networks of different depth can be compared."""
    return {".".join("N" if part.isdigit() else part for part in key.split(".")) for key in keys}


def test_files_and_keys_are_those_of_the_reference_format(folder):
    reference = {path.name.replace("150000", "latest") for path in GOLDEN.iterdir()}
    assert {path.name for path in folder.iterdir()} == reference | {"tokenizer.json", "tokenizer_config.json"}
    assert _generic(load_file(folder / "model.safetensors")) == _generic(load_file(GOLDEN / "model.safetensors"))
    for module in ("proprio_projector", "action_head"):
        ours = torch.load(folder / f"{module}--latest_checkpoint.pt", weights_only=True)
        theirs = torch.load(GOLDEN / f"{module}--150000_checkpoint.pt", weights_only=True)
        assert ours.keys() == theirs.keys()
    config, golden = (json.loads((path / "config.json").read_text()) for path in (folder, GOLDEN))
    assert config.keys() - {"num_images_in_input", "looks"} == golden.keys() - {"auto_map"}
    processor, golden = (json.loads((path / "preprocessor_config.json").read_text()) for path in (folder, GOLDEN))
    assert processor["tvf_normalize_params"] == golden["tvf_normalize_params"]
    assert processor.keys() == golden.keys()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def test_action_string_becomes_the_references_training_ids(tokenizer):
    """After "Out: " come 29871 and one id per action, as in the reference's training example."""
    characters = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    case = PROMPTS["cases"][0]
    actions = "".join(characters[token_id] for token_id in case["train_action_ids"])
    ids = tokenizer.encode(prompt(case["task"]) + " " + actions).ids
    assert ids == [*prompt_ids(tokenizer, case["task"]), *case["train_action_ids"]]


def test_transformers_reads_the_folder_to_the_same_ids(folder, tokenizer):
    theirs = AutoTokenizer.from_pretrained(folder)
    text = prompt("pick up the black bowl")
    assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (32000, 1, 2)
