"""The small checkpoint has the real folder format, and other programs can read it."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from vla.prompts import load_tokenizer, prompt

GOLDEN = Path(__file__).parent / "golden" / "checkpoint"


def keys_without_numbers(folder: Path) -> set[str]:
    """Names of tensors with block and layer numbers left out, to compare networks of different depth."""
    names = load_file(folder / "model.safetensors").keys()
    return {".".join("N" if part.isdigit() else part for part in name.split(".")) for name in names}


def test_files_and_keys_are_those_of_the_reference_format(small):
    reference = {path.name.replace("150000", "latest") for path in GOLDEN.iterdir()} - {
        "generation_config.json"
    }
    assert {path.name for path in small.iterdir()} == reference | {"tokenizer.json", "tokenizer_config.json"}
    assert keys_without_numbers(small) == keys_without_numbers(GOLDEN)
    for module in ("proprio_projector", "action_head"):
        ours = torch.load(small / f"{module}--latest_checkpoint.pt", weights_only=True)
        theirs = torch.load(GOLDEN / f"{module}--150000_checkpoint.pt", weights_only=True)
        assert ours.keys() == theirs.keys()
    config = json.loads((small / "config.json").read_text())
    golden_config = json.loads((GOLDEN / "config.json").read_text())
    assert config.keys() - {"num_images_in_input", "looks"} == golden_config.keys() - {"auto_map"}
    processor = json.loads((small / "preprocessor_config.json").read_text())
    golden_processor = json.loads((GOLDEN / "preprocessor_config.json").read_text())
    assert processor["tvf_normalize_params"] == golden_processor["tvf_normalize_params"]
    assert processor.keys() == golden_processor.keys()


def test_transformers_reads_the_folder_to_the_same_ids(small):
    theirs = AutoTokenizer.from_pretrained(small)
    text = prompt("pick up the black bowl")
    assert theirs(text)["input_ids"] == load_tokenizer(small).encode(text).ids
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (32000, 1, 2)
