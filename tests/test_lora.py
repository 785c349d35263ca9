"""LoRA layers against their definition, adapters on a network, and the folder format, which is peft's."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional as F

from contracts import BadInput
from tests.small_checkpoint import make_small_checkpoint
from tests.test_checkpoint import PUBLIC_CONFIG
from vla.adapter_folder import PROPRIO_FILE, base_of_adapter, copy_into_network, read_adapter, write_adapter
from vla.checkpoint import inspect_checkpoint
from vla.loading import LoadOptions
from vla.lora import AdaptedLayers, LoraConv2d, LoraLinear, add_lora
from vla.model import ACTION_ROWS, OpenVLAOFT, ProprioProjector
from vla.network_config import read_network_config
from vla.network_io import load_network
from vla.policy import Policy
from vla.weights import read_tensors

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 5e-2}}
RANK, ALPHA = 3, 5
KEYS_OF_PEFT_0_11_1 = {  # the version that openvla-oft pins: the fields of its LoraConfig, and a TypeError for others
    "peft_type", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "r",
    "target_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora", "modules_to_save",
    "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_config",
    "megatron_core", "loftq_config", "use_dora", "layer_replication",
}  # fmt: skip


# Layers compute W x + b + alpha / rank * B (A x), and its gradient, for every map that they hold


def refreshed(*layers):
    """What `add_lora` keeps for a network of these layers, brought up to date."""
    adapters = AdaptedLayers([("", layer) for layer in layers])
    adapters.refresh()
    return adapters


def make_layer(sizes=(4, 6, 5), bias=True, dtype=torch.float32):
    """A layer of maps of 7 features, its bases, and adapters that are not zero."""
    torch.manual_seed(0)
    bases = [nn.Linear(7, size, bias=bias, dtype=dtype) for size in sizes]
    layer = LoraLinear(bases, RANK, ALPHA, dtype)
    with torch.no_grad():
        layer.lora_A.normal_()
        layer.lora_B.normal_()
    refreshed(layer)
    return layer, bases


def formula(bases, x, down, up):
    """Map by map, from the definition."""
    ups = up.split([base.out_features for base in bases])
    return torch.cat(
        [
            base(x) + ALPHA / RANK * (x @ a.T) @ b.T
            for base, a, b in zip(bases, down.split(RANK), ups, strict=True)
        ],
        -1,
    )


@pytest.mark.parametrize("sizes", [(4,), (4, 6, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_are_those_of_the_definition(sizes, bias):
    layer, bases = make_layer(sizes, bias)
    x = torch.randn(2, 5, 7)
    ours = [x.clone().requires_grad_(), layer.lora_A, layer.lora_B]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    weighting = torch.randn(2, 5, sum(layer.out_features))
    y = layer(ours[0])
    expected = formula(bases, *theirs)
    torch.testing.assert_close(y, expected)
    got = torch.autograd.grad((y * weighting).sum(), ours)
    torch.testing.assert_close(got, torch.autograd.grad((expected * weighting).sum(), theirs))


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
    expected = (
        linear(patches) + ALPHA / RANK * (patches @ layer.lora_A.flatten(1).T) @ layer.lora_B.flatten(1).T
    )
    torch.testing.assert_close(layer(images).flatten(2).transpose(1, 2), expected)


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_what_an_adapter_adds_is_not_swallowed_by_rounding(kind):
    """Far below the last digit of an output, it still moves the outputs by as much on average."""
    torch.manual_seed(0)
    tiny = 2e-4  # of outputs around 1, whose last digit in bfloat16 is 4e-3 to 8e-3
    if kind == "linear":
        layer, x = (
            LoraLinear([nn.Linear(64, 256, dtype=torch.bfloat16)], 1, 1, torch.bfloat16),
            torch.ones(512, 64),
        )
    else:
        layer, x = LoraConv2d(nn.Conv2d(1, 256, 8, 8, dtype=torch.bfloat16), 1, 1), torch.ones(512, 1, 8, 8)
    x = (x + torch.randn_like(x)).bfloat16()
    with torch.no_grad():
        layer.lora_A.fill_(1 / 64)  # 1 for the average row
        before = layer(x).double()
        layer.lora_B.fill_(tiny)
        if kind == "linear":
            refreshed(layer)
        added = (layer(x).double() - before).mean().item()
    assert added == pytest.approx(tiny, rel=0.2)


@pytest.mark.parametrize("padding", [0, 6])
def test_the_operation_in_place_keeps_the_rules_of_torchs_compiler(padding):
    wide, downs = (
        torch.randn(2, 5, 10 + padding)[..., :10],
        torch.randn(3, 7),
    )  # torch.compile pads awkward rows
    torch.library.opcheck(torch.ops.vla_grpo.append_product, (wide, downs))
    expected = wide[..., :7] @ downs.T
    torch.ops.vla_grpo.append_product(wide, downs)
    torch.testing.assert_close(wide[..., 7:], expected)


# Networks


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
    pixels, prompts = (
        torch.randn(2, 6, 32, 32, generator=generator),
        torch.randint(3, 100, (2, 9), generator=generator),
    )
    return pixels, prompts, None, None


@torch.no_grad()
def _train_a_little(network, size=0.05):
    generator = torch.Generator().manual_seed(1)
    for _, parameter in network.named_parameters():
        if parameter.requires_grad:
            parameter += size * torch.randn(parameter.shape, generator=generator)
    network.adapters.refresh()


@pytest.fixture(scope="module")
def full_size(tmp_path_factory):
    """The 7B network without memory, as the public config.json describes it."""
    folder = tmp_path_factory.mktemp("public")
    (folder / "config.json").write_text(json.dumps(PUBLIC_CONFIG))
    with torch.device("meta"):
        return OpenVLAOFT(read_network_config(folder), 56, ProprioProjector(8, 4096))


def test_full_size_network_has_the_reference_adapters(full_size):
    """439 modules: 24 and 27 blocks of 4, 5 of the pooling, 2 patch embeddings, 3 of the projector, 32 x 7, lm_head."""
    kinds = nn.Linear | nn.Conv2d
    base = {name: tensor for name, tensor in full_size.state_dict().items() if "proprio" not in name}
    assert (len(base), sum(tensor.numel() for tensor in base.values())) == (982, 7_541_237_184)
    targets = [
        name
        for name, module in full_size.named_modules()
        if isinstance(module, kinds) and "proprio" not in name
    ]
    assert len(targets) == 24 * 4 + 27 * 4 + 5 + 2 + 3 + 32 * 7 + 1 == 439
    adapted = add_lora(full_size, rank=16, alpha=16, dtype=torch.float32)
    trainable = {name: p for name, p in full_size.named_parameters() if p.requires_grad}
    adapters = adapted.named_matrices()
    assert list(adapters) == [f"{name}.{matrix}" for name in targets for matrix in ("lora_A", "lora_B")]
    assert len(adapters) == 878
    assert sum(matrix.numel() for matrix in adapters.values()) == 55_414_144
    assert sum(p.numel() for p in trainable.values()) == 55_414_144
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    assert all(".lora_" in name for name in trainable)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fresh_adapters_change_no_logit(folder, dtype):
    network = _network(folder, dtype)
    inputs = _inputs(network)
    with torch.no_grad():
        before = network(*inputs)
        network.adapters = add_lora(network, rank=4, alpha=4, dtype=dtype)
        after = network(*inputs)
    # Not to the bit: maps that were several products are one, of another length.
    torch.testing.assert_close(after, before, **TOLERANCE[dtype])


def test_initialisation_is_a_function_of_the_seed(folder):
    def drawn(seed):
        network = _network(folder)
        torch.manual_seed(torch.seed())  # the global generator must not matter
        add_lora(network, rank=4, alpha=4, dtype=torch.float32, seed=seed)
        return {name: p.clone() for name, p in network.named_parameters() if "lora_A" in name}

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    values = torch.cat([tensor.flatten() for tensor in first.values()])
    assert values.std().item() == pytest.approx(1 / 4, rel=0.02)


def test_peft_itself_loads_the_saved_adapter(network, folder, tmp_path):
    network.adapters = add_lora(network, rank=4, alpha=8, dtype=torch.float32)
    _train_a_little(network)
    write_adapter(tmp_path, network, folder, str(folder), "f" * 64)
    assert json.loads((tmp_path / "adapter_config.json").read_text()).keys() <= KEYS_OF_PEFT_0_11_1
    base = _network(folder)
    theirs = PeftModel.from_pretrained(base, str(tmp_path))
    inputs = _inputs(network)
    with torch.no_grad():
        logits, hidden = network(*inputs)
        torch.testing.assert_close(theirs(*inputs)[1], hidden)
        torch.testing.assert_close(base.vocabulary_logits(hidden)[..., ACTION_ROWS], logits)


@pytest.mark.parametrize(
    ("rank", "alpha", "message"), [(8, 8, "expected shape"), (4, 16, "alpha 4 at rank 4")]
)
def test_adapter_of_other_settings_is_refused(network, folder, tmp_path, rank, alpha, message):
    network.adapters = add_lora(network, rank=4, alpha=4, dtype=torch.float32)
    write_adapter(tmp_path, network, folder, "some/base", "a" * 64)
    other = _network(folder)
    other.adapters = add_lora(other, rank, alpha, torch.float32)
    with pytest.raises(BadInput, match=message):
        copy_into_network(read_adapter(tmp_path), other)


@pytest.mark.parametrize(
    "changes", [{"r": 5}, {"use_dora": True}, {"peft_type": "LOHA"}, {"lora_alpha": None}]
)
def test_adapter_that_is_not_what_its_config_says_or_of_another_kind_is_refused(
    network, folder, tmp_path, changes
):
    network.adapters = add_lora(network, rank=4, alpha=4, dtype=torch.float32)
    write_adapter(tmp_path, network, folder, "some/base", "a" * 64)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(BadInput, match=str(tmp_path)):
        read_adapter(tmp_path)


# Folders


@pytest.fixture
def adapter_folder(small, tmp_path) -> Path:
    policy = Policy.load(str(small), LoadOptions(task_suite="libero_spatial", lora_rank=2, lora_alpha=2))
    policy.save_adapter(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_folder_holds_the_adapter_the_projector_and_the_bases_small_files(adapter_folder, small):
    names = {path.name for path in adapter_folder.iterdir()}
    kept = {"dataset_statistics.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names == {"adapter_config.json", "adapter_model.safetensors", PROPRIO_FILE} | kept
    assert all((adapter_folder / name).read_bytes() == (small / name).read_bytes() for name in kept)
    assert {tensor.dtype for tensor in read_tensors(adapter_folder / PROPRIO_FILE).values()} == {
        torch.float32
    }


def test_base_is_named_by_the_adapter_or_the_message_says_what_to_do(adapter_folder, small, tmp_path):
    assert base_of_adapter(adapter_folder) == str(small)
    assert base_of_adapter(small) is base_of_adapter(Path("owner/name")) is None
    with pytest.raises(BadInput, match="is itself an adapter"):
        Policy.load(
            str(adapter_folder), LoadOptions(task_suite="libero_spatial", adapter=str(adapter_folder))
        )
    config = json.loads((adapter_folder / "adapter_config.json").read_text())
    (adapter_folder / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": None})
    )
    with pytest.raises(BadInput, match="names no base"):
        base_of_adapter(adapter_folder)


def test_adapter_with_proprio_does_not_fit_a_base_without(adapter_folder, small, tmp_path):
    without = shutil.copytree(
        small, tmp_path / "without", ignore=shutil.ignore_patterns("proprio_projector*")
    )
    policy = Policy.load(str(without), LoadOptions(task_suite="libero_spatial", lora_rank=2, lora_alpha=2))
    with pytest.raises(BadInput, match="trained with proprio"):
        policy.load_adapter(adapter_folder)
