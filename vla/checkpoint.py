"""Read checkpoint folders of OpenVLA-OFT: find out what a folder is, then stream its weights into a network.

Every public kind is read (docs of the kinds: README, "Which checkpoints work"):
  * trained by L1 regression: safetensors + action_head--*.pt + proprio_projector--*.pt; two images;
  * trained on action tokens: safetensors alone; one image, no proprio;
  * after reinforcement learning with SimpleVLA-RL: as before, with the proprio projector among the safetensors.
A folder is never written to, and nothing in it is executed.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from contracts import BadInput, read_json
from vla.hub import resolve_checkpoint
from vla.lora import CONFIG_FILE
from vla.model import L1RegressionHead, OpenVLAOFT, ProprioProjector
from vla.model_config import ModelConfig, read_model_config
from vla.statistics import DatasetStatistics, load_statistics
from vla.weights import INDEX_FILE, SINGLE_FILE, StoredTensor, read_header, read_pt, stream_tensors, weight_files

PROPRIO_PREFIX = "proprio_projector."
# Chunk lengths by action dimension in the reference's constants: LIBERO's one arm, and two arms (ALOHA, RoboTwin).
DEFAULT_CHUNK_LENGTHS = {7: 8, 14: 25}
_IGNORED_KEYS = re.compile(r"rotary_emb\.inv_freq$")  # written by old versions of transformers; computed here


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
            raise BadInput(
                f"{self.folder / 'config.json'}: the chunk length of {action_dim}-dimensional actions is unknown: "
                f"add num_action_chunks"
            )
        return length


def inspect_checkpoint(folder: Path, num_images: int | None = None) -> CheckpointInfo:
    """Find out what a folder is without reading weights. Raises BadInput that names the file that is wrong.

    num_images overrides what the folder says. Public checkpoints don't say: two images where there is an L1 head and a
    proprio projector, else one, is how all of them were trained.
    """
    config = read_model_config(folder)
    tensors = _stored_tensors(folder)
    if list(folder.glob("vision_backbone--*checkpoint*")):
        raise BadInput(f"{folder} was trained with FiLM (vision_backbone--*.pt), which this program does not support")
    if list(folder.glob("noisy_action_projector--*checkpoint*")):
        raise BadInput(
            f"{folder} has a diffusion head (noisy_action_projector--*.pt), which this program does not support"
        )
    proprio_file = find_module_file(folder, "proprio_projector")
    action_head_file = find_module_file(folder, "action_head")
    proprio_weights = {key: tensor for key, tensor in tensors.items() if key.startswith(PROPRIO_PREFIX)}
    both = action_head_file is not None and (proprio_file is not None or bool(proprio_weights))
    return CheckpointInfo(
        folder=folder,
        config=config,
        statistics=load_statistics(folder),
        weights={
            key: tensor
            for key, tensor in tensors.items()
            if key not in proprio_weights and not _IGNORED_KEYS.search(key)
        },
        proprio_weights=proprio_weights,
        proprio_file=proprio_file,
        action_head_file=action_head_file,
        num_images=num_images or config.num_images or (2 if both else 1),
    )


def find_module_file(folder: Path, module: str) -> Path | None:
    """The folder's `<module>--<step>_checkpoint.pt`. Raises BadInput when there are several."""
    files = sorted(path for path in folder.iterdir() if module in path.name and "checkpoint" in path.name)
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise BadInput(f"{folder} holds several {module} files ({names}): keep the one that belongs to the weights")
    return files[0] if files else None


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The headers of all weight files, one dictionary."""
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        tensors |= read_header(path)[0]
    return tensors


def load_network(info: CheckpointInfo, num_action_tokens: int, device: torch.device, dtype: torch.dtype) -> OpenVLAOFT:
    """Build the network without memory and stream the weights to `device`, one tensor at a time.

    Peak memory is the network on the device and one tensor on the host. The proprio projector stays float32.
    """
    network = build_network(info, num_action_tokens)
    _check_tensors(info, {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()})
    state = {module_key(key): tensor for key, tensor in stream_tensors(info.weights.values(), device, dtype)}
    network.load_state_dict(state, strict=True, assign=True)
    network.build_rotary_embedding(device)
    network.proprio_projector = _load_proprio_projector(info, device)
    return network.requires_grad_(False).eval()


def build_network(info: CheckpointInfo, num_action_tokens: int) -> OpenVLAOFT:
    """The network that config.json describes, on the device "meta". Raises BadInput when it describes none."""
    try:
        with torch.device("meta"):
            return OpenVLAOFT(info.config, num_action_tokens)
    # What timm and transformers raise for sizes that do not fit.
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(f"{info.folder / 'config.json'}: no network can be built from it ({reason})") from error


def _check_tensors(info: CheckpointInfo, expected: dict[str, tuple[int, ...]]) -> None:
    stored = {module_key(key): tensor for key, tensor in info.weights.items()}
    where = info.folder / (INDEX_FILE if (info.folder / INDEX_FILE).is_file() else SINGLE_FILE)
    if missing := sorted(expected.keys() - stored.keys()):
        key = file_key(missing[0])
        raise BadInput(
            f"{where}: {len(missing)} of {len(expected)} tensors are missing, first {key}: download it again"
        )
    if unexpected := sorted(stored.keys() - expected.keys()):
        tensor = stored[unexpected[0]]
        raise BadInput(f"{tensor.path}: {len(unexpected)} tensors too many, first {tensor.name}: not this architecture")
    for name, shape in expected.items():
        tensor = stored[name]
        if tensor.shape != shape:
            raise BadInput(f"{tensor.path}: {tensor.name}: config.json implies shape {shape}, found {tensor.shape}")


def module_key(key: str) -> str:
    """LayerScale's parameter is `scale_factor` in files, since old transformers rewrote "gamma"; in timm, gamma."""
    return _renamed(key, "scale_factor", "gamma")


