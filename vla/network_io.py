"""Load a network from a checkpoint folder, and save a network as a checkpoint folder."""

import re
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from contracts import BadInput, write_json
from vla.checkpoint import PROPRIO_PREFIX, CheckpointInfo
from vla.eight_bits import QUANTISED, quantise
from vla.model import L1RegressionHead, OpenVLAOFT, ProprioProjector
from vla.tokens import BOS_ID, EOS_ID, PAD_ID
from vla.weights import StoredTensor, read_pt, stream_tensors, write_pt, write_tensors

PROPRIO_FILE = "proprio_projector--latest_checkpoint.pt"
ACTION_HEAD_FILE = "action_head--latest_checkpoint.pt"
GENERATION_CONFIG = {
    "_from_model_config": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "transformers_version": "4.40.1",  # the version that openvla-oft uses
}
Head = TypeVar("Head", L1RegressionHead, ProprioProjector)


def load_network(
    info: CheckpointInfo,
    num_action_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    eight_bits: torch.dtype | None = None,
) -> OpenVLAOFT:
    """Load the network of a checkpoint folder to `device`, in `dtype`; its proprio projector is float32.

    The network is built without memory (on the meta device). Its weights are read one by one. eight_bits: the 8-bit
    format of the weight matrices in the language model's blocks, which are quantised as soon as they are read; None:
    they have `dtype` like the others. Raises BadInput when weights and config.json do not fit together.
    """
    with torch.device("meta"):
        network = OpenVLAOFT(info.config, num_action_tokens)
    parameter_names = {file_key(name): name for name in network.state_dict()}
    # Old versions of transformers stored the rotary frequencies, too. Here they are computed below.
    stored = {key: tensor for key, tensor in info.weights.items() if not key.endswith("rotary_emb.inv_freq")}
    _check_shapes(network, stored, info.weights_folder)
    state: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for key, tensor in stream_tensors(stored.values(), device, dtype):
        name = parameter_names[key]
        if eight_bits is not None and name.startswith(QUANTISED) and tensor.ndim == 2:
            state[name], scales[name] = quantise(tensor, eight_bits)
        else:
            state[name] = tensor
    network.requires_grad_(False).load_state_dict(state, strict=True, assign=True)
    for name, scale in scales.items():
        network.get_submodule(name.removesuffix(".weight")).weight_scale = scale[:, 0]
    with torch.device(device):  # the frequencies are float32, whatever the weights' dtype is
        network.language_model.model.rotary_emb = LlamaRotaryEmbedding(config=info.config.llama)
    proprio_state = read_proprio_state(info)
    if proprio_state is not None:
        projector = _load_head(ProprioProjector, proprio_state)
        network.proprio_projector = projector.to(device, torch.float32)
    return network.requires_grad_(False).eval()


def _check_shapes(network: OpenVLAOFT, stored: dict[str, StoredTensor], folder: Path) -> None:
    """Raise BadInput for tensors of no part of the network, and for the first that is missing or of another shape."""
    expected = {file_key(name): tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    unknown = sorted(stored.keys() - expected.keys())
    if unknown:
        raise BadInput(
            f"{folder}: {len(unknown)} tensors are of no part of an OpenVLA network, such as {unknown[0]}: if they are "
            "a value head or another addition that does not decide actions, store the policy without them"
        )
    for key, expected_shape in sorted(expected.items()):
        stored_shape = stored[key].shape if key in stored else None
        if expected_shape != stored_shape:
            path = stored[key].path if key in stored else folder
            raise BadInput(f"{path}: {key}: config.json implies shape {expected_shape}, found {stored_shape}")


def file_key(name: str) -> str:
    """The name that a parameter has in checkpoint files.

    LayerScale's `gamma` in timm is called `scale_factor` there, because old versions of transformers renamed "gamma".
    """
    return re.sub(r"^(vision_backbone\..*\.ls[12])\.gamma$", r"\1.scale_factor", name)


def read_proprio_state(info: CheckpointInfo) -> dict[str, Tensor] | None:
    """The tensors of the folder's proprio projector, in their stored dtype; None when it has none."""
    if info.proprio_weights:
        stored = stream_tensors(info.proprio_weights.values())
        return {key.removeprefix(PROPRIO_PREFIX): tensor for key, tensor in stored}
    return None if info.proprio_file is None else read_pt(info.proprio_file)


def load_action_head(
    info: CheckpointInfo, device: torch.device, dtype: torch.dtype
) -> L1RegressionHead | None:
    """The L1 regression head, or None when the folder has none."""
    if info.action_head_file is None:
        return None
    head = _load_head(L1RegressionHead, read_pt(info.action_head_file))
    return head.to(device, dtype).requires_grad_(False)


def _load_head(kind: type[Head], state: dict[str, Tensor]) -> Head:
    """Build a module of the class `kind` from its state dict."""
    with torch.device("meta"):
        module = kind(*kind.sizes(state))
    module.load_state_dict(state, assign=True)
    return module.eval()


def save_network(
    folder: Path,
    network: OpenVLAOFT,
    config: dict[str, object],
    *,
    dtype: torch.dtype = torch.bfloat16,
    action_head: L1RegressionHead | None = None,
) -> None:
    """Save a network without adapters as a checkpoint folder.

    Writes config.json, generation_config.json, the weights in `dtype`, and proprio projector and L1 head in their own
    dtypes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", GENERATION_CONFIG)
    weights = {
        file_key(name): tensor.to("cpu", dtype)
        for name, tensor in network.state_dict().items()
        if not name.startswith(PROPRIO_PREFIX)
    }
    write_tensors(folder / "model.safetensors", weights)
    if network.proprio_projector is not None:
        write_pt(folder / PROPRIO_FILE, network.proprio_projector.state_dict())
    if action_head is not None:
        write_pt(folder / ACTION_HEAD_FILE, action_head.state_dict())
