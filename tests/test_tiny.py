"""The small checkpoint has the real folder format, and the whole program can load it."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from vla.prompts import load_tokenizer, prompt, prompt_ids

GOLDEN = Path(__file__).parent / "golden" / "checkpoint"
PROMPTS = json.loads((GOLDEN.parent / "prompts.json").read_text())


def _generic(keys) -> set[str]:
    """Keys with block and layer numbers left out, so that networks of different depth can be compared."""
    return {".".join("N" if part.isdigit() else part for part in key.split(".")) for key in keys}


def test_files_and_keys_are_those_of_the_reference_format(small):
    reference = {path.name.replace("150000", "latest") for path in GOLDEN.iterdir()}
    assert {path.name for path in small.iterdir()} == reference | {"tokenizer.json", "tokenizer_config.json"}
    assert _generic(load_file(small / "model.safetensors")) == _generic(
        load_file(GOLDEN / "model.safetensors")
    )
    for module in ("proprio_projector", "action_head"):
        ours = torch.load(small / f"{module}--latest_checkpoint.pt", weights_only=True)
        theirs = torch.load(GOLDEN / f"{module}--150000_checkpoint.pt", weights_only=True)
        assert ours.keys() == theirs.keys()
    config, golden = (json.loads((path / "config.json").read_text()) for path in (small, GOLDEN))
    assert config.keys() - {"num_images_in_input", "looks"} == golden.keys() - {"auto_map"}
    processor, golden = (
        json.loads((path / "preprocessor_config.json").read_text()) for path in (small, GOLDEN)
    )
    assert processor["tvf_normalize_params"] == golden["tvf_normalize_params"]
    assert processor.keys() == golden.keys()


def test_action_string_becomes_the_references_training_ids(small):
    """After "Out: " come 29871 and one id per action, as in the reference's training example."""
    tokenizer = load_tokenizer(small)
    characters = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    case = PROMPTS["cases"][0]
    actions = "".join(characters[token_id] for token_id in case["train_action_ids"])
    ids = tokenizer.encode(prompt(case["task"]) + " " + actions).ids
    assert ids == [*prompt_ids(tokenizer, case["task"]), *case["train_action_ids"]]


def test_transformers_reads_the_folder_to_the_same_ids(small):
    theirs = AutoTokenizer.from_pretrained(small)
    text = prompt("pick up the black bowl")
    assert theirs(text)["input_ids"] == load_tokenizer(small).encode(text).ids
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (32000, 1, 2)
