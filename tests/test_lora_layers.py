"""The adapted layers compute W x + b + alpha / rank * B (A x), and its gradient, for every map that they hold."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vla.lora_layers import LoraConv2d, LoraLinear, LoraNf4Linear, StoredAdapters, _Augmented
from vla.nf4 import Nf4Linear

RANK, ALPHA = 3, 5


def make_layer(adapted=(True, False, True), bias=True, dtype=torch.float32):
    """A layer of maps from 7 to 4, 6 and 5, its bases, and adapters that are not zero."""
    torch.manual_seed(0)
    bases = [nn.Linear(7, size, bias=bias, dtype=dtype) for size in (4, 6, 5)[: len(adapted)]]
    layer = LoraLinear(bases, adapted, RANK, ALPHA)
    with torch.no_grad():
        layer.lora_A.normal_()
        layer.lora_B.normal_()
    StoredAdapters([layer]).refresh()
    return layer, bases


def formula(layer, bases, x, down, up):
    """Map by map, from the definition."""
    outputs, row = [], 0
    downs = iter(down.split(RANK))
    for base, has_adapter in zip(bases, layer.adapted, strict=True):
        y = F.linear(x, base.weight, base.bias)
        if has_adapter:
            y = y + ALPHA / RANK * (x @ next(downs).T) @ up[row : row + base.out_features].T
            row += base.out_features
        outputs.append(y)
    return torch.cat(outputs, dim=-1)


@pytest.mark.parametrize("adapted", [(True,), (True, True, True), (True, False, True), (False, True)])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_the_definition(adapted, bias):
    layer, bases = make_layer(adapted, bias)
    x = torch.randn(2, 5, 7)
    ours = [x.clone().requires_grad_(), layer.lora_A, layer.lora_B]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    weighting = torch.randn(2, 5, sum(layer.out_features))
    y = layer(ours[0])
    expected = formula(layer, bases, *theirs)
    torch.testing.assert_close(y, expected)
    got = torch.autograd.grad((y * weighting).sum(), ours)
    torch.testing.assert_close(got, torch.autograd.grad((expected * weighting).sum(), theirs))


def test_gradient_agrees_with_finite_differences():
    layer, _ = make_layer((True, True), dtype=torch.float64)
    layer.lora_A.data, layer.lora_B.data = layer.lora_A.double(), layer.lora_B.double()

    def output(x, down, up):
        layer.lora_A.data, layer.lora_B.data = down.detach(), up.detach()
        StoredAdapters([layer]).refresh()
        return _Augmented.apply(x, down, up, layer.rounded_A, layer.weight, layer.bias, layer.blocks, layer.scale)

    inputs = [torch.randn(3, 7, dtype=torch.float64), layer.lora_A.detach().clone(), layer.lora_B.detach().clone()]
    assert torch.autograd.gradcheck(output, [t.requires_grad_() for t in inputs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the latter stands for all that A is rounded to
@pytest.mark.parametrize("matrix", ["lora_A", "lora_B"])
def test_a_change_of_the_adapters_is_seen_after_a_refresh(dtype, matrix):
    layers = [make_layer(adapted, dtype=dtype) for adapted in ((True,), (True, False, True))]
    stored = StoredAdapters([layer for layer, _ in layers])
    x = torch.randn(4, 7, dtype=dtype)
    with torch.no_grad():
        for layer, bases in layers:
            before = layer(x)
            getattr(layer, matrix).add_(1)
            stored.refresh()
            assert not torch.equal(layer(x), before)
            expected = formula(layer, bases, x, layer.lora_A.to(dtype), layer.lora_B.to(dtype))
            torch.testing.assert_close(layer(x).float(), expected.float())  # the adapters have no more digits


def test_disabled_layer_is_its_bases():
    layer, bases = make_layer()
    layer.enabled = False
    x = torch.randn(4, 7)
    torch.testing.assert_close(layer(x), torch.cat([base(x) for base in bases], dim=-1))


def test_gradients_of_several_forward_passes_add_up():
    layer, _ = make_layer((True, True))
    x = torch.randn(6, 7)
    layer(x).square().sum().backward()
    whole = layer.lora_A.grad.clone(), layer.lora_B.grad.clone()
    layer.zero_grad()
    for part in x.split(2):
        layer(part).square().sum().backward()
    torch.testing.assert_close((layer.lora_A.grad, layer.lora_B.grad), whole, rtol=1e-5, atol=1e-4)


def test_bfloat16_products_have_float32_adapters_and_gradients():
    layer, bases = make_layer((True, True), dtype=torch.bfloat16)
    x = torch.randn(8, 7, dtype=torch.bfloat16)
    y = layer(x)
    assert y.dtype == torch.bfloat16
    for base in bases:
        base.float()
    torch.testing.assert_close(
        y.float(), formula(layer, bases, x.float(), layer.lora_A, layer.lora_B), rtol=2e-2, atol=0.1
    )
    y.sum().backward()
    assert {layer.lora_A.grad.dtype, layer.lora_B.grad.dtype} == {torch.float32}


def test_convolution_is_the_linear_layer_of_its_patches():
    torch.manual_seed(0)
    base = nn.Conv2d(3, 6, kernel_size=4, stride=4)
    layer = LoraConv2d(base, RANK, ALPHA)
    with torch.no_grad():
        layer.lora_A.normal_()
        layer.lora_B.normal_()
    images = torch.randn(2, 3, 8, 12)
    patches = F.unfold(images, 4, stride=4).transpose(1, 2)  # (2, 6 patches, 48)
    linear = nn.Linear(48, 6)
    linear.weight.data, linear.bias.data = base.weight.flatten(1), base.bias
    expected = linear(patches) + ALPHA / RANK * (patches @ layer.lora_A.flatten(1).T) @ layer.lora_B.flatten(1).T
    torch.testing.assert_close(layer(images).flatten(2).transpose(1, 2), expected)


@pytest.mark.parametrize("kind", ["linear", "convolution", "4 bits"])
def test_what_an_adapter_adds_is_not_swallowed_by_rounding(kind):
    """Far below the last digit of an output, it still moves the outputs by as much on average."""
    torch.manual_seed(0)
    tiny = 2e-4  # of outputs around 1, whose last digit in bfloat16 is 4e-3 to 8e-3
    if kind == "linear":
        layer, x = LoraLinear([nn.Linear(64, 256, dtype=torch.bfloat16)], [True], 1, 1), torch.ones(512, 64)
    elif kind == "4 bits":
        pytest.importorskip("bitsandbytes")
        layer, x = LoraNf4Linear(Nf4Linear(torch.randn(256, 64).bfloat16() / 8), 1, 1), torch.ones(512, 64)
    else:
        layer, x = LoraConv2d(nn.Conv2d(1, 256, 8, 8, dtype=torch.bfloat16), 1, 1), torch.ones(512, 1, 8, 8)
    x = (x + torch.randn_like(x)).bfloat16()
    with torch.no_grad():
        layer.lora_A.fill_(1 / 64)  # 1 for the average row
        before = layer(x).double()
        layer.lora_B.fill_(tiny)
        if isinstance(layer, LoraLinear):
            StoredAdapters([layer]).refresh()
        added = (layer(x).double() - before).mean().item()
    assert added == pytest.approx(tiny, rel=0.2)


@pytest.mark.parametrize("bias", [True, False])
def test_a_compiled_pass_without_gradient_is_the_same(bias):
    """It puts A x beside x in place."""
    layer, _ = make_layer((True, False, True), bias)
    x = torch.randn(2, 5, 7)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    torch.testing.assert_close(compiled(x), layer(x))  # with gradient
