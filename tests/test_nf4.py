"""4-bit weights are NF4 as its paper defines it; all else computes what it does on a weight rounded so."""

import sys
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import vla.nf4
from errors import BadInput
from tests.small_checkpoint import make_small_checkpoint
from vla.blocks import llama_block
from vla.checkpoint import inspect_checkpoint, load_network
from vla.lora import add_lora, lora_layers, named_adapters, num_frozen_parameters, refresh_adapters
from vla.lora_layers import LoraNf4Linear
from vla.merge import ROUNDED, merge
from vla.nf4 import Nf4Linear, block_linears, nf4_product, num_in_4bit
from vla.policy import Policy
from vla.probes import synthetic_observations
from vla.sharding import shard_blocks

pytest.importorskip("bitsandbytes", reason="an optional package that --load-in-4bit needs is not installed")

CPU = torch.device("cpu")
SUITE = "libero_spatial"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_small_checkpoint(tmp_path_factory.mktemp("nf4") / "small")


def network(folder, in_4bit, dtype=torch.float32):
    return load_network(inspect_checkpoint(folder), 56, CPU, dtype, in_4bit)


def policy(folder, **options):
    return Policy.load(str(folder), task_suite=SUITE, lora_rank=4, lora_alpha=8, **options)


def train_a_little(network, size=0.05):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, (_, up) in named_adapters(network):
            up.copy_(size * torch.randn(up.shape, generator=generator))
    refresh_adapters(network)


# the format


def levels() -> np.ndarray:
    """Section 3 of the paper: quantiles of a normal distribution, 7 below 0 and 8 above, scaled to -1..1."""
    outermost = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    left, right = (norm.ppf(np.linspace(outermost, 0.5, count))[:-1] for count in (8, 9))
    values = np.sort([*-left, 0.0, *right])
    return values / values.max()


@pytest.mark.parametrize("shape", [(96, 32), (64, 256), (48, 16), (10, 10), (513, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_becomes_the_nearest_level_times_the_maximum_of_its_block(shape, dtype):
    torch.manual_seed(0)
    weight = (torch.randn(shape) * torch.rand(shape[0], 1)).to(dtype)
    flat = np.pad(weight.float().numpy().ravel(), (0, -weight.numel() % 64)).reshape(-1, 64)
    maxima = np.abs(flat).max(1, keepdims=True)
    nearest = np.abs(flat[..., None] / maxima[..., None] - levels()).argmin(-1)
    expected = (levels()[nearest] * maxima).ravel()[: weight.numel()].reshape(shape)
    # Maxima less their mean are stored in 8 bits, whose widest step is 0.9 / 64 of the largest of them.
    rounding = 0.5 * 0.9 / 64 * np.abs(maxima - maxima.mean()).max() * 1.02 + 1e-6
    found = Nf4Linear(weight).dequantise(torch.float32).numpy()
    assert np.abs(found - expected).max() <= rounding


def test_a_weight_takes_little_more_than_4_bits():
    layer = Nf4Linear(torch.randn(512, 4096))
    assert 8 * sum(buffer.nbytes for buffer in layer.buffers()) / (512 * 4096) == pytest.approx(4.13, abs=0.01)
    assert not list(layer.parameters())
    assert num_in_4bit(nn.Sequential(layer, nn.Linear(3, 3))) == 512 * 4096


def test_rounding_does_not_depend_on_the_stored_dtype():
    weight = torch.randn(96, 64).bfloat16()
    one, other = Nf4Linear(weight), Nf4Linear(weight.float())
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))


# products and adapters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradient_are_those_of_the_unpacked_weight(dtype):
    torch.manual_seed(0)
    layer = Nf4Linear(torch.randn(96, 32, dtype=dtype))
    ours = torch.randn(2, 5, 32, dtype=dtype, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    y, expected = layer(ours), F.linear(theirs, layer.dequantise(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, grad) for out, x in ((y, ours), (expected, theirs))))


def test_the_operation_keeps_the_rules_of_torchs_compiler():
    layer = Nf4Linear(torch.randn(96, 32))
    for rows, transposed in ((32, False), (96, True)):
        x = torch.randn(3, rows, requires_grad=True)
        torch.library.opcheck(nf4_product, (x, None, None, *layer.buffers(), 96, 32, transposed))
    inputs = (torch.randn(shape, requires_grad=True) for shape in ((3, 32), (3, 5), (96, 5)))
    torch.library.opcheck(nf4_product, (*inputs, *layer.buffers(), 96, 32, False))


def test_it_counts_as_much_work_as_the_product_of_the_unpacked_weight():
    layer, x = Nf4Linear(torch.randn(96, 32)), torch.randn(2, 5, 32)
    counted = []
    for product in (layer, nn.Linear(32, 96, bias=False)):
        with FlopCounterMode(display=False) as counter:
            product(x)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


def test_an_adapter_adds_its_product_and_gets_its_gradient():
    torch.manual_seed(0)
    layer = LoraNf4Linear(Nf4Linear(torch.randn(6, 16)), rank=3, alpha=5)
    weight = layer.base_layer.dequantise(torch.float32)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(layer(x), F.linear(x, weight))  # B is zero
    nn.init.normal_(layer.lora_A)
    nn.init.normal_(layer.lora_B)
    ours = [x.clone().requires_grad_(), layer.lora_A, layer.lora_B]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    expected = theirs[0] @ (weight + 5 / 3 * theirs[2] @ theirs[1]).T
    y = layer(ours[0])
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, ours, grad), torch.autograd.grad(expected, theirs, grad))
    layer.enabled = False
    torch.testing.assert_close(layer(x), F.linear(x, weight))