def file_key(name: str) -> str:
    """The inverse of `module_key`."""
    return _renamed(name, "gamma", "scale_factor")


def _renamed(key: str, old: str, new: str) -> str:
    return re.sub(rf"^(vision_backbone\..*\.ls[12])\.{old}$", rf"\1.{new}", key)


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
    if info.action_head_file is None:
        return None
    state = read_pt(info.action_head_file)
    try:
        head = L1RegressionHead.from_state_dict(state)
    except (KeyError, RuntimeError, ValueError, ZeroDivisionError) as error:
        raise BadInput(
            f"{info.action_head_file}: not an L1 regression head, tensors {sorted(state)[:3]}...: "
            f"diffusion heads are not supported"
        ) from error
    llm_dim = info.config.llama.hidden_size
    if head.model.fc1.in_features != llm_dim * head.action_dim:
        raise BadInput(
            f"{info.action_head_file}: reads {head.model.fc1.in_features} values, "
            f"expected {head.action_dim} x {llm_dim}: it belongs to another network"
        )
    return head.to(device, dtype).requires_grad_(False)


def check_dimensions(
    info: CheckpointInfo, unnorm_key: str, head: L1RegressionHead | None, projector: ProprioProjector | None
) -> None:
    """Raises BadInput when head or projector have other sizes than the statistics of `unnorm_key`."""
    statistics = info.statistics[unnorm_key]
    where = f"{info.folder}: statistics {unnorm_key}"
    if head is not None and head.action_dim != statistics.action.dim:
        raise BadInput(f"{where}: {statistics.action.dim} action dimensions, the action head has {head.action_dim}")
    if projector is not None:
        found = None if statistics.proprio is None else statistics.proprio.dim
        if found != projector.proprio_dim:
            raise BadInput(f"{where}: {found} proprio dimensions, the proprio projector has {projector.proprio_dim}")


def base_of_adapter(folder: Path) -> str | None:
    """The base (folder or hub id) that an adapter folder names; None when the folder is no adapter.

    Raises BadInput for an adapter that names no base, and for a training folder of openvla-oft that was never merged.
    """
    if (folder / CONFIG_FILE).is_file():
        base = read_json(folder / CONFIG_FILE).get("base_model_name_or_path")
        if not isinstance(base, str) or not base or not base.isprintable():
            raise BadInput(f"{folder / CONFIG_FILE} names no base: give the base as checkpoint and this as adapter")
        return base
    if (folder / "lora_adapter").is_dir() and not any(path.is_file() for path in weight_files(folder)):
        raise BadInput(
            f"{folder} holds an adapter that was not merged (lora_adapter) and no weights: merge it first with "
            f"openvla-oft's vla-scripts/merge_lora_weights_and_save.py"
        )
    return None


def base_and_adapter(checkpoint: str, adapter: str | None) -> tuple[str, str | None]:
    """A checkpoint that is itself an adapter folder becomes its base and that adapter. Raises BadInput."""
    base = base_of_adapter(Path(checkpoint).expanduser())
    if base is None:
        return checkpoint, adapter
    if adapter is not None:
        raise BadInput(f"{checkpoint} is itself an adapter: give its base as the checkpoint")
    return base, str(Path(checkpoint).expanduser())


def folder_of_base(base: str, adapter: str | None) -> Path:
    """The local folder of a base (folder or hub id). Raises BadInput, which says where an adapter's base is named."""
    try:
        return resolve_checkpoint(base)
    except BadInput as problem:
        raise BadInput(str(problem) if adapter is None else f"base of {adapter}: {problem}") from None
