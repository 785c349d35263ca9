"""Checkpoint folders of OpenVLA-OFT: find out what a folder is, stream its weights into a network, write new ones.

Every public kind is read (docs of the kinds: README, "Which checkpoints work"):
  * trained by L1 regression: safetensors + action_head--*.pt + proprio_projector--*.pt; two images;
  * trained on action tokens: safetensors alone; one image, no proprio;
  * after reinforcement learning with SimpleVLA-RL: as before, with the proprio projector among the safetensors.
A folder that is read is never written to, and nothing in it is executed.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from torch import Tensor
from transformers import LlamaConfig

from contracts import BadInput, first_line, read_json, write_json
from vla.lora import CONFIG_FILE, lora_layers
from vla.model import L1RegressionHead, OpenVLAOFT, ProprioProjector
from vla.prompt import BOS_ID, EOS_ID, PAD_ID
from vla.tokens import DatasetStatistics, load_statistics
from vla.weights import StoredTensor, read_header, read_pt, stream_tensors, weight_files, write_pt, write_weights

# config.json names only what differs from these. They are Llama-2's sizes, but with the rms_norm_eps that LlamaConfig
# had when OpenVLA was released; written out here so that no library default can change what a checkpoint computes.
LLAMA_DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pad_token_id": PAD_ID,
}
# Of text_config, these too are architecture; the rest says how the file was written, or is fixed by this program.
_OPTIONAL = {"num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "bos_token_id",
             "eos_token_id"}  # fmt: skip
# Chunk lengths by action dimension in the reference's constants: LIBERO's one arm, and two arms (ALOHA, RoboTwin).
DEFAULT_CHUNK_LENGTHS = {7: 8, 14: 25}
PROPRIO_PREFIX = "proprio_projector."
HUB_TIMEOUT_S = 10.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.pt", "tokenizer.model"]  # no Python code
_IGNORED_KEYS = re.compile(r"rotary_emb\.inv_freq$")  # written by old versions of transformers; computed here


@dataclass(frozen=True)
class VitConfig:
    """One of the two vision transformers, as timm builds it."""

    timm_id: str
    image_size: int
    overrides: dict[str, Any]  # further keyword arguments of timm.create_model: sizes of small models


@dataclass(frozen=True)
class ModelConfig:
    vits: tuple[VitConfig, VitConfig]  # DINOv2, SigLIP
    llama: LlamaConfig
    num_images: int | None  # None: the file doesn't say
    chunk_length: int | None  # None: the file doesn't say


def read_model_config(folder: Path) -> ModelConfig:
    """Raises BadInput that names the file when it is missing, broken or of another kind of model."""
    path = folder / "config.json"
    raw = read_json(path)
    if (kind := raw.get("model_type")) != "openvla":
        raise BadInput(f"{path}: model_type is {kind!r}, expected 'openvla': give an OpenVLA-OFT checkpoint")
    ids = raw.get("timm_model_ids")
    if not raw.get("use_fused_vision_backbone", True) or not isinstance(ids, list) or len(ids) != 2:
        raise BadInput(f"{path}: timm_model_ids is {ids}, expected two vision transformers (DINOv2 + SigLIP)")
    for name, most in (("num_images_in_input", 3), ("num_action_chunks", 1000)):
        value = raw.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise BadInput(f"{path}: {name} is {value!r}, expected a number from 1 to {most}")
    try:
        sizes = raw.get("image_sizes", [224, 224])
        activations = raw.get("timm_override_act_layers", [None, None])
        overrides = raw.get("test_vit_overrides", [{}, {}])  # an addition of small checkpoints; real ones have none
        dino, siglip = (
            VitConfig(ids[i], sizes[i], ({"act_layer": activations[i]} if activations[i] else {}) | overrides[i])
            for i in range(2)
        )
        if dino.image_size != siglip.image_size:
            raise ValueError(f"image_sizes is {sizes}, expected one size twice")
        llama = llama_config(raw.get("text_config", {}))
    except Exception as error:  # transformers has exceptions of its own for fields of other types
        raise BadInput(f"{path}: not a usable OpenVLA config ({type(error).__name__}: {error})") from error
    return ModelConfig((dino, siglip), llama, raw.get("num_images_in_input"), raw.get("num_action_chunks"))


def llama_config(text_config: dict[str, Any]) -> LlamaConfig:
    """text_config of the checkpoint, completed with LLAMA_DEFAULTS."""
    known = LLAMA_DEFAULTS.keys() | _OPTIONAL
    given = {key: value for key, value in text_config.items() if key in known and value is not None}
    if "rope_theta" not in given and "rope_parameters" not in given:
        given["rope_theta"] = 10000.0
    for name in given.keys() & {"rms_norm_eps", "rope_theta"}:
        given[name] = float(given[name])  # JSON writes 1.0 as 1, too; transformers refuses integers
        if given[name] <= 0:
            raise ValueError(f"{name} is {given[name]}, expected a positive number")
    # SDPA is fixed: the eager and flash variants add a causal mask of their own in some versions of transformers.
    fixed = {"tie_word_embeddings": False, "use_cache": False, "attn_implementation": "sdpa"}
    return LlamaConfig(**(LLAMA_DEFAULTS | given | fixed))


@dataclass(frozen=True)
class CheckpointInfo:
    """What a folder holds, found out from its file names, headers and JSON files alone."""

    folder: Path
    config: ModelConfig
    statistics: dict[str, DatasetStatistics]
    weights: dict[str, StoredTensor]  # the network's tensors, by their name in the files
    proprio_weights: dict[str, StoredTensor]  # of a proprio projector that is among the safetensors
    proprio_file: Path | None
    action_head_file: Path | None
    num_images: int

    @property
    def uses_proprio(self) -> bool:
        return self.proprio_file is not None or bool(self.proprio_weights)

    @property
    def has_l1_head(self) -> bool:
        return self.action_head_file is not None

    @property
    def kind(self) -> str:
        if self.has_l1_head:
            return "L1 regression"
        return "action tokens, after RL" if self.proprio_weights else "action tokens"

    def chunk_length(self, action_dim: int) -> int:
        """Actions per decision. Raises BadInput when neither the config nor the action dimension tells."""
        length = self.config.chunk_length or DEFAULT_CHUNK_LENGTHS.get(action_dim)
        if length is None:
            path = self.folder / "config.json"
            raise BadInput(f"{path}: unknown chunk length of {action_dim}-dimensional actions: add num_action_chunks")
        return length


def inspect_checkpoint(folder: Path, num_images: int | None = None) -> CheckpointInfo:
    """Find out what a folder is without reading weights. Raises BadInput that names the file that is wrong.

    num_images overrides what the folder says. Public checkpoints don't say: two images where there is an L1 head and a
    proprio projector, else one, is how all of them were trained.
    """
    config = read_model_config(folder)
    tensors = {name: tensor for path in weight_files(folder) for name, tensor in read_header(path)[0].items()}
    for module, what in (("vision_backbone", "FiLM"), ("noisy_action_projector", "a diffusion head")):
        if _module_file(folder, module) is not None:
            raise BadInput(f"{folder} was trained with {what} ({module}--*.pt), which this program does not support")
    proprio_file, action_head_file = _module_file(folder, "proprio_projector"), _module_file(folder, "action_head")
    proprio_weights = {key: tensor for key, tensor in tensors.items() if key.startswith(PROPRIO_PREFIX)}
    both = action_head_file is not None and (proprio_file is not None or bool(proprio_weights))
    return CheckpointInfo(
        folder=folder,
        config=config,
        statistics=load_statistics(folder),
        weights={k: t for k, t in tensors.items() if k not in proprio_weights and not _IGNORED_KEYS.search(k)},
        proprio_weights=proprio_weights,
        proprio_file=proprio_file,
        action_head_file=action_head_file,
        num_images=num_images or config.num_images or (2 if both else 1),
    )


def _module_file(folder: Path, module: str) -> Path | None:
    """The folder's `<module>--<step>_checkpoint.pt`. Raises BadInput when there are several."""
    files = sorted(folder.glob(f"*{module}*checkpoint*"))  # as loose as the reference
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise BadInput(f"{folder} holds several {module} files ({names}): keep the one that belongs to the weights")
    return files[0] if files else None