def test_a_compiled_block_keeps_no_unpacked_weight_and_unpacks_each_once_per_pass(folder, monkeypatch):
    """In parts, the operation would leave its unpacked weight to the compiler, which keeps it: 13 GB in the 7B."""
    net = network(folder, in_4bit=True)
    add_lora(net, rank=4, alpha=8)
    train_a_little(net)
    block = net.language_model.model.layers[0]
    hidden = torch.randn(2, 33, 16, requires_grad=True)
    cos, sin = net.language_model.model.rotary_emb(hidden, position_ids=torch.arange(33)[None])
    trained = [hidden, *(p for p in block.parameters() if p.requires_grad)]
    plain = llama_block(block, hidden, None, cos, sin, None)
    gradients = torch.autograd.grad(plain, trained, torch.ones_like(plain))
    monkeypatch.setattr(torch._functorch.config, "activation_memory_budget", 0.8)
    unpacked, kept = Counter(), []
    dequantise = vla.nf4._dequantise

    def counting(stored, shape, dtype):
        unpacked[stored[0].data_ptr()] += 1
        return dequantise(stored, shape, dtype)

    monkeypatch.setattr(vla.nf4, "_dequantise", counting)
    # The compiler's division into forward and backward pass, without its code generator, which takes 15 s.
    compiled = torch.compile(llama_block, fullgraph=True, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.shape), x)[1], lambda x: x):
        y = compiled(block, hidden, None, cos, sin, None)
    assert list(unpacked.values()) == [1] * 7
    found = torch.autograd.grad(y, trained, torch.ones_like(y))
    assert list(unpacked.values()) == [2] * 7
    weights = {(16, 16), (24, 16), (16, 24)}
    assert kept
    assert not weights & {tuple(shape)[-2:] for shape in kept}
    torch.testing.assert_close(y, plain)
    torch.testing.assert_close(found, gradients)
    torch._dynamo.reset()


# the network


def test_only_the_maps_of_the_language_models_blocks_are_rounded(folder):
    net = network(folder, in_4bit=True)
    rounded = {name for name, module in net.named_modules() if isinstance(module, Nf4Linear)}
    assert rounded == set(block_linears(network(folder, in_4bit=False)))
    assert len(rounded) == 7 * len(net.language_model.model.layers)
    plain = dict(network(folder, in_4bit=False).named_parameters())
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, plain.pop(name))
    assert set(plain) == {f"{name}.weight" for name in rounded}


