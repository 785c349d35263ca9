"""Readers of checkpoints and adapters: a valid folder of each, and what a program does with it until it decides.

The same for runs and for the simulator: run_readers.py, env_readers.py.
"""

import io
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from child_process import PROJECT
from tests.small_checkpoint import SMALL, make_small_checkpoint
from tests.test_sentencepiece import model_file
from vla.adapter_folder import base_and_adapter, folder_of_base
from vla.checkpoint import CheckpointInfo, build_network, inspect_checkpoint, load_action_head
from vla.checkpoint import _load_proprio_projector as load_proprio_projector
from vla.lora import add_lora, read_adapter
from vla.merge import merge
from vla.model_config import read_model_config
from vla.policy import Policy
from vla.preprocessing import ImageProcessor, model_input_images, pixel_values
from vla.probes import synthetic_observations
from vla.prompt import EMPTY_TOKEN_ID, load_tokenizer, prompt_ids
from vla.sft_card import RUN_FILE, write_card
from vla.sft_report import read_records, write_record
from vla.statistics import load_statistics, select_key
from vla.weights import fingerprint, read_header, stream_tensors, weight_files, write_tensors

SUITE = "libero_spatial"
CPU = torch.device("cpu")
INSTRUCTION = "pick up the black bowl"
# What an adapter folder has of its base; other readers read it.
ADAPTER_COPIES = ("dataset_statistics.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json")
Read = Callable[[Path], object]


def checkpoint_copy(folder: Path, *names: str, l1_head: bool = False) -> Path:
    """Some files of a small checkpoint; returns the folder of the whole one."""
    whole = make_small_checkpoint(folder.with_name(f"{folder.name}_whole"), l1_head=l1_head)
    folder.mkdir()
    for name in names:
        shutil.copyfile(whole / name, folder / name)
    return whole


@cache
def small_policy(checkpoint: Path) -> Policy:
    make_small_checkpoint(checkpoint)
    policy = Policy.load(str(checkpoint), task_suite=SUITE, lora_rank=2, lora_alpha=2)
    policy.base_model = "small/base"  # equal files, wherever the folders are
    return policy


def model_config(folder: Path) -> Read:
    checkpoint_copy(folder, "config.json")

    def read(folder: Path) -> None:
        build_network(CheckpointInfo(folder, read_model_config(folder), {}, {}, {}, None, None, 1), 56)

    return read


def preprocessor(folder: Path) -> Read:
    checkpoint_copy(folder, "preprocessor_config.json")
    frames = np.zeros((1, 64, 64, 3), np.uint8)

    def read(folder: Path) -> None:
        processor = ImageProcessor.load(folder)
        pixel_values(model_input_images(frames, processor.image_size), processor)

    return read


def statistics(folder: Path) -> Read:
    checkpoint_copy(folder, "dataset_statistics.json", "config.json")

    def read(folder: Path) -> None:
        found = load_statistics(folder)
        select_key(found, SUITE, next(iter(found)))

    return read