def resolve_checkpoint(name: str) -> Path:
    """A local path is taken as it is, without any network. A hub id is taken from the cache, or downloaded.

    Downloads resume where they stopped. Raises BadInput within seconds when the hub cannot be reached.
    """
    folder = os.path.expanduser(name)
    if os.path.isdir(folder):
        return Path(folder)
    if not _HUB_ID.fullmatch(name):
        raise BadInput(f"checkpoint {name}: no such folder: give a checkpoint folder or a hub id (owner/name)")
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
        raise BadInput(f"checkpoint {name}: {found}: check name and network, or give a local folder") from error


def base_of_adapter(folder: Path) -> str | None:
    """The base (folder or hub id) that an adapter folder names; None when the folder is no adapter.

    Raises BadInput for an adapter that names no base, and for a training folder of openvla-oft that was never merged.
    """
    if (folder / CONFIG_FILE).is_file():
        base = read_json(folder / CONFIG_FILE).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise BadInput(f"{folder / CONFIG_FILE} names no base: give the base as checkpoint and this as adapter")
        return base
    if (folder / "lora_adapter").is_dir() and not any(path.is_file() for path in weight_files(folder)):
        program = "openvla-oft's vla-scripts/merge_lora_weights_and_save.py"
        raise BadInput(f"{folder} holds an adapter (lora_adapter) and no weights: merge it first with {program}")
    return None


