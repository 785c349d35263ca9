"""Files that were cut, or have another field than they should: one line that names the file."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from configs.cli import parse_train
from contracts import BadInput
from experiment.results import read_results, write_results
from experiment.stored_run import CONFIG_FILE, METRICS_FILE, read_run
from tests.small_checkpoint import load_policy
from tests.stored_runs import ROWS, store
from tests.test_results import results_with
from vla.network_io import PROPRIO_FILE
from vla.weights import write_pt


def check(path: Path, read: Callable[[], object], damages: list[bytes]) -> None:
    """Damage a file in several ways, and read it: each time BadInput names the file or its folder."""
    read()
    whole = path.read_bytes()
    for damage in (whole[: len(whole) // 2], *damages):
        path.write_bytes(damage)
        with pytest.raises(BadInput, match=str(path.parent)):
            read()
    path.write_bytes(whole)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "dataset_statistics.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "action_head--latest_checkpoint.pt",
    ],
)
def test_files_of_a_checkpoint(name, small, tmp_path):
    folder = shutil.copytree(small, tmp_path / "checkpoint")
    check(folder / name, lambda: load_policy(folder), [b"{}", b"null", b"\xff"])


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("dataset_statistics.json", {"action": {"q99": [float("nan")] + [1.0] * 6}}, "not a finite number"),
        ("dataset_statistics.json", {"proprio": None}, "robot states of 8 numbers, its statistics"),
        ("preprocessor_config.json", {"input_sizes": [[3, 224, 224]] * 2}, "pictures of 224 pixels"),
    ],
)
def test_files_of_different_checkpoints(name, change, said, small, tmp_path):
    folder = shutil.copytree(small, tmp_path / "checkpoint")
    contents = json.loads((folder / name).read_text())
    for part in contents.values() if name == "dataset_statistics.json" else [contents]:
        for key, value in change.items():
            part[key] = part[key] | value if isinstance(value, dict) else value
    (folder / name).write_text(json.dumps(contents))
    with pytest.raises(BadInput, match=re.escape(said)):
        load_policy(folder)


def test_a_projector_of_another_kind(small, tmp_path):
    folder = shutil.copytree(small, tmp_path / "checkpoint")
    write_pt(folder / PROPRIO_FILE, {"model.fc1.weight": torch.ones(2, 2)})
    with pytest.raises(BadInput, match=PROPRIO_FILE):
        load_policy(folder)


def test_index_of_a_checkpoint(small, tmp_path):
    folder = shutil.copytree(small, tmp_path / "checkpoint")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(load_policy(small).info.weights, "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    check(index, lambda: load_policy(folder), [b"{}", b'{"weight_map": {"a": 1}}'])


def test_config_of_an_adapter(small, tmp_path):
    load_policy(small).save_adapter(tmp_path / "adapter")
    check(
        tmp_path / "adapter" / "adapter_config.json",
        lambda: load_policy(tmp_path / "adapter"),
        [b"[]", b'{"peft_type": 1}'],
    )


def test_results_of_an_evaluation(tmp_path):
    path = tmp_path / "results.json"
    write_results(path, results_with("110100"))
    check(path, lambda: read_results(path), [b"{}", b'{"episodes": 1}'])


def test_files_of_a_run(tmp_path):
    run = store(tmp_path / "run", ROWS)
    check(run / CONFIG_FILE, lambda: parse_train(["--resume", str(run)]), [b"{}", b'{"config": {}}'])
    check(run / CONFIG_FILE, lambda: read_run(run), [b"{}"])
    read_run(run)
    for damage in (b"[]\n", b"half\n"):
        (run / METRICS_FILE).write_bytes(damage)
        with pytest.raises(BadInput, match=str(run)):
            read_run(run)
