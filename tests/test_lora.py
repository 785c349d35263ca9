import json

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn

from errors import BadInput
from tests.small_checkpoint import make_small_checkpoint
from tests.test_model_config import PUBLIC
from vla.checkpoint import inspect_checkpoint, load_network, read_model_config
from vla.heads import ProprioProjector
from vla.lora import (
    adapters_disabled,
    add_lora,
    check_base,
    fill_lora,
    linear_rows,
    lora_targets,
    named_adapters,
    num_frozen_parameters,
    read_adapter,
    refresh_adapters,
    save_lora,
)
from vla.lora_layers import LoraLinear
from vla.openvla_oft import ACTION_ROWS, OpenVLAOFT

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 5e-2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_small_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint", num_images=1, proprio=False)


@pytest.fixture
def network(folder):
    return _network(folder)


def _network(folder, dtype=torch.float32):
    return load_network(inspect_checkpoint(folder), 56, CPU, dtype)


def _inputs(network):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, 6, 32, 32, generator=generator), torch.randint(3, 100, (2, 9), generator=generator)


@torch.no_grad()
def _train_a_little(network, size=0.05):
    generator = torch.Generator().manual_seed(1)
    for _, parameter in network.named_parameters():
        if parameter.requires_grad:
            parameter += size * torch.randn(parameter.shape, generator=generator)
    refresh_adapters(network)


@pytest.fixture(scope="module")
def full_size(tmp_path_factory):
    """The 7B network without memory, as the public config.json describes it."""
    folder = tmp_path_factory.mktemp("public")
    (folder / "config.json").write_text(json.dumps(PUBLIC))
    with torch.device("meta"):
        return OpenVLAOFT(read_model_config(folder), 56, ProprioProjector(8, 4096))


def test_full_size_network_has_the_published_parameters(full_size):
    base = {k: v for k, v in full_size.state_dict().items() if not k.startswith("proprio_projector.")}
    assert len(base) == 982
    assert sum(tensor.numel() for tensor in base.values()) == 7_541_237_184
    assert sum(parameter.numel() for parameter in full_size.proprio_projector.parameters()) == 16_818_176


def test_full_size_network_has_the_reference_adapters(full_size):
    """439 modules: 24 and 27 blocks of 4, 5 of the pooling, 2 patch embeddings, 3 of the projector, 32 x 7, lm_head."""
    targets = lora_targets(full_size)
    assert len(targets) == 24 * 4 + 27 * 4 + 5 + 2 + 3 + 32 * 7 + 1 == 439
    add_lora(full_size, rank=16, alpha=16)
    trainable = {name: p for name, p in full_size.named_parameters() if p.requires_grad}
    assert [name for name, _ in named_adapters(full_size)] == targets
    assert sum(down.numel() + up.numel() for _, (down, up) in named_adapters(full_size)) == 55_414_144
    assert sum(p.numel() for p in trainable.values()) == 55_414_144
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    assert all(".lora_" in name for name in trainable)
    assert num_frozen_parameters(full_size) == 7_541_237_184 + 16_818_176


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fresh_adapters_change_no_logit(folder, dtype):
    network = _network(folder, dtype)
    inputs = _inputs(network)
    with torch.no_grad():
        before = network(*inputs)
        add_lora(network, rank=4, alpha=4)
        after = network(*inputs)
    # Not to the bit: maps that were several products are one, of another length.
    torch.testing.assert_close(after, before, **TOLERANCE[dtype])


def test_initialisation_is_a_function_of_the_seed(folder):
    def drawn(seed):
        network = _network(folder)
        torch.manual_seed(torch.seed())  # the global generator must not matter
        add_lora(network, rank=4, alpha=4, seed=seed)
        return {name: p.clone() for name, p in network.named_parameters() if "lora_A" in name}

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    values = torch.cat([tensor.flatten() for tensor in first.values()])
    assert values.std().item() == pytest.approx(1 / 4, rel=0.02)


def test_gradient_reaches_adapters_that_are_used_and_nothing_else(network):
    add_lora(network, rank=4, alpha=4)
    _train_a_little(network)
    network(*_inputs(network))[0].square().sum().backward()
    without = {name for name, p in network.named_parameters() if p.requires_grad and p.grad is None}
    assert all(
        "attn_pool" in name or ".blocks.2." in name for name in without
    )  # the pooling and the last of 3 vision blocks
    assert len(without) == 2 * (5 + 4 + 4)
    assert all(p.grad is None for p in network.parameters() if not p.requires_grad)


def test_disabled_adapters_are_the_base_network_bit_for_bit(network):
    inputs = _inputs(network)
    with torch.no_grad():
        before = network(*inputs)[0]
        add_lora(network, rank=4, alpha=4)
        with adapters_disabled(network):
            base = network(*inputs)[0]
        torch.testing.assert_close(base, before, **TOLERANCE[torch.float32])
        _train_a_little(network)
        assert not torch.equal(network(*inputs)[0], base)
        with adapters_disabled(network):
            assert torch.equal(network(*inputs)[0], base)
            with adapters_disabled(network):
                assert torch.equal(network(*inputs)[0], base)
            assert torch.equal(network(*inputs)[0], base)
        assert not torch.equal(network(*inputs)[0], base)
    assert all(p.requires_grad for name, p in network.named_parameters() if ".lora_" in name)


