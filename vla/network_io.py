"""Load a network from a checkpoint folder, and save a network as a checkpoint folder."""

import re
import shutil
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from contracts import BadInput, undamaged, write_json
from vla.checkpoint import PROPRIO_PREFIX, CheckpointInfo
from vla.eight_bits import QUANTISED, quantise
from vla.heads import L1RegressionHead, ProprioProjector
from vla.model import OpenVLAOFT
from vla.weights import read_pt, stream_tensors, write_pt, write_tensors

PROPRIO_FILE = "proprio_projector--latest_checkpoint.pt"
L1_HEAD_FILE = "action_head--latest_checkpoint.pt"
SMALL_FILES = re.compile(r"tokenizer\.model|.*(token|processor|statistics).*\.json")
Head = TypeVar("Head", L1RegressionHead, ProprioProjector)


def load_network(
    info: CheckpointInfo,
    num_action_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    is_int8: bool = False,
) -> OpenVLAOFT:
    """Load the network of a checkpoint folder to `device`, in `dtype`; its proprio projector is float32.

    The network is built without memory (on the meta device), and its weights are read one by one. is_int8: whether
    the matrices in the language model's blocks become int8, unlike the others. Raises BadInput when weights and
    config.json do not fit together.
    """
    with torch.device("meta"):
        network = OpenVLAOFT(info.config, num_action_tokens)
    state, scales = _read_weights(info, device, dtype, is_int8)
    try:
        network.requires_grad_(False).load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:  # it names the tensors that are unknown, missing or of another shape
        raise BadInput(
            f"{info.weights_folder}: the weights are not those of config.json's network; a value head or another "
            f"addition that does not decide actions must be left out: {error!s:.500}"
        ) from None
    for name, scale in scales.items():
        network.get_submodule(name.removesuffix(".weight")).weight_scale = scale[:, 0]
    with torch.device(device):  # the frequencies are float32, whatever the weights' dtype is
        network.language_model.model.rotary_emb = LlamaRotaryEmbedding(config=info.config.llama)
    proprio_state = read_proprio_state(info)
    if proprio_state is not None:
        with undamaged(info.proprio_file or info.weights_folder):
            projector = _load_head(ProprioProjector, proprio_state)
        network.proprio_projector = projector.to(device, torch.float32)
    return network.requires_grad_(False).eval()


def _read_weights(
    info: CheckpointInfo, device: torch.device, dtype: torch.dtype, is_int8: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The network's state dict, and the scales of the rows of what is quantised."""
    # Old versions of transformers stored the rotary frequencies, too.
    stored = [tensor for key, tensor in info.weights.items() if not key.endswith("rotary_emb.inv_freq")]
    state: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for key, tensor in stream_tensors(stored, device, dtype):
        name = re.sub(r"\.scale_factor$", ".gamma", key)
        if is_int8 and name.startswith(QUANTISED) and tensor.ndim == 2:
            state[name], scales[name] = quantise(tensor)
        else:
            state[name] = tensor
    return state, scales


def file_key(name: str) -> str:
    """The name that a parameter has in checkpoint files.

    LayerScale's `gamma` in timm is called `scale_factor` there, because old versions of transformers renamed "gamma".
    """
    return re.sub(r"\.gamma$", ".scale_factor", name)


def read_proprio_state(info: CheckpointInfo) -> dict[str, Tensor] | None:
    """The tensors of the folder's proprio projector, in their stored dtype; None when it has none."""
    if info.proprio_weights:
        stored = stream_tensors(info.proprio_weights.values())
        return {key.removeprefix(PROPRIO_PREFIX): tensor for key, tensor in stored}
    return None if info.proprio_file is None else read_pt(info.proprio_file)


def load_l1_head(info: CheckpointInfo, device: torch.device, dtype: torch.dtype) -> L1RegressionHead | None:
    """The L1 regression head, or None when the folder has none."""
    if info.action_head_file is None:
        return None
    state = read_pt(info.action_head_file)
    with undamaged(info.action_head_file):
        head = _load_head(L1RegressionHead, state)
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
    l1_head: L1RegressionHead | None = None,
    source: Path | None = None,
) -> None:
    """Save a network without adapters: config.json, weights in `dtype`, projector and L1 head in their own dtypes.

    source: the checkpoint folder whose tokenizer, image processor and statistics are copied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in () if source is None else source.iterdir():
        if SMALL_FILES.fullmatch(path.name):
            shutil.copyfile(path, folder / path.name)
    write_json(folder / "config.json", config)
    weights = {
        file_key(name): tensor.to("cpu", dtype)
        for name, tensor in network.state_dict().items()
        if not name.startswith(PROPRIO_PREFIX)
    }
    write_tensors(folder / "model.safetensors", weights)
    if network.proprio_projector is not None:
        write_pt(folder / PROPRIO_FILE, network.proprio_projector.state_dict())
    if l1_head is not None:
        write_pt(folder / L1_HEAD_FILE, l1_head.state_dict())
