"""LoRA layers against their definition, and adapters on a network."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.small_checkpoint import load_small_network, network_inputs
from tests.test_checkpoint import PUBLIC_CONFIG
from vla.adapters import AdaptedLayers, add_lora
from vla.heads import ProprioProjector
from vla.lora import LoraConv2d, LoraLinear
from vla.model import OpenVLAOFT
from vla.network_config import read_network_config

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 5e-2}}
RANK = 3
ALPHA = 5


# Layers compute W x + b + alpha / rank * B (A x), and its gradient, for every map that they hold


def make_layer(sizes: tuple[int, ...], bias: bool) -> tuple[LoraLinear, list[nn.Linear]]:
    """A layer of maps of 7 features, with adapters that are not zero, and its bases."""
    torch.manual_seed(0)
    bases = [nn.Linear(7, size, bias=bias) for size in sizes]
    layer = LoraLinear(bases, RANK, ALPHA, torch.float32)
    nn.init.normal_(layer.lora_A)
    nn.init.normal_(layer.lora_B)
    AdaptedLayers([("", layer)]).refresh()  # the copies of the adapters that the products read
    return layer, bases


def by_definition(bases, x, lora_A, lora_B):
    """The layer's output, map by map."""
    outputs = []
    Bs = lora_B.split([base.out_features for base in bases])
    for base, A, B in zip(bases, lora_A.split(RANK), Bs, strict=True):
        outputs.append(base(x) + ALPHA / RANK * (x @ A.T) @ B.T)
    return torch.cat(outputs, -1)


@pytest.mark.parametrize("sizes", [(4,), (4, 6, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_the_definition(sizes, bias):
    layer, bases = make_layer(sizes, bias)
    x = torch.randn(2, 5, 7)
    weighting = torch.randn(2, 5, sum(sizes))
    layer_inputs = [x.clone().requires_grad_(), layer.lora_A, layer.lora_B]
    inputs = [tensor.detach().clone().requires_grad_() for tensor in layer_inputs]
    output = layer(layer_inputs[0])
    expected = by_definition(bases, *inputs)
    torch.testing.assert_close(output, expected)
    gradients = torch.autograd.grad((output * weighting).sum(), layer_inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * weighting).sum(), inputs))


def test_convolution_is_the_linear_layer_of_its_patches():
    torch.manual_seed(0)
    base = nn.Conv2d(3, 6, kernel_size=4, stride=4)
    layer = LoraConv2d(base, RANK, ALPHA)
    nn.init.normal_(layer.lora_A)
    nn.init.normal_(layer.lora_B)
    images = torch.randn(2, 3, 8, 12)
    patches = F.unfold(images, 4, stride=4).transpose(1, 2)  # (2, 6 patches, 48)
    linear = nn.Linear(48, 6)
    linear.weight.data = base.weight.flatten(1)
    linear.bias.data = base.bias
    expected = by_definition([linear], patches, layer.lora_A.flatten(1), layer.lora_B.flatten(1))
    torch.testing.assert_close(layer(images).flatten(2).transpose(1, 2), expected)


@pytest.mark.parametrize("padding", [0, 6])  # torch.compile pads rows of awkward lengths
def test_the_operation_in_place_keeps_the_rules_of_torchs_compiler(padding):
    extended = torch.randn(2, 5, 10 + padding)[..., :10]
    lora_A = torch.randn(3, 7)
    torch.library.opcheck(torch.ops.vla_grpo.append_product, (extended, lora_A))
    expected = extended[..., :7] @ lora_A.T
    torch.ops.vla_grpo.append_product(extended, lora_A)
    torch.testing.assert_close(extended[..., 7:], expected)


# Networks


def test_full_size_network_has_the_reference_adapters(tmp_path):
    """439 modules: 24 and 27 blocks of 4, 5 of the pooling, 2 patch embeddings, 3 of the projector, 32 x 7, lm_head."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC_CONFIG))
    with torch.device("meta"):  # takes no memory
        full_size = OpenVLAOFT(read_network_config(tmp_path), 56)
        full_size.proprio_projector = ProprioProjector(8, 4096)
    base = {name: tensor for name, tensor in full_size.state_dict().items() if "proprio" not in name}
    assert len(base) == 982
    assert sum(tensor.numel() for tensor in base.values()) == 7_541_237_184
    map_names = [
        name
        for name, module in full_size.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and "proprio" not in name
    ]
    assert len(map_names) == 439
    matrices = add_lora(full_size, rank=16, alpha=16, dtype=torch.float32).named_matrices()
    assert list(matrices) == [f"{name}.{matrix}" for name in map_names for matrix in ("lora_A", "lora_B")]
    assert sum(matrix.numel() for matrix in matrices.values()) == 55_414_144


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fresh_adapters_change_no_logit(small_one_image, dtype):
    network = load_small_network(small_one_image, dtype)
    inputs = network_inputs()
    with torch.no_grad():
        before = network(*inputs)
        network.adapters = add_lora(network, rank=4, alpha=4, dtype=dtype)
        after = network(*inputs)
    # Not to the bit: maps that were several products are one, of another length.
    torch.testing.assert_close(after, before, **TOLERANCE[dtype])


def test_initialisation_is_a_function_of_the_seed(small_one_image):
    def fresh_A(seed):
        network = load_small_network(small_one_image)
        torch.manual_seed(torch.seed())  # the global generator must not matter
        matrices = add_lora(network, rank=4, alpha=4, dtype=torch.float32, seed=seed).named_matrices()
        return torch.cat([matrix.flatten() for name, matrix in matrices.items() if name.endswith("lora_A")])

    assert torch.equal(fresh_A(0), fresh_A(0))
    assert (fresh_A(0) == fresh_A(1)).float().mean() < 0.01
    assert fresh_A(0).std().item() == pytest.approx(1 / 4, rel=0.02)
