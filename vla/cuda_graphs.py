"""The network's passes as CUDA graphs: recorded once per shape, replayed afterwards without Python.

A 7B forward pass is some 3,000 kernels; to launch them from Python takes as long as to run them for one observation.
A pass is recorded when its shapes are first seen: forward alone where no gradient is wanted, else forward and
backward. Recordings share one pool of memory, in which every replay overwrites what the one before it has computed.
Hence two rules, both kept here: results are copied out at once, and a backward pass must follow its own forward pass
with no other replay in between.

Source: Nguyen et al., "Accelerating PyTorch with CUDA Graphs" (pytorch.org/blog), torch.cuda.make_graphed_callables.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from vla.lora import lora_layers, refresh_adapters
from vla.openvla_oft import OpenVLAOFT

WARM_UP = 2  # passes before recording: kernels are compiled and chosen in them
Inputs = tuple[Tensor | None, ...]


@dataclass
class Recording:
    inputs: Inputs
    outputs: tuple[Tensor, Tensor]  # logits (B, A, 256), hidden states (B, A, D)
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph | None = None
    output_gradients: tuple[Tensor, ...] = ()

    def replay(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        for static, given in zip(self.inputs, inputs, strict=True):
            if static is not None:
                static.copy_(given)
        self.forward.replay()
        logits, hidden = self.outputs
        return logits.clone(), hidden.clone()

    def replay_backward(self, gradients: tuple[Tensor | None, ...]) -> None:
        for static, given in zip(self.output_gradients, gradients, strict=True):
            static.zero_() if given is None else static.copy_(given)
        self.backward.replay()


class GraphedNetwork:
    """Called like the network, on the same arguments with the same results."""

    def __init__(self, network: OpenVLAOFT):
        self.network = network
        self.replays = 0
        self._recordings: dict[Hashable, Recording] = {}
        self._gradients: dict[Tensor, Tensor] = {}  # parameter -> where every recording adds its gradient
        self._pool = torch.cuda.graph_pool_handle()
        self._anchor = torch.zeros((), device=network.language_model.lm_head.weight.device, requires_grad=True)

    def __call__(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        refresh_adapters(self.network)  # never within a recording
        with_gradient = torch.is_grad_enabled()
        key = (with_gradient, self._variant(), *(None if x is None else (x.shape, x.dtype) for x in inputs))
        if key not in self._recordings:
            self._recordings[key] = self._record(inputs, with_gradient)
        recording = self._recordings[key]
        self.replays += 1
        if with_gradient:
            return _Replay.apply(self._anchor, self, recording, *inputs)
        return recording.replay(inputs)

    def _variant(self) -> Hashable:
        """What of the network's state a recording depends on: student or teacher."""
        return lora_layers(self.network)[0][1].enabled, id(self.network.proprio_projector)

    def _record(self, inputs: Inputs, with_gradient: bool) -> Recording:
        static = tuple(None if x is None else x.clone() for x in inputs)
        if not with_gradient:
            _on_a_side_stream(lambda: self.network(*static))
            forward = torch.cuda.CUDAGraph()
            with torch.cuda.graph(forward, pool=self._pool):
                outputs = self.network(*static)
            return Recording(static, outputs, forward)

        candidates = tuple(p for p in self.network.parameters() if p.requires_grad)

        def forward_and_backward() -> tuple[Tensor | None, ...]:
            outputs = self.network(*static)
            return torch.autograd.grad(outputs, candidates, tuple(map(torch.ones_like, outputs)), allow_unused=True)

        found = _on_a_side_stream(forward_and_backward)
        used = [p for p, gradient in zip(candidates, found, strict=True) if gradient is not None]
        del found
        for parameter in used:
            self._gradients.setdefault(parameter, torch.zeros_like(parameter))
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self._pool):
            outputs = self.network(*static)
        output_gradients = tuple(map(torch.zeros_like, outputs))
        with torch.cuda.graph(backward, pool=self._pool):
            gradients = torch.autograd.grad(outputs, used, output_gradients)
            torch._foreach_add_([self._gradients[parameter] for parameter in used], gradients)
        detached = tuple(output.detach() for output in outputs)
        return Recording(static, detached, forward, backward, output_gradients)

    def take_gradients(self) -> None:
        """Make the tensors that recordings add to the parameters' `.grad`, with what is in there now."""
        fresh = [buffer for parameter, buffer in self._gradients.items() if parameter.grad is None]
        if fresh:
            torch._foreach_zero_(fresh)
        for parameter, buffer in self._gradients.items():
            if parameter.grad is not None and parameter.grad is not buffer:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer


class _Replay(torch.autograd.Function):
    """Forward and backward replay. The anchor makes autograd call the backward pass; it gets no gradient."""

    @staticmethod
    def forward(ctx, anchor, network, recording, *inputs):
        ctx.set_materialize_grads(False)
        ctx.network, ctx.recording, ctx.number = network, recording, network.replays
        return recording.replay(inputs)

    @staticmethod
    def backward(ctx, *gradients):
        if ctx.network.replays != ctx.number:
            raise RuntimeError(
                "another pass of the network ran between this forward pass and its backward pass, and has overwritten "
                "its activations: call backward first, or load the policy without CUDA graphs"
            )
        ctx.network.take_gradients()
        ctx.recording.replay_backward(gradients)
        return None, None, None, *(None for _ in ctx.recording.inputs)


def _on_a_side_stream(function):
    """Run `function` WARM_UP times as recordings want it: not on the default stream. Returns the last result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            result = None  # frees what the pass before it returned
            result = function()
    torch.cuda.current_stream().wait_stream(stream)
    return result
