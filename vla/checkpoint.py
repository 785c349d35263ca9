"""Find out what a checkpoint folder of OpenVLA-OFT holds.

Every public kind is supported:
  * trained by L1 regression: safetensors + action_head--*.pt + proprio_projector--*.pt; two images;
  * trained on action tokens: safetensors alone; one image, no proprio;
  * trained on action tokens, then by reinforcement learning with SimpleVLA-RL: safetensors alone, which include the
    proprio projector.
Nothing is written to the folder, and no code in it is executed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from contracts import BadInput, read_json
from vla.adapter_folder import WEIGHTS_FILE
from vla.dataset_statistics import STATISTICS_FILE, TWO_ARMS_DIM, DatasetStatistics, load_statistics
from vla.network_config import NetworkConfig, read_network_config
from vla.weights import StoredTensor, read_header, weight_files

PROPRIO_PREFIX = "proprio_projector."  # begins the names of the projector's tensors in safetensors files


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint is, found from file names, headers and JSON files without reading the weights.

    An adapter and demonstrations have folders of their own. Where several folders hold a part, the first counts:

        weights, heads, config    the checkpoint
        statistics                the demonstrations, the adapter, the folder around an adapter of openvla-oft's
                                  training, which writes them there, the checkpoint
        looks                     the adapter and the checkpoint together
    """

    weights_folder: Path  # the checkpoint
    config: NetworkConfig
    statistics: dict[str, DatasetStatistics]
    statistics_folder: Path  # where these are from
    weights: dict[str, StoredTensor]  # the network's tensors by their names in the files
    proprio_weights: dict[str, StoredTensor]  # the proprio projector's tensors in safetensors files, if any
    proprio_file: Path | None
    action_head_file: Path | None
    num_images: int
    assumes_images: bool  # whether nothing says how many images it reads: `num_images` is that of its kind
    # What the simulator's objects looked like in training: "official", "lowpoly", or the digest of another asset pack.
    # Empty where that is not recorded, as in public checkpoints, which were trained on LIBERO's official assets.
    looks: tuple[str, ...]

    @property
    def uses_proprio(self) -> bool:
        return self.proprio_file is not None or bool(self.proprio_weights)

    @property
    def reads(self) -> str:
        """What the policy is shown, for tables and logs."""
        assumed = " (assumed; --num-images sets it)" if self.assumes_images else ""
        return f"{self.num_images} image(s){assumed}{' and proprio' if self.uses_proprio else ''}"

    @property
    def kind(self) -> str:
        if self.action_head_file is not None:
            return "L1 regression"
        return "action tokens, after RL" if self.proprio_weights else "action tokens"


def inspect_checkpoint(
    folder: Path,
    num_images: int | None = None,
    adapter_folder: str | None = None,
    statistics: str | None = None,
) -> CheckpointInfo:
    """Find out what a folder holds. Raises BadInput when it is not a checkpoint that this program can use.

    num_images: overrides what the folders say. adapter_folder: of an adapter that was trained on this checkpoint.
    statistics: folder with the statistics of demonstrations that the policy will learn from.
    """
    config = read_network_config(folder)
    weights, proprio_weights = _stored_weights(folder)
    proprio_file, action_head_file = _stored_modules(folder, has_projector=bool(proprio_weights))
    has_proprio = proprio_file is not None or bool(proprio_weights)
    metadata = {} if adapter_folder is None else _adapter_metadata(Path(adapter_folder), folder)
    stated_num_images = num_images or int(metadata.get("num_images", 0)) or config.num_images
    # Public checkpoints do not say how many images they read. Each kind was trained with the number chosen here.
    usual_num_images = 2 if action_head_file is not None and has_proprio else 1
    around_adapter = None
    if adapter_folder is not None and "base_fingerprint" not in metadata:  # perhaps of openvla-oft's training
        around_adapter = Path(adapter_folder).resolve().parent
    statistics_folder = _statistics_folder(statistics, adapter_folder, around_adapter, folder)
    datasets = load_statistics(statistics_folder)
    _check_chunk_length(folder, datasets)
    return CheckpointInfo(
        weights_folder=folder,
        config=config,
        statistics=datasets,
        statistics_folder=statistics_folder,
        weights=weights,
        proprio_weights=proprio_weights,
        proprio_file=proprio_file,
        action_head_file=action_head_file,
        num_images=stated_num_images or usual_num_images,
        assumes_images=stated_num_images is None,
        looks=tuple(sorted({*config.looks, *metadata.get("looks", "").split()})),
    )


