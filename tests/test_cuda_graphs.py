"""What a GraphedNetwork decides, on a machine without a GPU. Recording itself is tested by benchmarks/gpu.py."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.fakes import is_in_a_graph
from tests.small_checkpoint import load_policy, load_small_network, network_inputs, train_network_a_little
from vla import cuda_graphs
from vla.adapters import add_lora
from vla.cuda_graphs import GraphedNetwork, Recording
from vla.model import OpenVLAOFT
from vla.preprocessing import synthetic_observations
from vla.tokens import FIRST_ACTION_TOKEN
from vla.vision import side_by_side
from workshop.sft_training import Frames, token_loss, training_step


class UnrecordedNetwork(GraphedNetwork):
    """Its recordings are functions of their input tensors; remembers which it has made."""

    def __init__(self, network: nn.Module):
        super().__init__(network)
        network.vision_backbone.second_stream = None  # there is no GPU
        self.recorded: list[tuple[bool, int]] = []  # (with gradient, batch size)

    def _record(self, part, inputs, with_gradient):
        parameters = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        if with_gradient:  # CUDA refuses to record while another graph uses a parameter
            assert not any(map(is_in_a_graph, parameters))
        run = getattr(self.network, part)
        recorded_inputs = tuple(None if x is None else x.clone() for x in inputs)
        with torch.no_grad():
            outputs = run(*recorded_inputs)
        output_gradients = tuple(map(torch.zeros_like, outputs)) if with_gradient else ()
        for parameter in parameters:
            self._gradients.setdefault(parameter, torch.zeros_like(parameter))

        @torch.no_grad()
        def forward():
            for output, value in zip(outputs, run(*recorded_inputs), strict=True):
                if output is not None:
                    output.copy_(value)

        @torch.enable_grad()
        def backward():
            gradients = torch.autograd.grad(
                run(*recorded_inputs), parameters, output_gradients, materialize_grads=True
            )
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self._gradients[parameter].add_(gradient)

        self.recorded.append((with_gradient, len(inputs[0])))
        graphs = (SimpleNamespace(replay=forward), SimpleNamespace(replay=backward))
        return Recording(recorded_inputs, outputs, *graphs, output_gradients)


@pytest.fixture
def network(small_one_image) -> OpenVLAOFT:
    network = load_small_network(small_one_image)
    network.adapters = add_lora(network, rank=2, alpha=2, dtype=torch.float32)
    train_network_a_little(network)
    return network


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.fixture
def graphed(network, without_gpu) -> UnrecordedNetwork:
    return UnrecordedNetwork(network)


def inputs(rows: slice) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if x is None else x[rows] for x in network_inputs())


ONE = slice(0, 1)
TWO = slice(0, 2)


def test_a_pass_is_recorded_once_per_shape_and_kind_and_its_results_outlive_the_next_one(network, graphed):
    with torch.no_grad():
        results = [(rows, graphed.run("forward", *inputs(rows))) for rows in (TWO, TWO, ONE, slice(1, 2))]
        for rows, result in results:
            torch.testing.assert_close(result, network(*inputs(rows)))
    graphed.run("forward", *inputs(TWO))
    graphed.run("forward", *inputs(TWO))
    assert graphed.recorded == [(False, 2), (False, 1), (True, 2)]


@pytest.mark.parametrize("start", [None, 1.0])  # no gradient yet, or what another pass has left
def test_gradients_of_several_micro_batches_add_up_to_the_plain_ones(network, graphed, start):
    lora_B = network.language_model.lm_head.lora_B
    (plain,) = torch.autograd.grad(network(*inputs(TWO))[0].logsumexp(-1).sum(), lora_B)
    if start is not None:
        lora_B.grad = torch.full_like(lora_B, start)
    for rows in (ONE, slice(1, 2)):
        graphed.run("forward", *inputs(rows))[0].logsumexp(-1).sum().backward()
    torch.testing.assert_close(lora_B.grad, plain + (start or 0.0))


def test_a_backward_pass_after_another_replay_is_refused(graphed):
    logits, _ = graphed.run("forward", *inputs(TWO))
    graphed.run("forward", *inputs(TWO))
    with pytest.raises(RuntimeError, match="call backward first"):
        logits.sum().backward()


def test_recordings_are_given_up_when_their_memory_is_missing(network, graphed, monkeypatch):
    record = graphed._record

    def record_if_alone(part, inputs, with_gradient):
        if graphed._recordings:
            raise RuntimeError("CUDA error: out of memory\nand more")
        return record(part, inputs, with_gradient)

    monkeypatch.setattr(graphed, "_record", record_if_alone)
    for rows in (TWO, ONE, TWO):
        torch.testing.assert_close(graphed.run("forward", *inputs(rows)), network(*inputs(rows)))
    assert graphed.recorded == [(True, 2), (True, 1), (True, 2)]


def test_of_many_recordings_those_used_last_are_kept(graphed, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "MOST_RECORDINGS", 2)
    three = tuple(None if x is None else torch.cat([x, x[:1]]) for x in network_inputs())
    with torch.no_grad():
        for size in (1, 2, 1, 3, 1, 2):
            graphed.run("forward", *(None if x is None else x[:size] for x in three))
    assert [size for _, size in graphed.recorded] == [1, 2, 3, 2]


def test_above_a_frozen_trunk_learning_replays_the_top_alone(small, without_gpu):
    results = []
    for is_recorded in (False, True):
        policy = load_policy(small, trained_blocks=1)
        graphed = UnrecordedNetwork(policy.network)
        if is_recorded:
            policy._graphs = graphed
        observations = synthetic_observations(policy.num_images, policy.statistics.proprio, 3)
        acted = policy.act(observations)
        policy.act_as_teacher(observations, kept=acted.kept)
        for rows in (slice(0, 2), slice(1, 3)):
            logits = policy.chunk_logits(observations[rows], acted.kept[rows])
            logits.log_softmax(-1)[..., 7].sum().backward()
        gradients = [parameter.grad for _, parameter in policy.named_trainable_parameters()]
        results.append([acted.logprobs, *gradients])
    deciding = [(False, 3)] * 3  # trunk, top, the teacher's top
    assert graphed.recorded == [*deciding, (True, 2)]
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)


def test_a_supervised_step_with_two_sizes_of_micro_batch_records_both(small, without_gpu):
    """Part of its loss, the log-sum-exp over all other ids, is computed outside of the recordings."""
    trained = []
    for recorded in ([], [(True, 3), (True, 2)]):
        policy = load_policy(small)
        graphed = UnrecordedNetwork(policy.network)
        if recorded:
            policy._graphs = graphed
        observations = synthetic_observations(policy.num_images, policy.statistics.proprio, 5)
        tokens = FIRST_ACTION_TOKEN + torch.arange(5 * 56).view(5, 56) % 256
        optimizer = policy.make_optimizer(lr=3e-5, weight_decay=0.0)
        training_step(token_loss, policy, optimizer, Frames(observations, tokens), micro_batch_size=3)
        assert graphed.recorded == recorded
        trained.append([parameter.detach() for _, parameter in policy.named_trainable_parameters()])
    torch.testing.assert_close(*trained)


def test_passes_before_a_recording_have_tensors_like_the_recordings_own(graphed, monkeypatch):
    warmed_up = []
    monkeypatch.setattr(graphed, "_run_once", lambda part, batch, with_gradient: warmed_up.extend(batch))
    graphed._warm_up("forward", network_inputs(), with_gradient=False)
    assert warmed_up
    assert not any(
        x._is_view() for x in warmed_up if x is not None
    )  # for views the compiler makes other code


@pytest.mark.parametrize("fails_first", [True, False])
def test_streams_join_also_where_memory_runs_out(monkeypatch, fails_first):
    """Otherwise the recording could not end, and the run would end with it."""
    joined = []
    current = SimpleNamespace(wait_stream=joined.append)
    other = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())

    def fill_memory():
        raise torch.OutOfMemoryError

    functions = (fill_memory, dict) if fails_first else (dict, fill_memory)
    with pytest.raises(torch.OutOfMemoryError):
        side_by_side(*functions, other)
    assert joined == [other]
