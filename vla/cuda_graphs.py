"""Run the network's passes as CUDA graphs: recorded once per input shape, then replayed without Python.

A 7B forward pass launches some 3,000 kernels. For one observation, launching them from Python takes as long as running
them. A recording holds a forward pass, or a forward and a backward pass. All recordings share one memory pool, so a
replay overwrites the results of the replay before it. Results are therefore copied out at once, and no other pass may
run between a forward pass and its backward pass.

While a pass with gradient is recorded, no other autograd graph may use a parameter: the node that adds up its gradient
works on the stream on which it was made, as a rule the default one, which may not wait for a recording. So whoever
computes with parameters outside of the recordings must delete the result before the next pass.

Source: Nguyen et al., "Accelerating PyTorch with CUDA Graphs" (pytorch.org/blog), torch.cuda.make_graphed_callables.
"""

import gc
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from contracts import first_line
from vla.model import OpenVLAOFT
from vla.pass_sizes import recorded_sizes

WARM_UP_PASSES = 2  # passes before a recording, in which kernels are compiled and chosen
# A recording takes GPU memory for its inputs and for every kernel, and batches of a small policy of ten tasks have many
# shapes: two such runs once filled the 80 GB of an H100.
MOST_RECORDINGS = 64
Part = Literal["forward", "trunk", "top"]  # the network's methods that are recorded
NetworkArguments = tuple[Any, ...]  # tensors, or None for an argument that is not used
Outputs = tuple[Any, ...]  # tensors; None for the lengths of a trunk's rows where none is padded


@dataclass
class Recording:
    """A recorded pass and the tensors that it reads and writes."""

    arguments: NetworkArguments
    outputs: Outputs
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph | None = None
    output_gradients: tuple[Tensor, ...] = ()

    def replay(self, arguments: NetworkArguments) -> Outputs:
        """Run the forward pass on other arguments of the same shapes, and return copies of the outputs."""
        for recorded, new in zip(self.arguments, arguments, strict=True):
            if new is not None:
                recorded.copy_(new)
        self.forward.replay()
        return tuple(None if output is None else output.clone() for output in self.outputs)