def weights(folder: Path) -> Read:
    folder.mkdir()
    weight_map: dict[str, str] = {}
    for number in (1, 2):
        tensors = {"weight": torch.ones(3, 4), "bias": torch.ones(4).bfloat16(), "empty": torch.ones(0)}
        path = folder / f"model-{number}.safetensors"
        write_tensors(path, {f"{number}.{name}": tensor for name, tensor in tensors.items()}, {"who": "me"})
        weight_map |= {f"{number}.{name}": path.name for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def read(folder: Path) -> None:
        headers = {}
        for path in weight_files(folder):
            headers |= read_header(path)[0]
        fingerprint(headers.values())
        for _, tensor in stream_tensors(headers.values(), CPU):
            tensor.sum()

    return read


def heads(folder: Path) -> Read:
    action_head, proprio = "action_head--latest_checkpoint.pt", "proprio_projector--latest_checkpoint.pt"
    info = inspect_checkpoint(checkpoint_copy(folder, action_head, proprio, l1_head=True))

    def read(folder: Path) -> None:
        here = replace(info, folder=folder, action_head_file=folder / action_head, proprio_file=folder / proprio)
        load_action_head(here, CPU, torch.float32)(torch.zeros(1, 56, SMALL.llm_dim))
        load_proprio_projector(here, CPU)(torch.zeros(1, 8))

    return read


def hostile_heads(folder: Path) -> Mapping[str, tuple[bytes, ...]]:
    """State dicts of tensors that claim more than they hold, or are none that a network is made of."""
    state = torch.load(folder / "proprio_projector--latest_checkpoint.pt", weights_only=True)
    wide, narrow = "module.fc1.weight", "module.fc1.bias"
    changes = (
        {narrow: torch.zeros(1).expand(10**12)},
        {wide: torch.zeros(1, 1).expand(10**7, 10**6)},
        {wide: torch.zeros(1, device="meta").expand(10**6, 10**6)},
        {narrow: torch.zeros(16).to_sparse()},
        {narrow: torch.sparse_coo_tensor(torch.tensor([[3]]), torch.ones(1), (10**12,))},
        {narrow: torch.zeros(16, dtype=torch.complex64)},
        {narrow: torch.zeros(16, dtype=torch.bool)},
        {narrow: torch.quantize_per_tensor(torch.zeros(16), 0.1, 0, torch.qint8)},
        {narrow: torch.nn.Parameter(torch.full((16,), float("nan")))},
        {narrow: torch.zeros(())},
        {narrow: [1]},
        {1: torch.zeros(16)},
        {wide: state[wide].T},
    )
    others = (_saved(state, legacy=True), _saved([1]), _saved(state[wide]))
    return {".pt": (*(_saved(state | change) for change in changes), *others)}


def _saved(value: object, legacy: bool = False) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


def tokenizer_json(folder: Path) -> Read:
    checkpoint_copy(folder, "tokenizer.json")
    return lambda folder: prompt_ids(load_tokenizer(folder), INSTRUCTION)


def hostile_tokenizers(folder: Path) -> Mapping[str, tuple[bytes, ...]]:
    """Parts that the library knows and Llama-2's tokenizer has not: without end, without limit, without words."""
    content = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    padding = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": ""}
    endless = {"Regex": "(([a-z ])+.)+[A-Z]([a-z ])+$"}
    doubling = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    parts = (
        {"pre_tokenizer": {"type": "Split", "pattern": endless, "behavior": "Isolated", "invert": False}},
        {"normalizer": {"type": "Replace", "pattern": endless, "content": ""}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 1_000_000}},
        {"normalizer": {"type": "Sequence", "normalizers": [doubling] * 40}},
        {"truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0}},
        {"padding": padding | {"strategy": {"Fixed": 1 << 50}}},
        {"model": {"type": "WordLevel", "vocab": content["model"]["vocab"], "unk_token": "missing"}},
        {"model": {"type": "BPE", "vocab": {}, "merges": []}},
        {"added_tokens": [flags | {"id": 1 << 31, "content": "pick"}]},
    )  # fmt: skip
    return {".json": tuple(json.dumps(content | part).encode() for part in parts)}


def tokenizer_model(folder: Path) -> Read:
    folder.mkdir()
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(f"x{i}", -float(i), 1) for i in range(EMPTY_TOKEN_ID - len(pieces))]
    pieces += [("▁", -1e6, 1), ("▁p", -1.0, 1), ("ic", -2.0, 1)]
    (folder / "tokenizer.model").write_bytes(model_file(pieces))
    return lambda folder: prompt_ids(load_tokenizer(folder), INSTRUCTION)


def adapter(folder: Path) -> Read:
    policy = small_policy(folder.with_name(f"{folder.name}_base"))
    policy.save_adapter(folder)
    info = policy.info

    def read(folder: Path) -> None:
        base, adapter = base_and_adapter(str(folder), None)
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", base):  # that would be a hub id
            folder_of_base(base, adapter)
        found = read_adapter(folder)
        network = build_network(info, 56)  # on the device meta: sizes are claims there
        add_lora(network, found.rank, found.alpha, targets=found.targets)
        policy.load_adapter(folder)

    return read


def checkpoint(folder: Path) -> Read:
    make_small_checkpoint(folder, l1_head=True)

    def read(folder: Path) -> None:
        policy = Policy.load(str(folder), task_suite=SUITE, lora_rank=2)
        observation = synthetic_observations(policy, 1)
        policy.act(observation)
        if policy.action_head is not None:
            policy.act(observation, mode="l1")

    return read


def merging(folder: Path) -> Read:
    policy = small_policy(folder.with_name(f"{folder.name}_base"))
    policy.save_adapter(folder)
    (folder / "metadata.json").write_text(json.dumps({"global_step": 300, "score": 0.5, "eval/student_success": 0.75}))
    base = str(policy.info.folder)

    def read(folder: Path) -> None:
        out = folder.with_name("merged")
        shutil.rmtree(out, ignore_errors=True)
        merge(folder, out, base)

    return read


def model_card(folder: Path) -> Read:
    folder.mkdir()
    shutil.copyfile(PROJECT / "checkpoints" / "tiny-libero-spatial" / RUN_FILE, folder / RUN_FILE)
    write_record(folder, {"step": 1, "loss": 0.5, "accuracy": 0.5, "xyz_bin_error": 1.0})

    def read(folder: Path) -> None:
        write_card(folder).unlink()
        read_records(folder)

    return read
