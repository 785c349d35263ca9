import shutil
from pathlib import Path

import pytest
import torch

from errors import BadInput
from tests.small_checkpoint import make_small_checkpoint
from vla.adapter_folder import PROPRIO_FILE, SMALL_FILES
from vla.policy import Policy
from vla.weights import read_tensors, write_tensors


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_small_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint")


@pytest.fixture
def folder(base, tmp_path) -> Path:
    policy = Policy.load(str(base), task_suite="libero_spatial", lora_rank=2, lora_alpha=2)
    policy.save_adapter(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_folder_holds_the_adapter_the_projector_and_the_bases_small_files(folder, base):
    names = {path.name for path in folder.iterdir()}
    small = {name for name in SMALL_FILES if (base / name).exists()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", PROPRIO_FILE} | small
    assert {"dataset_statistics.json", "preprocessor_config.json", "tokenizer.json"} <= small
    assert all((folder / name).read_bytes() == (base / name).read_bytes() for name in small)
    assert {tensor.dtype for tensor in read_tensors(folder / PROPRIO_FILE).values()} == {torch.float32}


def test_adapter_on_an_adapter_is_refused(folder):
    with pytest.raises(BadInput, match="is itself an adapter"):
        Policy.load(str(folder), task_suite="libero_spatial", adapter=str(folder))


def test_projector_of_another_size_is_named(folder, base):
    policy = Policy.load(str(base), task_suite="libero_spatial", lora_rank=2, lora_alpha=2)
    state = read_tensors(folder / PROPRIO_FILE)
    write_tensors(folder / PROPRIO_FILE, state | {"fc1.weight": torch.zeros(16, 9)})
    with pytest.raises(BadInput, match=r"fc1\.weight: expected shape \(16, 8\), found \(16, 9\)"):
        policy.load_adapter(folder)


def test_adapter_with_proprio_does_not_fit_a_base_without(folder, base, tmp_path):
    without = shutil.copytree(base, tmp_path / "without", ignore=shutil.ignore_patterns("proprio_projector*"))
    policy = Policy.load(str(without), task_suite="libero_spatial", lora_rank=2, lora_alpha=2)
    with pytest.raises(BadInput, match="trained with proprio"):
        policy.load_adapter(folder)
