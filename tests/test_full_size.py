"""A small policy's folder is grown into a larger one that decides alike, is read like any checkpoint, and is dense."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.full_size import CONFIG, build_on_meta, write_grown
from benchmarks.growing import check_sizes
from contracts import BadInput, read_json, write_json
from tests.small_checkpoint import GROWABLE, GROWN, load_policy
from vla.policy import Policy
from vla.preprocessing import synthetic_observations
from workshop.sft_config import TinySize
from workshop.tiny import make_tiny_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> dict[str, object]:
    """The config.json of a medium network, whose vision transformers have different widths, as those of the 7B."""
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("medium"), size=GROWN)
    config = read_json(folder / "config.json")
    config["test_vit_overrides"][1]["embed_dim"] = 96
    return config


@pytest.fixture(scope="module")
def small_l1(tmp_path_factory) -> Path:
    """A policy of two images and robot state, with an L1 head, that has seen low-poly pictures."""
    folder = make_tiny_checkpoint(
        tmp_path_factory.mktemp("small"), torch.bfloat16, size=GROWABLE, l1_head=True
    )
    write_json(folder / "config.json", read_json(folder / "config.json") | {"looks": ["lowpoly"]})
    return folder


@pytest.fixture(scope="module")
def small_token(tmp_path_factory) -> Path:
    """A policy of one image, without robot state and L1 head."""
    folder = tmp_path_factory.mktemp("token")
    return make_tiny_checkpoint(folder, torch.bfloat16, size=GROWABLE, num_images=1, proprio=False)


@pytest.fixture(scope="module")
def grown(small_l1, target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("grown")
    write_grown(small_l1, folder, target, noise=0.0, seed=0, device=CPU)
    return folder


def equal_greedy_tokens(first: Policy, second: Policy) -> float:
    """The share of greedy tokens on which two policies agree."""
    observations = synthetic_observations(first.num_images, first.statistics.proprio)
    return (first.act(observations).tokens == second.act(observations).tokens).float().mean().item()


def test_a_grown_policy_reads_and_decides_as_the_small_one(small_l1, small_token, grown, target, tmp_path):
    write_grown(small_token, tmp_path, target, noise=0.0, seed=0, device=CPU)
    for small_folder, grown_folder in ((small_l1, grown), (small_token, tmp_path)):
        small = load_policy(small_folder)
        large = load_policy(grown_folder)
        assert large.num_images == small.num_images
        assert large.info.uses_proprio == small.info.uses_proprio
        assert large.info.kind == small.info.kind
        assert large.info.looks == small.info.looks
        # Its weights are rounded to bfloat16, so near ties may be decided differently.
        assert equal_greedy_tokens(small, large) > 0.9


def matrices(folder: Path) -> dict[str, torch.Tensor]:
    """All weights that are no vectors, as (out, in)."""
    tensors = load_file(folder / "model.safetensors")
    for path in folder.glob("*.pt"):
        tensors |= torch.load(path, weights_only=True)
    return {name: tensor.flatten(1).float() for name, tensor in tensors.items() if tensor.ndim > 1}


def repeated_rows(matrix: torch.Tensor) -> int:
    return len(matrix) - len(matrix.unique(dim=0))


def test_noise_leaves_no_zero_and_no_repeated_row_or_column(small_l1, grown, target, tmp_path):
    write_grown(small_l1, tmp_path, target, noise=0.02, seed=0, device=CPU)
    o_proj = matrices(grown)["language_model.model.layers.0.self_attn.o_proj.weight"]
    assert repeated_rows(o_proj) == 96
    assert (o_proj == 0).any()
    for name, matrix in matrices(tmp_path).items():
        assert (matrix == 0).float().mean() < 1e-5, name
        assert repeated_rows(matrix) == 0, name
        if len(matrix) > 3:  # columns of fewer numbers are equal by chance
            assert repeated_rows(matrix.T) == 0, name


def test_a_policy_of_another_geometry_is_refused_before_anything_is_written(small_l1, tmp_path):
    with pytest.raises(BadInput, match="image-size"):
        write_grown(small_l1, tmp_path / "grown", CONFIG, noise=0.02, seed=0, device=CPU)
    assert not (tmp_path / "grown").exists()


def test_a_policy_of_the_true_geometry_is_accepted(tmp_path):
    """The sizes that the refusal names fit into the 7B: only shapes are compared, no 7B is built."""
    size = TinySize(224, 14, vision_dim=64, llm_dim=256, llm_heads=2)
    folder = make_tiny_checkpoint(tmp_path / "small", size=size, num_images=1, proprio=False)
    small = build_on_meta(read_json(folder / "config.json"))
    check_sizes(small, build_on_meta(CONFIG))
