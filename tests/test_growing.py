"""A grown network computes what the small one does: two images, robot state, an L1 head."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.growing import add_noise, check_sizes, grow, grow_action_head
from tests.small_checkpoint import GROWABLE, GROWN
from vla.model import L1RegressionHead, OpenVLAOFT, ProprioProjector
from vla.network_config import read_network_config
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


@pytest.fixture(scope="module")
def networks(tmp_path_factory) -> tuple[OpenVLAOFT, OpenVLAOFT]:
    small = random_network(tmp_path_factory.mktemp("small"), GROWABLE, seed=0)
    large = random_network(tmp_path_factory.mktemp("large"), GROWN, seed=1, second_vision_dim=96)
    grow(small, large)
    return small, large


@pytest.fixture
def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(3, 12, 56, 56, generator=generator)
    prompts = torch.randint(3, 1000, (3, 12), generator=generator)
    lengths = torch.tensor([12, 9, 7])
    proprio = torch.randn(3, 8, generator=generator)
    return images, prompts, lengths, proprio


@torch.no_grad()
def test_a_grown_network_has_the_logits_of_the_small_one(networks, inputs):
    small, large = networks
    expected, small_hidden = small(*inputs)
    logits, hidden = large(*inputs)
    assert (logits - expected).abs().max() < 1e-4 * expected.std()
    torch.testing.assert_close(hidden, small_hidden.repeat(1, 1, 4), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_a_grown_l1_head_has_the_actions_of_the_small_one(networks, inputs):
    small, large = networks
    small_head = L1RegressionHead(2, 32, 32, action_dim=7)
    large_head = L1RegressionHead(2, 128, 96, action_dim=7)
    for head in (small_head, large_head):
        randomise(head)
    grow_action_head(small_head, large_head)
    expected = small_head(small(*inputs)[1])
    assert (large_head(large(*inputs)[1]) - expected).abs().max() < 1e-4 * expected.std()


@torch.no_grad()
def test_noise_is_as_large_beside_few_weights_as_beside_many():
    """Columns of zeros, which growing adds, must not make the noise on the other columns smaller."""
    weight = torch.zeros(100, 1000)
    weight[:, :50] = 3.0
    module = torch.nn.Linear(1000, 100)
    module.weight.copy_(weight)
    add_noise(module, 0.1, torch.Generator().manual_seed(0))
    noise = module.weight - weight
    assert noise[:, :50].std().item() == pytest.approx(0.3, rel=0.05)
    assert noise[:, 50:].std().item() == pytest.approx(0.3, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"image_size": 112}, "images of"),
        ({"vision_dim": 48}, "no multiple"),
        ({"llm_dim": 48}, "no multiple"),
        ({"llm_heads": 2}, "heads of"),
    ],
)
def test_sizes_that_cannot_grow_are_refused(networks, changes, part, tmp_path):
    with pytest.raises(ValueError, match=part):
        check_sizes(random_network(tmp_path, replace(GROWABLE, **changes), seed=0), networks[1])
