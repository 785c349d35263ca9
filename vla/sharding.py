"""A frozen base spread over the processes that train together (torch's FSDP2), for one that does not fit one card.

Each process keeps its part of every transformer block, and has a whole block only while that block runs. Adapters and
all other weights stay whole on every process. A block is put together by all processes or by none, so all have to run
the network equally often. Where they do not by themselves, in a rollout, those that have nothing left to do keep step
with the others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import is_torch_version
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from errors import BadInput
from vla.blocks import llama_block
from vla.lora_layers import LoraLinear
from vla.nf4 import NO_SHARDS, num_in_4bit
from vla.openvla_oft import OpenVLAOFT


def shard_blocks(network: OpenVLAOFT, device: torch.device) -> None:
    """Spread the frozen weights of all transformer blocks; each block is moved to `device` by itself, then cut.

    Raises BadInput when torch is too old to leave the adapters out of it, and for weights in 4 bits.
    """
    if num_in_4bit(network):
        raise BadInput(NO_SHARDS)
    if not is_torch_version(">=", "2.7"):
        raise BadInput(f"spreading the base over processes needs torch 2.7 or newer, found {torch.__version__}")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    trained = {parameter for parameter in network.parameters() if parameter.requires_grad}
    for layer in network.language_model.model.layers:
        layer.forward = partial(llama_block, layer)  # FSDP's hooks surround the call of a module
    network._vit_block = network._llama_block = _called  # none of them compiled
    vision = network.vision_backbone
    for block in (*network.language_model.model.layers, *vision.featurizer.blocks, *vision.fused_featurizer.blocks):
        # Said explicitly, because a block is FSDP's root module here, and a root would stay whole after its forward.
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=trained)
        for layer in block.modules():
            if isinstance(layer, LoraLinear):  # FSDP gives every process as many rows, and the last ones what is left
                layer.first_row = dist.get_rank() * -(-len(layer.weight) // dist.get_world_size())


def _called(layer: nn.Module, *arguments: Any) -> Tensor:
    return layer(*arguments)


class Steps:
    """Counts the forward passes of a sharded network with the other processes."""

    def __init__(self, network: nn.Module):
        self._network = network
        self._group: Any = dist.new_group(backend="gloo")  # torch's type allows for processes outside of it
        self._inputs: tuple[Any, ...] = ()  # of the last pass: something valid to keep step with
        network.register_forward_pre_hook(self._announce)

    def _announce(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._inputs = inputs
        self._anyone_at_work(True)

    def _anyone_at_work(self, me: bool) -> bool:
        at_work = torch.tensor(int(me))
        dist.all_reduce(at_work, op=dist.ReduceOp.MAX, group=self._group)
        return bool(at_work)

    @contextmanager
    def together(self) -> Iterator[None]:
        """After the block, accompany the other processes until each of them has left its own."""
        yield
        with torch.no_grad():
            while self._anyone_at_work(False):
                self._network.forward(*self._inputs)  # without the hook: this pass announces nothing
