"""What fine-tuning writes is a checkpoint like any other."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from errors import BadInput
from tests.small_checkpoint import SMALL, make_small_checkpoint
from untrusted.json_file import read_json
from vla.checkpoint import inspect_checkpoint
from vla.policy import Policy
from vla.probes import synthetic_observations
from vla.sft_checkpoint import initial_checkpoint, load_trainable, network_facts, save_policy
from vla.weights import read_header

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def init(tmp_path_factory):
    return inspect_checkpoint(make_small_checkpoint(tmp_path_factory.mktemp("init") / "checkpoint", l1_head=True))


@pytest.fixture(scope="module")
def statistics(init):
    entry = read_json(init.folder / "dataset_statistics.json")["libero_goal_no_noops"]
    return {"libero_spatial_no_noops": entry}


@pytest.fixture
def network(init):
    """Not `init`'s weights, so that a folder that holds those cannot pass for the saved one."""
    network = load_trainable(init, CPU)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return network


def test_the_saved_policy_has_the_logits_of_the_network_in_memory(tmp_path, init, network, statistics):
    save_policy(tmp_path / "out", network, init, statistics, torch.float32)
    policy = Policy.load(str(tmp_path / "out"), task_suite="libero_spatial")
    observations = synthetic_observations(policy)
    with torch.no_grad():
        expected, _ = network(*policy.model_inputs(observations))
        torch.testing.assert_close(policy.chunk_logits(observations), expected, rtol=1e-5, atol=1e-5)


def test_rounding_to_bfloat16_moves_logits_by_less_than_a_tenth(tmp_path, init, network, statistics):
    save_policy(tmp_path / "out", network, init, statistics, torch.bfloat16)
    policy = Policy.load(str(tmp_path / "out"), task_suite="libero_spatial")
    observations = synthetic_observations(policy)
    with torch.no_grad():
        expected, _ = network(*policy.model_inputs(observations))
        difference = (policy.chunk_logits(observations) - expected).abs().max()
    assert 0 < difference < 0.1


def test_the_folder_says_what_it_is(tmp_path, init, network, statistics):
    folder = tmp_path / "out"
    save_policy(folder, network, init, statistics, torch.bfloat16)
    info = inspect_checkpoint(folder)
    assert (info.kind, info.num_images, info.uses_proprio) == ("action tokens", 2, True)  # without init's L1 head
    assert list(info.statistics) == ["libero_spatial_no_noops"]
    np.testing.assert_array_equal(
        info.statistics["libero_spatial_no_noops"].action.q99, init.statistics["libero_goal_no_noops"].action.q99
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["norm_stats"] == statistics
    assert (config["torch_dtype"], config["text_config"]["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert {tensor.dtype for tensor in read_header(folder / "model.safetensors")[0].values()} == {"BF16"}
    for file in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / file).read_bytes() == (init.folder / file).read_bytes()


def test_random_weights_have_the_sizes_and_seed_given():
    weights = []
    for seed in (0, 0, 1):
        with initial_checkpoint(None, SMALL, 1, seed) as info:
            network = load_trainable(info, CPU)
            assert info.num_images == 1
            facts = network_facts(network, info)
        assert facts["image_size"] == SMALL.image_size
        assert facts["image_tokens"] == (SMALL.image_size // SMALL.patch_size) ** 2
        assert facts["vocabulary_parameters"] == 2 * 32064 * SMALL.llm_dim
        weights.append(network.projector.fc1.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not info.folder.exists()  # it was temporary


def test_sizes_that_fit_no_network_are_refused():
    with (
        pytest.raises(BadInput, match="--size"),
        initial_checkpoint(None, replace(SMALL, vision_dim=17), 1, seed=0),
    ):
        pass


def test_a_checkpoint_with_other_chunks_is_refused(tmp_path):
    folder = make_small_checkpoint(tmp_path / "other")
    config = read_json(folder / "config.json") | {"num_action_chunks": 5}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="chunks"), initial_checkpoint(str(folder), SMALL, None, seed=0):
        pass
