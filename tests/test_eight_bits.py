"""Frozen weights of int8: the products, what arrives of an adapter, and what an adapter remembers of them."""

import pytest
import torch
from torch import nn

from tests.small_checkpoint import BUNDLED, change_by_a_step, load_policy
from vla.adapters import AdaptedLayers
from vla.eight_bits import quantise
from vla.lora import LoraLinear
from vla.preprocessing import synthetic_observations


def test_rows_come_back_within_half_a_step():
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 16)[:, None]
    quantised, scale = quantise(x)
    error = (quantised.float() * scale - x).abs()
    assert (error <= scale / 2 * 1.0001).all()


def layers_of_int8_and_widened(dtype) -> tuple[LoraLinear, LoraLinear]:
    """A layer of int8 weights, and one whose weights are what these say; with the same adapters."""
    bases: tuple[list[nn.Linear], list[nn.Linear]] = ([], [])
    for size in (32, 48):
        quantised, widened = (nn.Linear(64, size, bias=False).requires_grad_(False) for _ in range(2))
        weight, scale = quantise(quantised.weight)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradients_are_those_of_the_widened_weights(dtype):
    """But for the rounding of x."""
    torch.manual_seed(0)
    layer, widened = layers_of_int8_and_widened(dtype)
    x = torch.randn(2, 5, 64)
    results = []
    for one in (layer, widened):
        layer_input = x.to(dtype).requires_grad_()
        output = one(layer_input)
        gradients = torch.autograd.grad(output.square().sum(), (layer_input, one.lora_A, one.lora_B))
        results.append((output, *gradients))
    for result, expected in zip(*results, strict=True):
        assert (result - expected).norm() / expected.norm() < 0.05


def test_the_network_stays_close_and_a_small_step_arrives():
    """Half the difference between a step and its opposite, over so many observations that rounding averages out."""
    start_logits = []
    changes = []
    for frozen_weights in ("float32", "int8"):
        policy = load_policy(BUNDLED, frozen_weights=frozen_weights, lora_rank=16)
        observations = synthetic_observations(policy.num_images, policy.statistics.proprio, 16)
        start_logits.append(policy.chunk_logits(observations).detach())
        changes.append(change_by_a_step(policy, observations, 8e-3))
    exact, quantised = changes
    share = (exact @ quantised / exact.square().sum()).item()
    assert 0.8 < share < 1.2
    exact_logprobs, quantised_logprobs = (logits.log_softmax(-1) for logits in start_logits)
    kl = (exact_logprobs.exp() * (exact_logprobs - quantised_logprobs)).sum(-1).mean()
    assert kl < 0.01
    assert policy.network.language_model.model.layers[0].mlp.down_proj.weight.dtype == torch.int8
