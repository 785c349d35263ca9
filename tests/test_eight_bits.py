"""Frozen weights of 8 bits: the products, what arrives of an adapter, and what an adapter remembers of them."""

import pytest
import torch
from torch import nn

from tests.small_checkpoint import BUNDLED, change_by_a_step, load_policy
from vla.adapter_folder import read_adapter
from vla.adapters import AdaptedLayers
from vla.eight_bits import FORMATS, quantise
from vla.lora import LoraLinear
from vla.preprocessing import synthetic_observations

formats = pytest.mark.parametrize("name", FORMATS)


@formats
def test_rows_come_back_within_half_a_step(name):
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 16)[:, None]
    quantised, scale = quantise(x, FORMATS[name])
    error = (quantised.float() * scale - x).abs()
    # int8: 1/254 of the row's largest number; e4m3: 3 bits after the point, and at the least 2^-10 of its unit
    limit = scale / 2 if name == "int8" else torch.maximum(x.abs() / 16, scale / 1024)
    assert (error <= limit * 1.0001).all()


def layers_of_8_bits_and_widened(name, dtype) -> tuple[LoraLinear, LoraLinear]:
    """A layer of 8-bit weights, and one whose weights are what the 8 bits say; with the same adapters."""
    bases: tuple[list[nn.Linear], list[nn.Linear]] = ([], [])
    for size in (32, 48):
        quantised, widened = (nn.Linear(64, size, bias=False).requires_grad_(False) for _ in range(2))
        weight, scale = quantise(quantised.weight, FORMATS[name])
        quantised.weight = nn.Parameter(weight, requires_grad=False)
        quantised.weight_scale = scale[:, 0]
        widened.weight.copy_(weight.float() * scale)
        bases[0].append(quantised)
        bases[1].append(widened.to(dtype))
    layers = [LoraLinear(linears, 4, 8, dtype) for linears in bases]
    for layer in layers:
        layer.lora_A.data.normal_(generator=torch.Generator().manual_seed(1))
        layer.lora_B.data.normal_(generator=torch.Generator().manual_seed(2))
        AdaptedLayers([("", layer)]).refresh()
    return layers[0], layers[1]


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradients_are_those_of_the_widened_weights(name, dtype):
    """But for the rounding of x."""
    torch.manual_seed(0)
    layer, widened = layers_of_8_bits_and_widened(name, dtype)
    x = torch.randn(2, 5, 64)
    results = []
    for one in (layer, widened):
        layer_input = x.to(dtype).requires_grad_()
        output = one(layer_input)
        gradients = torch.autograd.grad(output.square().sum(), (layer_input, one.lora_A, one.lora_B))
        results.append((output, *gradients))
    for result, expected in zip(*results, strict=True):
        assert (result - expected).norm() / expected.norm() < 0.05


@formats
def test_the_network_stays_close_and_a_small_step_arrives(name, monkeypatch):
    """Half the difference between a step and its opposite; a smaller step drowns in the rounding of fp8.

    There are so many observations that rounding averages out. torch's own product of fp8 matrices would take minutes
    on a CPU; in float32 the products are as exact.
    """
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, *_, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    start_logits = []
    changes = []
    for frozen_weights in ("float32", name):
        policy = load_policy(BUNDLED, frozen_weights=frozen_weights, lora_rank=16)
        observations = synthetic_observations(policy.num_images, policy.statistics.proprio, 64)
        start_logits.append(policy.chunk_logits(observations).detach())
        changes.append(change_by_a_step(policy, observations, 8e-3))
    exact, quantised = changes
    share = (exact @ quantised / exact.square().sum()).item()
    assert 0.8 < share < 1.2
    exact_logprobs, quantised_logprobs = (logits.log_softmax(-1) for logits in start_logits)
    kl = (exact_logprobs.exp() * (exact_logprobs - quantised_logprobs)).sum(-1).mean()
    assert kl < {"int8": 0.01, "fp8": 0.1}[name]
    assert policy.network.language_model.model.layers[0].mlp.down_proj.weight.dtype == FORMATS[name]


def test_an_adapter_remembers_what_it_was_trained_on(tmp_path, caplog):
    load_policy(BUNDLED, frozen_weights="int8").save_adapter(tmp_path)
    assert read_adapter(tmp_path).frozen_weights == "int8"
    assert load_policy(tmp_path).frozen_weights == "int8"
    assert not caplog.records
    assert load_policy(tmp_path, frozen_weights="float32").frozen_weights == "float32"
    assert "trained on weights in int8" in caplog.text
