"""A grown network computes what the small one does, from two images and robot state; its checkpoint is dense."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.full_size import write_large
from benchmarks.growing import grow
from contracts import read_json
from tests.small_checkpoint import GROWABLE, GROWN, load_policy
from vla.heads import ProprioProjector
from vla.model import OpenVLAOFT
from vla.network_config import read_network_config
from vla.preprocessing import synthetic_observations
from workshop.sft_config import TinySize
from workshop.tiny import make_tiny_checkpoint


def random_network(
    folder: Path, size: TinySize, seed: int, second_vision_dim: int | None = None
) -> OpenVLAOFT:
    make_tiny_checkpoint(folder, seed=seed, size=size)
    if second_vision_dim is not None:  # as in OpenVLA, whose two vision transformers have 1024 and 1152
        config = json.loads((folder / "config.json").read_text())
        config["test_vit_overrides"][1]["embed_dim"] = second_vision_dim
        (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    network = OpenVLAOFT(read_network_config(folder), num_action_tokens=56).eval()
    network.proprio_projector = ProprioProjector(8, size.llm_dim)
    randomise(network)
    return network


@torch.no_grad()
def randomise(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter[0].numel() ** -0.5)
        elif name.endswith(("weight", "gamma")):
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, 0.1)


@torch.no_grad()
def test_a_grown_network_has_the_logits_of_the_small_one(tmp_path):
    small = random_network(tmp_path / "small", GROWABLE, seed=0)
    large = random_network(tmp_path / "large", GROWN, seed=1, second_vision_dim=96)
    grow(small, large)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(3, 12, 56, 56, generator=generator)
    prompts = torch.randint(3, 1000, (3, 12), generator=generator)
    proprio = torch.randn(3, 8, generator=generator)
    inputs = (images, prompts, torch.tensor([12, 9, 7]), proprio)
    expected, small_hidden = small(*inputs)
    logits, hidden = large(*inputs)
    assert (logits - expected).abs().max() < 1e-4 * expected.std()
    torch.testing.assert_close(hidden, small_hidden.repeat(1, 1, 4), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("policy"), torch.bfloat16, size=GROWABLE)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> dict[str, object]:
    return read_json(make_tiny_checkpoint(tmp_path_factory.mktemp("medium"), size=GROWN) / "config.json")


def test_a_grown_checkpoint_is_read_and_decides_as_the_small_one(small_folder, target, tmp_path):
    write_large(small_folder, tmp_path, target, noise=0.0, seed=0, device=torch.device("cpu"))
    small = load_policy(small_folder)
    large = load_policy(tmp_path)
    observations = synthetic_observations(small.num_images, small.statistics.proprio)
    # The weights are rounded to bfloat16, so near ties may be decided differently.
    assert (large.act(observations).tokens == small.act(observations).tokens).float().mean() > 0.9


def test_noise_leaves_no_zero_and_no_repeated_row_or_column(small_folder, target, tmp_path):
    write_large(small_folder, tmp_path, target, noise=0.02, seed=0, device=torch.device("cpu"))
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if tensor.ndim > 1:
            matrix = tensor.flatten(1).float()
            assert (matrix == 0).float().mean() < 1e-5, name
            assert len(matrix.unique(dim=0)) == len(matrix), name
            if len(matrix) > 3:  # columns of fewer numbers are equal by chance
                assert len(matrix.T.unique(dim=0)) == len(matrix.T), name