def base_and_adapter(checkpoint: str, adapter: str | None) -> tuple[str, str | None]:
    """A checkpoint that is itself an adapter folder becomes its base and that adapter. Raises BadInput."""
    folder = Path(checkpoint).expanduser()
    base = base_of_adapter(folder)
    if base is None:
        return checkpoint, adapter
    if adapter is not None:
        raise BadInput(f"{checkpoint} is itself an adapter: give its base as the checkpoint")
    return base, str(folder)


def folder_of_base(base: str, adapter: str | None) -> Path:
    """The local folder of a base (folder or hub id). Raises BadInput, which says where an adapter's base is named."""
    try:
        return resolve_checkpoint(base)
    except BadInput as problem:
        raise BadInput(str(problem) if adapter is None else f"base of {adapter}: {problem}") from None


def load_network(info: CheckpointInfo, num_action_tokens: int, device: torch.device, dtype: torch.dtype) -> OpenVLAOFT:
    """Build the network without memory and stream the weights to `device`, one tensor at a time.

    Peak memory is the network on the device and one tensor on the host. The proprio projector stays float32.
    """
    try:
        with torch.device("meta"):
            network = OpenVLAOFT(info.config, num_action_tokens)
    except Exception as error:  # timm and transformers raise many kinds for names and sizes that do not fit
        path = info.folder / "config.json"
        raise BadInput(f"{path}: no network can be built from it ({first_line(error)})") from error
    _check_tensors(info, {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()})
    state = {module_key(key): tensor for key, tensor in stream_tensors(info.weights.values(), device, dtype)}
    network.load_state_dict(state, strict=True, assign=True)
    network.build_rotary_embedding(device)
    network.proprio_projector = _load_proprio_projector(info, device)
    return network.requires_grad_(False).eval()


def _check_tensors(info: CheckpointInfo, expected: dict[str, tuple[int, ...]]) -> None:
    stored = {module_key(key): tensor for key, tensor in info.weights.items()}
    if missing := sorted(expected.keys() - stored.keys()):
        count, first = f"{len(missing)} of {len(expected)}", file_key(missing[0])
        raise BadInput(f"{info.folder}: {count} tensors are missing in its safetensors files, first {first}")
    if unexpected := sorted(stored.keys() - expected.keys()):
        tensor = stored[unexpected[0]]
        raise BadInput(f"{tensor.path}: {len(unexpected)} tensors too many, first {tensor.name}: not this architecture")
    for name, shape in expected.items():
        tensor = stored[name]
        if tensor.shape != shape:
            raise BadInput(f"{tensor.path}: {tensor.name}: config.json implies shape {shape}, found {tensor.shape}")


def module_key(key: str) -> str:
    """LayerScale's parameter is `scale_factor` in files, since old transformers rewrote "gamma"; in timm, gamma."""
    return re.sub(r"^(vision_backbone\..*\.ls[12])\.scale_factor$", r"\1.gamma", key)


