"""What a GraphedNetwork decides, on a machine without a GPU: recording itself is seen by benchmarks/gpu.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vla.cuda_graphs import GraphedNetwork, Recording
from vla.lora import add_lora


class Graph:
    """Replays by calling what it was given."""

    def __init__(self, run):
        self.run = run

    def replay(self):
        self.run()


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.language_model = nn.ModuleDict({"lm_head": nn.Linear(3, 4)})
        self.vision_backbone = nn.Identity()
        self.proprio_projector = None
        self.recomputed_blocks, self.dtype = 0, torch.float32

    def forward(self, x):
        hidden = x
        return self.language_model["lm_head"](hidden), hidden


@pytest.fixture
def network(monkeypatch):
    """A network whose recordings are made of closures over their static inputs, and count how often one is made."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    toy = Toy()
    toy.adapters = add_lora(toy, rank=2, alpha=2, dtype=torch.float32)
    toy.language_model.lm_head = toy.language_model["lm_head"]
    graphed = GraphedNetwork(toy)
    graphed.made = []

    def record(inputs, with_gradient):
        static = tuple(x.clone() for x in inputs)
        outputs = tuple(torch.zeros_like(output) for output in toy(*static))
        gradients = tuple(map(torch.zeros_like, outputs))
        layer = toy.language_model["lm_head"]

        def forward():
            with torch.no_grad():
                for output, value in zip(outputs, toy(*static), strict=True):
                    output.copy_(value)

        def backward():
            with torch.enable_grad():
                found = torch.autograd.grad(toy(*static)[0], [layer.lora_B], gradients[0])
            graphed._gradients.setdefault(layer.lora_B, torch.zeros_like(layer.lora_B)).add_(found[0])

        graphed._gradients.setdefault(layer.lora_B, torch.zeros_like(layer.lora_B))
        graphed.made.append((with_gradient, len(inputs[0])))
        return Recording(static, outputs, Graph(forward), Graph(backward), gradients)

    graphed._record = record
    return SimpleNamespace(graphed=graphed, toy=toy, layer=toy.language_model["lm_head"])


def test_a_pass_is_recorded_once_per_shape_and_kind(network):
    x = torch.randn(2, 3)
    with torch.no_grad():
        for batch in (x, x, x[:1]):
            torch.testing.assert_close(network.graphed(batch)[0], network.toy(batch)[0])
    network.graphed(x)
    network.graphed(x)
    assert network.graphed.made == [(False, 2), (False, 1), (True, 2)]


def test_results_outlive_the_next_replay(network):
    with torch.no_grad():
        first = network.graphed(torch.ones(2, 3))[0]
        kept = first.clone()
        network.graphed(torch.zeros(2, 3))
    assert torch.equal(first, kept)


def test_gradients_of_several_micro_batches_add_up_to_the_plain_ones(network):
    x, weighting = torch.randn(4, 3), torch.randn(4, 4)
    (network.toy(x)[0] * weighting).sum().backward()
    expected = network.layer.lora_B.grad.clone()
    for start in (None, torch.ones_like(expected)):  # nothing there yet, or what another pass has left
        network.layer.lora_B.grad = start
        for rows in (slice(0, 2), slice(2, 4)):
            (network.graphed(x[rows])[0] * weighting[rows]).sum().backward()
        before = 0 if start is None else 1
        torch.testing.assert_close(network.layer.lora_B.grad, expected + before)


def test_a_backward_pass_after_another_replay_is_refused(network):
    logits, _ = network.graphed(torch.randn(2, 3))
    network.graphed(torch.randn(2, 3))
    with pytest.raises(RuntimeError, match="call backward first"):
        logits.sum().backward()


def test_recordings_are_given_up_when_their_memory_is_missing(network):
    record, x = network.graphed._record, torch.randn(2, 3)
    network.graphed(x)

    def short_of_memory(inputs, with_gradient):
        if network.graphed._recordings:
            raise torch.OutOfMemoryError("no memory")
        return record(inputs, with_gradient)

    network.graphed._record = short_of_memory
    torch.testing.assert_close(network.graphed(x[:1])[0], network.toy(x[:1])[0])
    assert len(network.graphed._recordings) == 1