class GraphedNetwork:
    """Runs parts of a network by replaying CUDA graphs."""

    def __init__(self, network: OpenVLAOFT):
        self.network = network
        self.replays = 0
        self._recordings: dict[Hashable, Recording] = {}
        # Parameter -> buffer to which every recording adds its gradient.
        self._gradients: dict[Tensor, Tensor] = {}
        self._warm: set[Hashable] = set()  # keys of passes that were warmed up
        self._pool = torch.cuda.graph_pool_handle()
        # One stream, because cuBLAS keeps memory (32 MiB on an H200) for every stream that it has worked on
        self._stream = torch.cuda.Stream()
        network.vision_backbone.second_stream = torch.cuda.Stream()
        self._anchor = torch.zeros(
            (), device=network.language_model.lm_head.weight.device, requires_grad=True
        )

    def run(self, part: Part, *arguments: Tensor | None) -> Outputs:
        """The results of a part of the network. Its gradient is recorded if gradients are enabled."""
        with_gradient = torch.is_grad_enabled()
        key = self._key(part, arguments, with_gradient)
        recording = self._recordings.pop(key, None)
        if recording is None:
            while len(self._recordings) >= MOST_RECORDINGS:
                least_recently_used = next(iter(self._recordings))
                del self._recordings[least_recently_used]
            recording = self._record_with_room(part, arguments, with_gradient)
        self._recordings[key] = recording  # at the end, where the recordings used last are
        self.replays += 1
        if with_gradient:
            return _Replay.apply(self._anchor, self, recording, *arguments)
        return recording.replay(arguments)

    def _key(self, part: Part, arguments: NetworkArguments, with_gradient: bool) -> Hashable:
        """What a recording depends on: gradient or not, student or teacher, recomputed blocks, and input shapes.

        A trunk is the same for student and teacher.
        """
        network = self.network
        variant = (network.adapters.enabled, id(network.proprio_projector), network.recomputed_blocks)
        shapes = [None if x is None else (x.shape, x.dtype) for x in arguments]
        return (part, None if part == "trunk" else variant, with_gradient, *shapes)

    def drop_recordings(self) -> None:
        """Delete all recordings and free their memory."""
        self._recordings.clear()
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()
        torch.cuda.empty_cache()

    def _record_with_room(self, part: Part, arguments: NetworkArguments, with_gradient: bool) -> Recording:
        """Call `_record`, and again without the other recordings if memory runs out. Raises torch.OutOfMemoryError."""
        with suppress(torch.OutOfMemoryError), _as_out_of_memory_error():
            return self._record(part, arguments, with_gradient)
        # After the `with` block the exception no longer keeps the tensors of the failed attempt alive.
        self.drop_recordings()
        with _as_out_of_memory_error():
            return self._record(part, arguments, with_gradient)

    def _record(self, part: Part, arguments: NetworkArguments, with_gradient: bool) -> Recording:
        """Record a pass for the shapes of `arguments`. Raises torch.OutOfMemoryError."""
        recorded_arguments = tuple(None if x is None else x.clone() for x in arguments)
        run = getattr(self.network, part)
        self._warm_up(part, recorded_arguments, with_gradient)
        forward = torch.cuda.CUDAGraph()
        backward = torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self._pool, stream=self._stream):
            outputs = run(*recorded_arguments)
        if not with_gradient:
            return Recording(recorded_arguments, outputs, forward)
        output_gradients = tuple(map(torch.zeros_like, outputs))
        parameters = list(self._gradients)
        with torch.cuda.graph(backward, pool=self._pool, stream=self._stream):
            gradients = torch.autograd.grad(outputs, parameters, output_gradients)
            torch._foreach_add_([self._gradients[parameter] for parameter in parameters], gradients)
        detached = tuple(output.detach() for output in outputs)
        return Recording(recorded_arguments, detached, forward, backward, output_gradients)

    def _warm_up(self, part: Part, arguments: NetworkArguments, with_gradient: bool) -> None:
        """Run passes that are not recorded, to compile kernels and find out which parameters get a gradient.

        For a large (compiled) network, a pass with gradient needs much memory besides the recordings, so they are
        deleted first. The smaller `recorded_sizes` are warmed up at the same time, so that this happens only once. A
        small network is used with many batch sizes, and keeps its recordings.
        """
        batch_size = len(arguments[0])
        is_large = with_gradient and self.network.is_compiled
        # The policy computes a single observation as two.
        batch_sizes = [size for size in recorded_sizes(batch_size) if size > 1] if is_large else [batch_size]
        # Clones, as in a recording: the compiler makes other code for a view, and would make that for a clone, and
        # choose its kernels, during the recording.
        batches = [tuple(None if x is None else x[:size].clone() for x in arguments) for size in batch_sizes]
        keys = [self._key(part, batch, with_gradient) for batch in batches]
        cold_batches = [batch for batch, key in zip(batches, keys, strict=True) if key not in self._warm]
        if is_large and cold_batches:
            self.drop_recordings()
        for batch in cold_batches:
            try:
                for _ in range(WARM_UP_PASSES):
                    self._run_once(part, batch, with_gradient)
            except torch.OutOfMemoryError:
                # The code compiled last is also used for other shapes, but some of its kernels have not run yet. So all
                # batches must be warmed up again.
                self._warm.clear()
                raise
            self._warm.add(self._key(part, batch, with_gradient))

    def _run_once(self, part: Part, arguments: NetworkArguments, with_gradient: bool) -> None:
        """Run one pass on the stream of the recordings, because a recording may not use the default stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            outputs = getattr(self.network, part)(*arguments)
            if with_gradient:
                parameters = [p for p in self.network.parameters() if p.requires_grad]
                ones = tuple(map(torch.ones_like, outputs))
                gradients = torch.autograd.grad(outputs, parameters, ones, allow_unused=True)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None and parameter not in self._gradients:
                        grad = parameter.grad
                        self._gradients[parameter] = torch.zeros_like(parameter) if grad is None else grad
        torch.cuda.current_stream().wait_stream(self._stream)

    def take_gradients(self) -> None:
        """Make the recordings' gradient buffers the parameters' `.grad`, and keep the gradients that are there."""
        to_clear = [buffer for parameter, buffer in self._gradients.items() if parameter.grad is None]
        if to_clear:
            torch._foreach_zero_(to_clear)
        for parameter, buffer in self._gradients.items():
            if parameter.grad is not None and parameter.grad is not buffer:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer


@contextmanager
def _as_out_of_memory_error() -> Iterator[None]:
    """Raise torch.OutOfMemoryError also where CUDA itself, at the end of a recording, lacks memory (RuntimeError)."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        raise torch.OutOfMemoryError(first_line(error)) from None


class _Replay(torch.autograd.Function):
    """Replay forward and backward passes in autograd. The anchor requires a gradient, so that it calls `backward`."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, network: GraphedNetwork, recording: Recording, *arguments: Tensor | None
    ) -> Outputs:
        ctx.set_materialize_grads(False)
        ctx.network = network
        ctx.recording = recording
        ctx.replay_index = network.replays
        return recording.replay(arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        if ctx.network.replays != ctx.replay_index:
            raise RuntimeError(
                "another pass has overwritten this one's activations: call backward first, or do without CUDA graphs"
            )
        ctx.network.take_gradients()
        for recorded_gradient, gradient in zip(ctx.recording.output_gradients, gradients, strict=True):
            if gradient is None:
                recorded_gradient.zero_()
            else:
                recorded_gradient.copy_(gradient)
        ctx.recording.backward.replay()
        return None, None, None, *(None for _ in ctx.recording.arguments)
