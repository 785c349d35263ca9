import pytest
import torch
from torch.nn import functional

from errors import BadInput
from tests.small_checkpoint import make_small_checkpoint
from vla.policy import Policy
from vla.probes import action_mass_probe, attention_probe, image_probe, synthetic_observations


@pytest.fixture
def policy(tmp_path):
    return Policy.load(str(make_small_checkpoint(tmp_path / "small")), task_suite="libero_spatial")


def test_a_sound_policy_passes_both_probes(policy):
    assert "bidirectional" in attention_probe(policy)
    assert "sees its images" in image_probe(policy)


def test_causal_attention_is_found(policy, monkeypatch):
    full = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *args, **_: full(*args, is_causal=True))
    with pytest.raises(BadInput, match="attention is causal"):
        attention_probe(policy)


def test_ignored_images_are_found(policy):
    with torch.no_grad():
        policy.network.projector.fc3.weight.zero_()
    with pytest.raises(BadInput, match="ignores its images"):
        image_probe(policy)


def test_untrained_token_head_is_found_only_where_it_matters(policy):
    (seen,) = synthetic_observations(policy, count=1)
    assert "action tokens" in action_mass_probe(policy, seen, must_be_trained=False)
    with pytest.raises(BadInput, match="was not trained on them"):
        action_mass_probe(policy, seen, must_be_trained=True)


def test_token_head_that_prefers_action_tokens_passes(policy):
    (seen,) = synthetic_observations(policy, count=1)
    _, hidden = policy.chunk_outputs([seen])
    towards = hidden.mean(dim=(0, 1)) / hidden.mean(dim=(0, 1)).norm()
    with torch.no_grad():
        head = policy.network.language_model.lm_head
        head.weight[31744:32000, : head.in_features] += 100 * towards
    assert "100.0 %" in action_mass_probe(policy, seen, must_be_trained=True)


def test_probes_need_no_proprio(tmp_path):
    folder = make_small_checkpoint(tmp_path / "one", num_images=1, proprio=False)
    policy = Policy.load(str(folder), task_suite="libero_spatial")
    assert attention_probe(policy)
    assert image_probe(policy)


def test_synthetic_observations_are_reproducible_and_in_range(policy):
    first, second = (synthetic_observations(policy, count=3, seed=4) for _ in range(2))
    proprio = policy.statistics.proprio
    for a, b in zip(first, second, strict=True):
        assert (a.images == b.images).all()
        assert (a.proprio == b.proprio).all()
        assert ((proprio.q01 <= a.proprio) & (a.proprio <= proprio.q99)).all()
    assert (first[0].images != first[1].images).any()