@pytest.mark.parametrize("recomputed", [0, 5])
def test_the_network_is_the_plain_one_on_the_rounded_weights(folder, recomputed):
    rounded, plain, unrounded = (network(folder, in_4bit) for in_4bit in (True, False, False))
    for name, module in rounded.named_modules():
        if isinstance(module, Nf4Linear):
            plain.get_parameter(f"{name}.weight").data = module.dequantise(torch.float32)
    reader = policy(folder)
    inputs = reader.model_inputs(synthetic_observations(reader, 2))
    found = []
    for net in (rounded, plain, unrounded):
        add_lora(net, rank=4, alpha=8, seed=3)
        train_a_little(net)
        net.recompute(recomputed)
        logits, _ = net(*inputs)
        logits.square().mean().backward()
        assert all(".lora_" in name for name, p in net.named_parameters() if p.grad is not None)
        # Of maps that are one layer in the plain network, the rows stand in the same order.
        downs, ups = ([getattr(layer, f"lora_{m}").grad for _, layer in lora_layers(net)] for m in "AB")
        reached = [grad.flatten() for grad in (*downs, *ups) if grad is not None]
        found.append((logits, torch.cat(reached)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert (found[0][0] - found[2][0]).abs().max() > 0.01  # the rounding is seen


def test_the_table_at_the_start_tells_the_4_bit_weights_and_counts_them_once(folder):
    rounded, plain = policy(folder, load_in_4bit=True), policy(folder)
    assert num_frozen_parameters(rounded.network) == num_frozen_parameters(plain.network)
    count = num_in_4bit(rounded.network)
    assert dict(rounded.describe())["parameters"].endswith(f"torch.float32, {count:,} of them in 4 bits (NF4)")
    assert "4 bits" not in dict(plain.describe())["parameters"]
    assert (rounded.precision, plain.precision) == ("nf4, float32", "float32")


def test_a_base_in_4_bits_is_not_cut_into_shards(folder):
    with pytest.raises(BadInput, match="a base in 4 bits cannot be spread over processes"):
        shard_blocks(network(folder, in_4bit=True), CPU)


def test_whoever_loads_it_again_has_the_same_bits(folder):
    """As replicas and resumed runs do, each for itself."""
    one, other = (dict(network(folder, in_4bit=True).named_buffers()) for _ in range(2))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# adapters on disk


def test_an_adapter_knows_that_its_base_was_in_4_bits(folder, tmp_path):
    rounded, plain = policy(folder, load_in_4bit=True), policy(folder)
    observations = synthetic_observations(plain, 2)
    for name, trained in (("rounded", rounded), ("plain", plain)):
        train_a_little(trained.network)
        trained.save_adapter(tmp_path / name)
        again = Policy.load(str(tmp_path / name), task_suite=SUITE)
        assert again.precision == trained.precision
        assert torch.equal(again.chunk_logits(observations), trained.chunk_logits(observations))
    other = Policy.load(str(tmp_path / "rounded"), task_suite=SUITE, load_in_4bit=False)
    assert torch.equal(other.chunk_logits(observations), plain.chunk_logits(observations))
    other = Policy.load(str(tmp_path / "plain"), task_suite=SUITE, load_in_4bit=True)
    assert torch.equal(other.chunk_logits(observations), rounded.chunk_logits(observations))


def test_it_is_merged_into_the_base_as_it_is_stored_and_the_folder_says_so(folder, tmp_path):
    trained = policy(folder, load_in_4bit=True)
    train_a_little(trained.network)
    trained.save_adapter(tmp_path / "adapter")
    assert merge(tmp_path / "adapter", tmp_path / "merged") > 0.99
    merged = Policy.load(str(tmp_path / "merged"), task_suite=SUITE)
    expected = Policy.load(str(tmp_path / "adapter"), task_suite=SUITE, load_in_4bit=False)
    observations = synthetic_observations(merged, 2)
    torch.testing.assert_close(
        merged.chunk_logits(observations), expected.chunk_logits(observations), rtol=1e-3, atol=1e-3
    )
    assert ROUNDED in (tmp_path / "merged" / "README.md").read_text()


# the library


def test_without_the_library_one_line_says_what_to_install(folder, monkeypatch):
    for name in ("bitsandbytes", "bitsandbytes.functional"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BadInput, match=r"^4-bit weights need the package bitsandbytes.*requirements-optional\.txt$"):
        policy(folder, load_in_4bit=True)
    policy(folder)


def test_a_device_that_the_library_cannot_use_is_one_line(folder, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("\n CUDA VERSION MISMATCH \n\nmany more lines")

    monkeypatch.setattr("bitsandbytes.functional.quantize_4bit", fails)
    with pytest.raises(BadInput, match=r"^bitsandbytes cannot make 4-bit weights on cpu \(CUDA VERSION MISMATCH\):.*$"):
        policy(folder, load_in_4bit=True)


def test_want_of_memory_stays_what_it_is(monkeypatch):
    def fails(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("bitsandbytes.functional.quantize_4bit", fails)
    with pytest.raises(torch.OutOfMemoryError):
        Nf4Linear(torch.randn(4, 16))
