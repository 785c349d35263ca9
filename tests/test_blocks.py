"""The written-out blocks are transformers' and timm's, and compiling them changes nothing."""

from functools import partial

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tests.test_lora import _inputs, _network, _train_a_little, folder  # noqa: F401 (a fixture)
from vla.blocks import llama_block
from vla.lora import adapters_disabled, add_lora


@pytest.fixture(params=[4, 2], ids=["as many keys as queries", "grouped queries"])
def layer(request):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=request.param, vocab_size=9,
        num_hidden_layers=1, attn_implementation="eager",
    )  # fmt: skip
    layer = LlamaDecoderLayer(config, 0).eval()
    hidden = torch.randn(2, 11, 32)
    cos, sin = LlamaRotaryEmbedding(config)(hidden, torch.arange(11)[None])
    return layer, hidden, cos, sin


def test_block_is_transformers_with_full_attention(layer):
    layer, hidden, cos, sin = layer
    theirs = layer(hidden, torch.zeros(2, 1, 11, 11), position_embeddings=(cos, sin))
    torch.testing.assert_close(llama_block(layer, hidden, None, cos, sin, None), theirs)


def test_masked_keys_are_transformers_masked_keys(layer):
    layer, hidden, cos, sin = layer
    real = torch.tensor([[True] * 11, [True] * 7 + [False] * 4])[:, None, None]
    added = torch.zeros(2, 1, 11, 11).masked_fill(~real, torch.finfo(torch.float32).min)
    theirs = layer(hidden, added, position_embeddings=(cos, sin))
    torch.testing.assert_close(llama_block(layer, hidden, real, cos, sin, None), theirs)


def test_chosen_rows_are_those_of_the_whole_output(layer):
    layer, hidden, cos, sin = layer
    rows = torch.tensor([[3, 4, 5], [6, 7, 8]])
    whole = llama_block(layer, hidden, None, cos, sin, None)
    chosen = llama_block(layer, hidden, None, cos, sin, rows)
    torch.testing.assert_close(chosen, torch.stack([whole[0, 3:6], whole[1, 6:9]]))


def test_compiled_blocks_have_the_same_outputs_and_gradients(folder, monkeypatch):  # noqa: F811
    network = _network(folder)
    add_lora(network, rank=4, alpha=4)
    _train_a_little(network)
    inputs = _inputs(network)

    def outputs() -> list[torch.Tensor]:
        network.zero_grad()
        logits, hidden = network(*inputs)
        logits.logsumexp(-1).sum().backward()
        with torch.no_grad(), adapters_disabled(network):
            teacher = network(*inputs)[0]
        return [logits, hidden, teacher, *(p.grad.clone() for p in network.parameters() if p.grad is not None)]

    eager = outputs()
    # Traced as for a GPU, but run without generating code, which takes a minute on a CPU.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    network.compile_blocks()
    torch.testing.assert_close(outputs(), eager)
    network.recompute(network.num_blocks)
    torch.testing.assert_close(outputs(), eager)