def test_rows_of_an_adapted_layer_are_those_of_the_whole_layer():
    torch.manual_seed(0)
    holder = nn.ModuleDict({"projector": nn.Linear(12, 40)})
    holder["projector"].bias = None
    x = torch.randn(3, 5, 12)
    rows = slice(10, 30)
    torch.testing.assert_close(linear_rows(holder["projector"], x, rows), holder["projector"](x)[..., rows])
    add_lora(holder, rank=4, alpha=8)
    _train_a_little(holder, size=0.5)
    torch.testing.assert_close(linear_rows(holder["projector"], x, rows), holder["projector"](x)[..., rows])
    with adapters_disabled(holder):
        torch.testing.assert_close(linear_rows(holder["projector"], x, rows), holder["projector"](x)[..., rows])


def test_saved_adapter_is_read_back_bit_identical(network, folder, tmp_path):
    add_lora(network, rank=4, alpha=8)
    _train_a_little(network)
    save_lora(network, tmp_path, "some/base", "f" * 64)
    adapter = read_adapter(tmp_path)
    assert (adapter.rank, adapter.alpha, adapter.base_model, adapter.base_fingerprint) == (4, 8, "some/base", "f" * 64)
    other = _network(folder)
    add_lora(other, adapter.rank, adapter.alpha, seed=9, targets=adapter.targets)
    fill_lora(other, adapter)
    refresh_adapters(other)
    parameters = dict(other.named_parameters())
    assert all(torch.equal(p, parameters[name]) for name, p in network.named_parameters())


def test_adapters_that_were_moved_are_seen_with_force_and_from_then_on(network):
    add_lora(network, rank=4, alpha=8)
    layer = next(layer for _, layer in network.adapters.layers if isinstance(layer, LoraLinear))
    x = torch.randn(2, layer.in_features)
    refresh_adapters(network)
    with torch.no_grad():
        base = layer(x)
        layer.lora_B.data = torch.ones_like(layer.lora_B)
        assert torch.equal(layer(x), base)
        refresh_adapters(network, force=True)
        once = layer(x) - base
        assert once.abs().max() > 0.1
        layer.lora_B *= 2
        refresh_adapters(network)
        torch.testing.assert_close(layer(x) - base, 2 * once)


def test_peft_itself_loads_the_saved_adapter(network, folder, tmp_path):
    add_lora(network, rank=4, alpha=8)
    _train_a_little(network)
    save_lora(network, tmp_path, str(folder), "f" * 64)
    base = _network(folder)
    theirs = PeftModel.from_pretrained(base, str(tmp_path))
    inputs = _inputs(network)
    with torch.no_grad():
        logits, hidden = network(*inputs)
        torch.testing.assert_close(theirs(*inputs)[1], hidden)
        torch.testing.assert_close(base.vocabulary_logits(hidden)[..., ACTION_ROWS], logits)


def test_adapter_that_peft_trained_on_fewer_modules_is_loaded(network, folder, tmp_path):
    targets = ["q_proj", "v_proj"]
    theirs = PeftModel(_network(folder), LoraConfig(r=2, lora_alpha=6, target_modules=targets, init_lora_weights=False))
    theirs.save_pretrained(tmp_path)
    adapter = read_adapter(tmp_path)
    add_lora(network, adapter.rank, adapter.alpha, targets=adapter.targets)
    fill_lora(network, adapter)
    inputs = _inputs(network)
    with torch.no_grad():
        torch.testing.assert_close(network(*inputs)[0], theirs(*inputs)[0])


def test_adapter_of_another_base_is_refused(network, tmp_path):
    add_lora(network, rank=4, alpha=4)
    save_lora(network, tmp_path, "some/base", "a" * 64)
    adapter = read_adapter(tmp_path)
    check_base(adapter, "a" * 64, "some/base")
    with pytest.raises(BadInput, match="trained on other weights") as caught:
        check_base(adapter, "b" * 64, "other/base")
    assert "other/base" in str(caught.value)


@pytest.mark.parametrize(("rank", "alpha", "message"), [(8, 8, "expected shape"), (4, 16, "alpha 4 at rank 4")])
def test_adapter_of_other_settings_is_refused(network, folder, tmp_path, rank, alpha, message):
    add_lora(network, rank=4, alpha=4)
    save_lora(network, tmp_path, "some/base", "a" * 64)
    other = _network(folder)
    add_lora(other, rank, alpha)
    with pytest.raises(BadInput, match=message):
        fill_lora(other, read_adapter(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [{"r": 10**15}, {"r": 5}, {"r": "4"}, {"lora_alpha": 0}, {"lora_alpha": {}}, {"base_model_name_or_path": ["a"]}],
)
def test_claims_that_the_tensors_do_not_bear_out_are_refused(network, tmp_path, changes):
    add_lora(network, rank=4, alpha=4)
    save_lora(network, tmp_path, "some/base", "a" * 64)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(BadInput, match=str(tmp_path)):
        read_adapter(tmp_path)


def test_adapter_of_another_kind_is_refused(network, tmp_path):
    add_lora(network, rank=4, alpha=4)
    save_lora(network, tmp_path, "some/base", "a" * 64)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(BadInput, match="use_dora"):
        read_adapter(tmp_path)


def test_adapter_with_modules_that_the_base_lacks_is_refused(network):
    with pytest.raises(BadInput, match=r"modules that its base lacks, first language_model\.model\.layers\.31"):
        add_lora(network, rank=4, alpha=4, targets=["projector.fc1", "language_model.model.layers.31.mlp.up_proj"])