def file_key(name: str) -> str:
    """The inverse of `module_key`."""
    return re.sub(r"^(vision_backbone\..*\.ls[12])\.gamma$", r"\1.scale_factor", name)


def read_proprio_state(info: CheckpointInfo) -> dict[str, Tensor] | None:
    """The tensors of the folder's proprio projector, in their stored dtype; None when it has none."""
    if info.proprio_weights:
        stored = stream_tensors(info.proprio_weights.values(), torch.device("cpu"))
        return {key.removeprefix(PROPRIO_PREFIX): tensor for key, tensor in stored}
    return None if info.proprio_file is None else read_pt(info.proprio_file)


def _load_proprio_projector(info: CheckpointInfo, device: torch.device) -> ProprioProjector | None:
    state = read_proprio_state(info)
    if state is None:
        return None
    source = info.proprio_file or next(iter(info.proprio_weights.values())).path
    try:
        projector = ProprioProjector.from_state_dict({key: value.float() for key, value in state.items()})
    except (KeyError, RuntimeError, ValueError) as error:
        raise BadInput(f"{source}: not a proprio projector, tensors {sorted(state)}: get the file again") from error
    llm_dim, found = info.config.llama.hidden_size, projector.fc2.out_features
    if found != llm_dim:
        raise BadInput(f"{source}: projects to {found} dimensions, the language model has {llm_dim}: get its own file")
    return projector.to(device)


def load_action_head(info: CheckpointInfo, device: torch.device, dtype: torch.dtype) -> L1RegressionHead | None:
    """The L1 regression head, or None when the folder has none. Raises BadInput when the file is something else."""
    path = info.action_head_file
    if path is None:
        return None
    state = read_pt(path)
    try:
        head = L1RegressionHead.from_state_dict(state)
    except (KeyError, RuntimeError, ValueError, ZeroDivisionError) as error:
        raise BadInput(f"{path}: not an L1 regression head, tensors {sorted(state)[:3]}... ({error!r})") from error
    found, expected = head.model.fc1.in_features, info.config.llama.hidden_size * head.action_dim
    if found != expected:
        raise BadInput(f"{path}: reads {found} values, expected {expected}: it belongs to another network")
    return head.to(device, dtype).requires_grad_(False)


def check_dimensions(
    info: CheckpointInfo, unnorm_key: str, head: L1RegressionHead | None, projector: ProprioProjector | None
) -> None:
    """Raises BadInput when head or projector have other sizes than the statistics of `unnorm_key`."""
    statistics = info.statistics[unnorm_key]
    where = f"{info.folder}: statistics {unnorm_key}"
    if head is not None and head.action_dim != statistics.action.dim:
        raise BadInput(f"{where}: {statistics.action.dim} action dimensions, the action head has {head.action_dim}")
    found = None if statistics.proprio is None else statistics.proprio.dim
    if projector is not None and found != projector.proprio_dim:
        raise BadInput(f"{where}: {found} proprio dimensions, the proprio projector has {projector.proprio_dim}")


def save_checkpoint(
    folder: Path,
    network: OpenVLAOFT,
    config: dict[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
    action_head: L1RegressionHead | None = None,
    step: str = "latest",
) -> None:
    """Write weights, config.json, generation_config.json and the heads; the other files come from where config does.

    The heads keep their dtypes. Raises ValueError for a network with adapters (`python -m vla.merge` merges them).
    """
    if lora_layers(network):
        raise ValueError("the network has adapters, which this format cannot hold: merge them first")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    generation = {"_from_model_config": True, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    write_json(folder / "generation_config.json", generation | {"transformers_version": "4.40.1"})  # openvla-oft's
    state = {file_key(k): t for k, t in network.state_dict().items() if not k.startswith(PROPRIO_PREFIX)}
    write_weights(folder, state, dtype)
    if network.proprio_projector is not None:
        write_pt(folder / f"proprio_projector--{step}_checkpoint.pt", network.proprio_projector.state_dict())
    if action_head is not None:
        write_pt(folder / f"action_head--{step}_checkpoint.pt", action_head.state_dict())
