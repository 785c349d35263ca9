"""Frozen weights of 8 bits: the products, what arrives of an adapter, and what an adapter remembers of them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from vla.adapter_folder import read_adapter
from vla.eight_bits import FORMATS, gradient, product, quantise
from vla.loading import LoadOptions
from vla.lora import AdaptedLayers, LoraLinear
from vla.policy import Policy
from vla.preprocessing import synthetic_observations

BUNDLED = Path(__file__).resolve().parent.parent / "checkpoints" / "tiny-libero-spatial"
SUITE = "libero_spatial"
formats = pytest.mark.parametrize("name", FORMATS)


@formats
def test_rows_come_back_within_half_a_step(name):
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 16)[:, None]
    small, scale = quantise(x, FORMATS[name])
    error = (small.float() * scale - x).abs()
    # int8: 1/254 of the row's largest number; e4m3: 3 bits after the point, and at the least 2^-10 of its unit
    limit = scale / 2 if name == "int8" else torch.maximum(x.abs() / 16, scale / 1024)
    assert (error <= limit * 1.0001).all()


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradients_are_those_of_the_widened_weights(name, dtype):
    """But for the rounding of x, against a layer whose weights are what the 8 bits say."""
    torch.manual_seed(0)
    bases = [nn.Linear(64, size, bias=False).requires_grad_(False) for size in (32, 48)]
    small = [quantise(base.weight, FORMATS[name]) for base in bases]
    eight = [nn.Linear(64, size, bias=False).requires_grad_(False) for size in (32, 48)]
    for base, wide, (weight, scale) in zip(eight, bases, small, strict=True):
        base.weight, base.weight_scale = nn.Parameter(weight, requires_grad=False), scale[:, 0]
        wide.weight.copy_(weight.float() * scale)
    x = torch.randn(2, 5, 64)
    ours, theirs = (LoraLinear(some, 4, 8, dtype) for some in (eight, [base.to(dtype) for base in bases]))
    found = []
    for layer in (ours, theirs):
        for matrix, seed in ((layer.lora_A, 1), (layer.lora_B, 2)):
            matrix.data.normal_(generator=torch.Generator().manual_seed(seed))
        AdaptedLayers([("", layer)]).refresh()
        given = x.to(dtype).requires_grad_()
        out = layer(given)
        found.append((out, *torch.autograd.grad(out.square().sum(), (given, layer.lora_A, layer.lora_B))))
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() / other.norm() < 0.05
    wide = ours.weight.float() * ours.weight_scale[:, None]
    grad = torch.randn(3, 80).to(dtype)
    torch.testing.assert_close(
        gradient(grad, ours.weight, ours.weight_scale).float(), grad.float() @ wide, rtol=0.05, atol=0.05
    )
    assert (product(x, ours.weight, ours.weight_scale) - x @ wide.T).norm() < 0.04 * (x @ wide.T).norm()


@formats
def test_the_network_stays_close_and_a_small_step_arrives(name):
    """The step that `check_learning` promises; half the difference between it and its opposite."""
    policy, exact = (
        Policy.load(str(BUNDLED), LoadOptions(task_suite=SUITE, device="cpu", frozen_weights=w))
        for w in (name, "float32")
    )
    seen = synthetic_observations(policy.num_images, policy.statistics.proprio, 8)
    gains, logits = [], []
    for one in (exact, policy):
        logits.append(one.chunk_logits(seen).detach())
        moved = []
        for sign in (1, -1):
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for matrix, parameter in one.named_trainable_parameters():
                    if matrix.endswith("lora_B"):
                        step = 2e-3 * torch.randn(parameter.shape, generator=generator).sign()
                        parameter.copy_(sign * step)
            moved.append(one.chunk_logits(seen).detach())
        gains.append((moved[0] - moved[1]).flatten() / 2)
    share = (gains[0] @ gains[1] / gains[0].square().sum()).item()
    assert 0.8 < share < 1.2
    kl = (logits[0].softmax(-1) * (logits[0].log_softmax(-1) - logits[1].log_softmax(-1))).sum(-1).mean()
    assert kl < {"int8": 0.05, "fp8": 0.5}[name]
    assert policy.network.language_model.model.layers[0].mlp.down_proj.weight.dtype == FORMATS[name]


def test_an_adapter_remembers_what_it_was_trained_on(tmp_path, caplog):
    trained = Policy.load(str(BUNDLED), LoadOptions(task_suite=SUITE, device="cpu", frozen_weights="int8"))
    trained.save_adapter(tmp_path)
    assert read_adapter(tmp_path).frozen_weights == "int8"
    assert Policy.load(str(tmp_path), LoadOptions(task_suite=SUITE, device="cpu")).frozen_weights == "int8"
    assert not caplog.records
    other = Policy.load(str(tmp_path), LoadOptions(task_suite=SUITE, device="cpu", frozen_weights="float32"))
    assert other.frozen_weights == "float32"
    assert "trained on weights in int8: on float32 it is another policy" in caplog.text