def _check_chunk_length(folder: Path, statistics: Mapping[str, DatasetStatistics]) -> None:
    """Raise BadInput for a robot with two arms whose chunk length is not stored. Only LIBERO's is known without it."""
    has_two_arms = any(dataset.action.dim == TWO_ARMS_DIM for dataset in statistics.values())
    if has_two_arms and "num_action_chunks" not in read_json(folder / "config.json"):
        raise BadInput(
            f"{folder}/config.json does not say how many actions of {TWO_ARMS_DIM} numbers a decision has: "
            "write it there as num_action_chunks (openvla-oft's training for ALOHA: 25)"
        )


def _stored_weights(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The network's tensors in safetensors files, and those of the proprio projector, by name."""
    weights: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        weights |= read_header(path)[0]
    proprio_names = [name for name in weights if name.startswith(PROPRIO_PREFIX)]
    proprio_weights = {name: weights.pop(name) for name in proprio_names}
    return weights, proprio_weights


def _stored_modules(folder: Path, has_projector: bool) -> tuple[Path | None, Path | None]:
    """The files of proprio projector and L1 head, if any. has_projector: whether the weights hold a projector, too."""
    if _module_file(folder, "vision_backbone") or _module_file(folder, "noisy_action_projector"):
        raise BadInput(f"{folder} was trained with FiLM or a diffusion head, which is not supported")
    proprio_file = _module_file(folder, "proprio_projector")
    if proprio_file is not None and has_projector:
        raise BadInput(
            f"{folder} holds two proprio projectors, {proprio_file.name} and one among the weights: keep the policy's"
        )
    return proprio_file, _module_file(folder, "action_head")


def _adapter_metadata(adapter: Path, base: Path) -> dict[str, str]:
    """What an adapter of this program says about itself; nothing if another program wrote it."""
    _, metadata = read_header(adapter / WEIGHTS_FILE)
    if "base_fingerprint" not in metadata:
        _check_foreign_adapter(adapter.resolve(), base.resolve())
    return metadata


def _check_foreign_adapter(adapter: Path, base: Path) -> None:
    """Raise BadInput for a folder of openvla-oft's training, which holds more than the adapter.

    Heads and projector lie in or beside the adapter's folder. Around it lies the base with the adapter merged in; there
    it would be added a second time.
    """
    if base in adapter.parents:
        raise BadInput(
            f"{adapter} lies inside its base {base}, as if training had merged it already: "
            f"use {base} itself, or move the adapter out, together with {STATISTICS_FILE}, and name the base that "
            "it was trained on"
        )
    for path in (*adapter.glob("*--*checkpoint.pt"), *adapter.parent.glob("*--*checkpoint.pt")):
        raise BadInput(
            f"{path} was trained with the adapter {adapter}, and is read only beside merged weights: "
            "merge by openvla-oft's merge_lora_weights_and_save.py, and give that folder"
        )


def _module_file(folder: Path, module: str) -> Path | None:
    """The file that holds a module's state dict, or None; found by openvla-oft's loose pattern. Raises BadInput."""
    paths = sorted(folder.glob(f"*{module}*checkpoint*"))
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise BadInput(f"{folder} holds several {module} files ({names}): keep one")
    return paths[0] if paths else None


def _statistics_folder(*folders: str | Path | None) -> Path:
    """The first of the folders that has dataset statistics, and the last if none has."""
    existing = [Path(folder) for folder in folders if folder is not None]
    return next((folder for folder in existing if (folder / STATISTICS_FILE).is_file()), existing[-1])
