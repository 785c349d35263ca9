"""The policy through its only door: what acting and learning see of it, what learns, and what is saved."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from contracts import BadInput, Observation
from tests.llama_like import llama_like_tokenizer
from tests.small_checkpoint import (
    BUNDLED,
    change_by_a_step,
    every_kind,
    generators,
    load_policy,
    trained_policy,
)
from vla.preprocessing import synthetic_observations
from vla.tokens import decode, encode, to_env, token_logprobs

GOLDEN = Path(__file__).parent / "golden"


# Acting


@pytest.mark.parametrize("name", ["a_1img", "b_2img_proprio", "c_batch_1img", "d_batch_2img_proprio"])
def test_decisions_are_the_references_from_observations_to_actions(name, tmp_path):
    """Of openvla-oft and SimpleVLA-RL (tests/golden/README.md), by the tolerances of tests/test_model.py."""
    case = np.load(GOLDEN / f"case_{name}.npz")
    uses_proprio = name.endswith("proprio")
    left_out = shutil.ignore_patterns() if uses_proprio else shutil.ignore_patterns("proprio_projector*")
    folder = shutil.copytree(GOLDEN / "checkpoint", tmp_path / "checkpoint", ignore=left_out)
    llama_like_tokenizer().save(str(folder / "tokenizer.json"))
    policy = load_policy(folder)
    count = len(case["image_index"])
    states = np.atleast_2d(case["proprio_raw"]) if uses_proprio else np.zeros((count, 8))
    instructions = np.atleast_1d(case["tasks" if "tasks" in case else "task"])
    observations = []
    for indices, state, instruction in zip(case["image_index"], states, instructions, strict=True):
        images = np.stack([Image.open(GOLDEN / "images" / f"model_input_{i}.png") for i in indices])
        observations.append(Observation(images, state, str(instruction), prepared=True))

    logits = policy.chunk_logits(observations).detach().numpy()
    np.testing.assert_allclose(logits, case["logits_31744_32000"], rtol=0, atol=2e-4)
    acted = policy.act(observations, "greedy", float(case.get("temperature", 1.0)))
    np.testing.assert_array_equal(acted.tokens, case["greedy_last256"])
    if "responses" in case:
        np.testing.assert_array_equal(acted.actions, to_env(case["actions"]))
        np.testing.assert_allclose(acted.logprobs, case["logp_greedy"], rtol=0, atol=8e-5)
        tokens = torch.from_numpy(case["random_responses"])
        logprobs = token_logprobs(torch.from_numpy(logits), tokens, float(case["temperature"]))
        np.testing.assert_allclose(logprobs, case["logp_random"], rtol=0, atol=8e-5)
    chunk = case["normalized_actions_l1"].reshape(count, 56)
    rounded = decode(policy.act(observations, "l1").tokens)
    half_a_bin = 1 / 255
    assert np.abs(rounded - np.clip(chunk, -1, 1)).max() <= half_a_bin + 2e-4


@every_kind
@pytest.mark.parametrize("are_kept", [True, False])
def test_learning_reproduces_the_log_probabilities_of_acting_to_the_bit(small, observations, kind, are_kept):
    """From the observations, and from what a frozen trunk has kept of them."""
    policy = trained_policy(small, **kind)
    policy.kept_on = policy.device if are_kept else None
    for mode, temperature in (("greedy", 1.0), ("median", 1.0), ("sample", 1.6), ("l1", 1.6)):
        acted = policy.act(observations, mode, temperature, generators(3))
        whole, _ = policy.network(*policy.model_inputs(observations))
        for logits in (
            whole,
            policy.chunk_logits(observations),
            policy.chunk_logits(observations, acted.kept),
        ):
            assert torch.equal(token_logprobs(logits, acted.tokens, temperature).detach(), acted.logprobs)


def test_a_policy_whose_logits_are_no_numbers_does_not_act(policy, observations):
    _, parameter = policy.named_trainable_parameters()[-1]
    with torch.no_grad():
        parameter[:] = torch.nan
    with pytest.raises(BadInput, match="not finite"):
        policy.act(observations[:1], "sample", 1.0, generators(1))


def test_images_prepared_elsewhere_give_the_same_bits(policy, observations):
    prepare = policy.model_inputs.prepare_images
    elsewhere = [replace(one, images=prepare(one.images), prepared=True) for one in observations]
    assert torch.equal(policy.chunk_logits(elsewhere), policy.chunk_logits(observations))


@pytest.mark.parametrize(
    ("suite", "masked", "expected"),
    [
        ("libero_spatial", False, {-1, 1}),
        (None, False, {-1, 1}),
        ("own", True, {-1, 1}),
        ("own", False, {0, 1}),
    ],
)
def test_the_gripper_of_libero_is_binary_even_if_training_scaled_it(small, tmp_path, suite, masked, expected):
    folder = shutil.copytree(small, tmp_path / "checkpoint")
    path = folder / "dataset_statistics.json"
    entry = json.loads(path.read_text())["libero_spatial_no_noops"]
    entry["action"]["mask"][-1] = not masked
    path.write_text(json.dumps({"key": entry}))
    normalised = np.full((2, 8, 7), -1.0)  # closed
    normalised[1] = 1.0  # open
    closed, opened = load_policy(folder, task_suite=suite).env_actions(decode(encode(normalised)))[..., -1]
    assert {round(value) for value in (*closed, *opened)} == expected
    if expected == {-1, 1}:
        assert (opened == -1).all()


# Learning


def test_after_an_optimizer_step_the_policy_is_that_of_its_new_parameters(policy, small, observations):
    """Fused optimizers write to parameters behind autograd's back, and layers keep copies of their adapters."""
    optimizer = policy.make_optimizer(lr=1e-2, weight_decay=0.01)
    before = policy.chunk_logits(observations)
    before.log_softmax(-1)[..., 7].mean().backward()
    optimizer.step()
    fresh = load_policy(small)
    new_values = dict(policy.named_trainable_parameters())
    with torch.no_grad():
        for name, parameter in fresh.named_trainable_parameters():
            parameter.copy_(new_values[name])
    after = policy.chunk_logits(observations)
    assert torch.equal(after, fresh.chunk_logits(observations))
    assert (after - before).abs().max() > 0.01


