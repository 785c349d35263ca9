"""Checkpoint folders of OpenVLA-OFT: find out what a folder is, stream its weights into a network, write new ones.

Every public kind is read:
  * trained by L1 regression: safetensors + action_head--*.pt + proprio_projector--*.pt; two images;
  * trained on action tokens: safetensors alone; one image, no proprio;
  * after reinforcement learning with SimpleVLA-RL: as before, with the proprio projector among the safetensors.
A folder that is read is never written to, and nothing in it is executed.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from contracts import BadInput, first_line, read_json, resolve_pointer, write_json
from vla.eight_bits import QUANTISED, quantise
from vla.lora import CONFIG_FILE, read_looks
from vla.model import L1RegressionHead, OpenVLAOFT, ProprioProjector
from vla.tokens import BOS_ID, EOS_ID, PAD_ID, STATISTICS_FILE, DatasetStatistics, load_statistics
from vla.weights import (
    StoredTensor,
    read_header,
    read_pt,
    stream_tensors,
    weight_files,
    write_pt,
    write_tensors,
)

# config.json's text_config names only what differs from these: Llama-2's sizes, with the rms_norm_eps that LlamaConfig
# had when OpenVLA was released. Written out so that no library default can change what a checkpoint computes.
LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "head_dim": None,
    "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None,
    "attention_bias": False, "mlp_bias": False, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID,
}  # fmt: skip
PROPRIO_PREFIX = "proprio_projector."
PROPRIO_FILE = "proprio_projector--latest_checkpoint.pt"
HUB_TIMEOUT_S = 10.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.pt", "tokenizer.model"]  # no Python code


@dataclass(frozen=True)
class VitConfig:
    timm_id: str
    image_size: int
    overrides: dict[str, Any]  # further keyword arguments of timm.create_model: sizes of small models


@dataclass(frozen=True)
class ModelConfig:
    vits: tuple[VitConfig, VitConfig]  # DINOv2, SigLIP
    llama: LlamaConfig
    num_images: int | None  # None: the file doesn't say
    chunk_length: int  # actions per decision
    looks: tuple[str, ...]  # see CheckpointInfo


def read_model_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    raw = read_json(path)
    if (kind := raw.get("model_type")) != "openvla":
        raise BadInput(f"{path}: model_type is {kind!r}, expected 'openvla': give an OpenVLA-OFT checkpoint")
    sizes = raw.get("image_sizes", [224, 224])
    activations = raw.get("timm_override_act_layers", [None, None])
    overrides = raw.get(
        "test_vit_overrides", [{}, {}]
    )  # an addition of small checkpoints; real ones have none
    try:
        options = [
            ({"act_layer": act} if act else {}) | more
            for act, more in zip(activations, overrides, strict=True)
        ]
        dino, siglip = map(VitConfig, raw["timm_model_ids"], sizes, options)
        llama = _llama_config(raw.get("text_config", {}))
    except Exception as error:  # transformers has exceptions of its own for fields of other types
        raise BadInput(f"{path}: not a usable OpenVLA config ({type(error).__name__}: {error})") from error
    chunk_length, looks = raw.get("num_action_chunks") or 8, tuple(raw.get("looks") or ())
    return ModelConfig((dino, siglip), llama, raw.get("num_images_in_input"), chunk_length, looks)


def _llama_config(text_config: dict[str, Any]) -> LlamaConfig:
    fields = LLAMA_DEFAULTS | {k: v for k, v in text_config.items() if k in LLAMA_DEFAULTS and v is not None}
    # JSON writes 1.0 as 1, too; transformers refuses integers.
    fields |= {name: float(fields[name]) for name in ("rms_norm_eps", "rope_theta")}
    # SDPA is fixed: the eager and flash variants add a causal mask of their own in some versions of transformers.
    return LlamaConfig(**fields, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa")


@dataclass(frozen=True)
class CheckpointInfo:
    """What a folder holds, found out from its file names, headers and JSON files alone."""

    folder: Path
    config: ModelConfig
    statistics: dict[str, DatasetStatistics]
    statistics_folder: (
        Path  # where they were read: an adapter may have learned from another data set than its base
    )
    weights: dict[str, StoredTensor]  # the network's tensors, by their name in the files
    proprio_weights: dict[str, StoredTensor]  # of a proprio projector that is among the safetensors
    proprio_file: Path | None
    action_head_file: Path | None
    num_images: int
    # The pictures that it was trained on: "official", "lowpoly", the digest of another pack. (): not recorded, as in
    # public checkpoints, which were trained on LIBERO's own.
    looks: tuple[str, ...]

    @property
    def uses_proprio(self) -> bool:
        return self.proprio_file is not None or bool(self.proprio_weights)

    @property
    def kind(self) -> str:
        if self.action_head_file is not None:
            return "L1 regression"
        return "action tokens, after RL" if self.proprio_weights else "action tokens"


def inspect_checkpoint(
    folder: Path, num_images: int | None = None, adapter: str | None = None, statistics: str | None = None
) -> CheckpointInfo:
    """num_images overrides what the folder says. Public ones don't say, but were trained as the code below has it.

    adapter: the folder of one that was trained on top of it, and thereby on further pictures and perhaps by its own
    statistics; statistics: a folder with those of demonstrations to come.
    """
    config = read_model_config(folder)
    tensors = {name: tensor for path in weight_files(folder) for name, tensor in read_header(path)[0].items()}
    files: dict[str, Path | None] = {}
    for module in ("proprio_projector", "action_head", "vision_backbone", "noisy_action_projector"):
        found = sorted(folder.glob(f"*{module}*checkpoint*"))  # as loose as the reference
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise BadInput(
                f"{folder} holds several {module} files ({names}): keep the one that belongs to the weights"
            )
        files[module] = found[0] if found else None
    if files["vision_backbone"] or files["noisy_action_projector"]:
        raise BadInput(
            f"{folder} was trained with FiLM or a diffusion head, which this program does not support"
        )
    proprio_weights = {key: tensors.pop(key) for key in list(tensors) if key.startswith(PROPRIO_PREFIX)}
    proprio_file, head_file = files["proprio_projector"], files["action_head"]
    num_images = (
        num_images or config.num_images or (2 if head_file and (proprio_file or proprio_weights) else 1)
    )
    folders = [
        Path(name) for name in (statistics, adapter) if name and (Path(name) / STATISTICS_FILE).is_file()
    ]
    statistics_folder = [*folders, folder][0]
    looks = tuple(sorted({*config.looks, *(read_looks(Path(adapter)) if adapter else ())}))
    return CheckpointInfo(
        folder, config, load_statistics(statistics_folder), statistics_folder, tensors, proprio_weights, proprio_file,
        head_file, num_images, looks,
    )  # fmt: skip


def resolve_checkpoint(name: str) -> Path:
    """A local path as it is; a hub id from the cache, or downloaded. Raises BadInput, soon where no network is."""
    if (folder := Path(name).expanduser()).is_dir():
        return folder
    if not _HUB_ID.fullmatch(name):
        raise BadInput(
            f"checkpoint {name}: no such folder: give a folder, or a hub id (owner/name); adapters need a base"
        )
    try:
        cached = Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
        if all(path.is_file() for path in weight_files(cached)):
            return cached
    except Exception:  # not cached, or known to the library to be incomplete
        pass
    try:
        # Asked with a timeout first: snapshot_download waits forever where a network swallows packets.
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub library lets errors of several HTTP libraries through
        found = f"no such folder, not in the download cache, and the hub gave {type(error).__name__}"
        raise BadInput(
            f"checkpoint {name}: {found}: check name and network, or give a local folder"
        ) from error


def base_of_adapter(folder: Path) -> str | None:
    """The base (folder or hub id) that an adapter folder names; None when the folder is no adapter."""
    if (folder / CONFIG_FILE).is_file():
        base = read_json(folder / CONFIG_FILE).get("base_model_name_or_path")
        if not base:
            raise BadInput(
                f"{folder / CONFIG_FILE} names no base: give the base as checkpoint and this as adapter"
            )
        return base
    return None


def base_and_adapter(checkpoint: str, adapter: str | None) -> tuple[str, str | None]:
    """A checkpoint that is itself an adapter folder becomes its base and that adapter."""
    folder = resolve_pointer(Path(checkpoint))
    if (base := base_of_adapter(folder)) is None:
        return checkpoint, adapter
    if adapter is not None:
        raise BadInput(f"{checkpoint} is itself an adapter: give its base as the checkpoint")
    return base, str(folder)


def load_network(
    info: CheckpointInfo, num_action_tokens: int, device: torch.device, dtype: torch.dtype,
    eight_bits: torch.dtype | None = None,
) -> OpenVLAOFT:  # fmt: skip
    """Build the network without memory and stream the weights to `device`. The proprio projector stays float32.

    eight_bits: format of the matrices of the language model's blocks, each quantised as it comes; None: `dtype`, too.
    """
    try:
        with torch.device("meta"):
            network = OpenVLAOFT(info.config, num_action_tokens)
    except Exception as error:  # timm and transformers raise many kinds for names and sizes that do not fit
        path = info.folder / "config.json"
        raise BadInput(f"{path}: no network can be built from it ({first_line(error)})") from error
    # Old versions of transformers stored the rotary frequencies; they are computed here.
    stored = {
        name: tensor for name, tensor in info.weights.items() if not name.endswith("rotary_emb.inv_freq")
    }
    expected = {file_key(name): (name, tuple(tensor.shape)) for name, tensor in network.state_dict().items()}
    for key in sorted(expected.keys() | stored.keys()):
        shape, found = (
            expected[key][1] if key in expected else None,
            stored[key].shape if key in stored else None,
        )
        if shape != found:
            where = info.folder if found is None else stored[key].path
            raise BadInput(f"{where}: {key}: config.json implies shape {shape}, found {found}")
    state, scales = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in stream_tensors(stored.values(), device, dtype):
        name = expected[key][0]
        if eight_bits is not None and name.startswith(QUANTISED) and tensor.ndim == 2:
            tensor, scales[name] = quantise(tensor, eight_bits)
        state[name] = tensor
    network.requires_grad_(False).load_state_dict(state, strict=True, assign=True)
    for name, scale in scales.items():
        network.get_submodule(name.removesuffix(".weight")).weight_scale = scale[:, 0]
    with torch.device(device):  # checkpoints hold no RoPE frequencies; float32 whatever the weights' dtype is
        network.language_model.model.rotary_emb = LlamaRotaryEmbedding(config=info.config.llama)
    if (proprio := read_proprio_state(info)) is not None:
        projector = _module_of(ProprioProjector, proprio, info.proprio_file or info.folder)
        network.proprio_projector = projector.to(device, torch.float32)
    return network.requires_grad_(False).eval()


def file_key(name: str) -> str:
    """LayerScale's parameter, timm's `gamma`, is `scale_factor` in files: old transformers rewrote "gamma"."""
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
    """The L1 regression head, or None when the folder has none. Raises BadInput when the file is something else."""
    if info.action_head_file is None:
        return None
    head = _module_of(L1RegressionHead, read_pt(info.action_head_file), info.action_head_file)
    return head.to(device, dtype).requires_grad_(False)


def _module_of(kind: Any, state: dict[str, Tensor], path: Path) -> Any:
    try:
        with torch.device("meta"):
            module = kind(*kind.sizes(state))
        module.load_state_dict(state, assign=True)
        return module.eval()
    except (KeyError, RuntimeError, ValueError) as error:
        raise BadInput(
            f"{path}: not a {kind.__name__}, tensors {sorted(state)[:3]}...: get the file again"
        ) from error


def check_dimensions(
    info: CheckpointInfo, unnorm_key: str, head: L1RegressionHead | None, projector: ProprioProjector | None
) -> None:
    """Raises BadInput when head or projector do not fit the network and the statistics of `unnorm_key`."""
    statistics, width = info.statistics[unnorm_key], info.config.llama.hidden_size
    dim, state_dim = statistics.action.dim, statistics.proprio.dim if statistics.proprio else None
    wanted = f"expected one for hidden size {width}, {dim} action and {state_dim} proprio dimensions: get its own file"
    if head is not None and (head.model.fc1.in_features, head.action_dim) != (width * dim, dim):
        raise BadInput(f"{info.action_head_file}: {wanted}")
    if projector is not None and (projector.fc2.out_features, projector.proprio_dim) != (width, state_dim):
        raise BadInput(f"{info.proprio_file or info.folder}: {wanted}")


def save_checkpoint(
    folder: Path, network: OpenVLAOFT, config: dict[str, Any], *, dtype: torch.dtype = torch.bfloat16,
    action_head: L1RegressionHead | None = None,
) -> None:  # fmt: skip
    """Write config.json, generation_config.json, weights (without adapters) and heads, these in their own dtypes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    generation = {
        "_from_model_config": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    write_json(
        folder / "generation_config.json", generation | {"transformers_version": "4.40.1"}
    )  # openvla-oft's
    state = {
        name: tensor for name, tensor in network.state_dict().items() if not name.startswith(PROPRIO_PREFIX)
    }
    write_tensors(
        folder / "model.safetensors", {file_key(name): x.to("cpu", dtype) for name, x in state.items()}
    )
    for name, head in (
        (PROPRIO_FILE, network.proprio_projector),
        ("action_head--latest_checkpoint.pt", action_head),
    ):
        if head is not None:
            write_pt(folder / name, head.state_dict())