def test_a_small_step_arrives_in_bfloat16():
    """Half the difference between a step and its opposite, over so many observations that rounding averages out.

    Where adapters are added to rounded outputs, as peft adds them, this share is 0.55.
    """
    changes = []
    for frozen_weights in ("float32", "bf16"):
        policy = load_policy(BUNDLED, frozen_weights=frozen_weights, lora_rank=16)
        observations = synthetic_observations(policy.num_images, policy.statistics.proprio, 32)
        changes.append(change_by_a_step(policy, observations, 4e-4))
    exact, rounded = changes
    share = (exact @ rounded / exact.square().sum()).item()
    assert 0.7 < share < 1.4


def test_only_adapters_and_proprio_projector_learn(policy, observations):
    trainable = dict(policy.named_trainable_parameters())
    assert all(".lora_" in name or name.startswith("proprio_projector.") for name in trainable)
    assert {parameter.dtype for parameter in trainable.values()} == {torch.float32}
    policy.chunk_logits(observations).square().sum().backward()
    with_gradient = {name for name, p in policy.network.named_parameters() if p.grad is not None}
    assert with_gradient <= trainable.keys()
    assert trainable["proprio_projector.fc1.weight"].grad.abs().max() > 0


# Saving and loading


@every_kind
def test_saved_adapter_gives_the_same_policy(small, observations, tmp_path, kind):
    policy = trained_policy(small, **kind)
    policy.save_adapter(tmp_path / "adapter")
    by_itself = load_policy(tmp_path / "adapter", lora_rank=16)
    resumed = load_policy(small, seed=7, **kind)
    resumed.load_adapter(tmp_path / "adapter")
    assert by_itself.network.trained_blocks == policy.network.trained_blocks
    assert by_itself.can_act_by_l1 is policy.is_laplace
    for other in (by_itself, resumed):
        assert torch.equal(other.chunk_logits(observations), policy.chunk_logits(observations))
        np.testing.assert_array_equal(
            other.act(observations, "l1").actions, policy.act(observations, "l1").actions
        )
        with other.teacher(), policy.teacher():
            assert torch.equal(other.chunk_logits(observations), policy.chunk_logits(observations))
