"""python -m vla.merge --adapter RUN/checkpoints/best --out FOLDER [--base FOLDER_OR_HUB_ID]

Merging in other programs has ruined policies: adapters were merged twice, into another base, or in bfloat16. Here the
base must have the fingerprint that the adapter holds, the sum is computed in float32, one shard at a time, and the
folder gets its name only after merged and unmerged policy have decided alike.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import main_guard, parse_flags
from contracts import BadInput, read_json, resolve_pointer, write_json

if TYPE_CHECKING:  # imported where it is used: --help needs no torch
    from torch import Tensor

    from contracts import Observation
    from vla.adapter_folder import StoredAdapter
    from vla.checkpoint import CheckpointInfo
    from vla.policy import Policy

LEAST_AGREEMENT = 0.99  # the share of the clear tokens that merged and unmerged policy must agree on


@dataclass(frozen=True)
class MergeArgs:
    """Merge a trained adapter into its base: a plain OpenVLA-OFT folder that other OFT programs load."""

    adapter: Path
    """Adapter folder, such as runs/RUN/checkpoints/best."""
    out: Path
    """Folder to write; must not exist."""
    base: str | None = None
    """Base checkpoint (None: the one that the adapter names)."""
    device: str = "auto"
    """Where the two policies are compared (auto: on a GPU if there is one); the merge itself needs no GPU."""


def merge(adapter: Path, out: Path, base: str | None = None, device: str = "cpu") -> str:
    """Write the merged folder, and return in a sentence how well it agrees with the unmerged policy.

    The two are compared in the base's dtype. The observations are made up: on any, only rounding may make a difference.
    Raises BadInput, and leaves no folder, when they disagree.
    """
    import torch

    from vla.adapter_folder import base_of_adapter
    from vla.checkpoint import inspect_checkpoint
    from vla.hub import resolve_checkpoint
    from vla.loading import LoadOptions
    from vla.policy import Policy
    from vla.preprocessing import synthetic_observations

    adapter = resolve_pointer(adapter)
    if out.exists():
        raise BadInput(f"--out {out} exists already: name a new folder")
    base = base or base_of_adapter(adapter)
    if base is None:
        raise BadInput(f"--adapter {adapter} holds no adapter_config.json: give a folder of RUN/checkpoints")
    info = inspect_checkpoint(resolve_checkpoint(base), adapter=str(adapter))
    unnorm_key = next(iter(info.statistics))
    stored_dtype = next(iter(info.weights.values())).dtype
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16}.get(stored_dtype, torch.float32)
    options = LoadOptions(
        task_suite=unnorm_key,
        unnorm_key=unnorm_key,
        device=device,
        frozen_weights="bf16" if dtype == torch.bfloat16 else "float32",
        compile="off",
    )
    policy = Policy.load(base, replace(options, adapter=str(adapter)))  # checks that they fit
    observations = synthetic_observations(policy.num_images, policy.statistics.proprio)
    unmerged = _logits(policy, observations)
    with policy.teacher():
        untrained = _logits(policy, observations)
    del policy  # there may be no memory for two
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        folder = Path(temporary) / out.name
        folder.mkdir()
        write_merged(info, adapter, folder)
        merged = _logits(Policy.load(str(folder), options), observations)
        verdict = judge(unmerged, merged, untrained, torch.finfo(dtype).eps)
        folder.rename(out)
    return verdict


def _logits(policy: Policy, observations: Sequence[Observation]) -> Tensor:
    """(N, A, 256) on the CPU, one observation at a time."""
    import torch

    with torch.no_grad():
        return torch.cat([policy.chunk_logits([observation]).cpu() for observation in observations])


def write_merged(info: CheckpointInfo, adapter_folder: Path, out: Path) -> None:
    """The base's weights with the adapter added, its small files, and the trained projector.

    The base's L1 head stays behind, because training has changed what it reads. The number of images, which is else
    found out by that head, is written to config.json.
    """
    from vla import adapter_folder as adapter_files
    from vla import dataset_statistics, network_io, weights

    adapter = adapter_files.read_adapter(adapter_folder)
    shards = weights.by_file(info.weights.values())
    needed_bytes = sum(path.stat().st_size for path in shards)
    free_bytes = shutil.disk_usage(out).free
    if free_bytes < 1.02 * needed_bytes:
        raise BadInput(
            f"--out {out.name}: {needed_bytes / 1e9:.1f} GB are needed, {free_bytes / 1e9:.1f} GB are free"
        )
    for path, entries in shards.items():
        shard = dict(weights.stream_tensors(entries))
        add_adapter(shard, adapter)
        weights.write_tensors(out / path.name, shard)
    for path in (*info.folder.iterdir(), *info.statistics_folder.glob(dataset_statistics.STATISTICS_FILE)):
        if path.name == "tokenizer.model" or path.suffix == ".json":
            shutil.copyfile(path, out / path.name)
    if (out / weights.INDEX_FILE).exists():
        weight_map = {key: tensor.path.name for key, tensor in info.weights.items()}
        index = {"metadata": {"total_size": needed_bytes}, "weight_map": weight_map}
        write_json(out / weights.INDEX_FILE, index)
    changes = {"num_images_in_input": info.num_images, "looks": info.looks}
    write_json(out / "config.json", read_json(out / "config.json") | changes)
    trained = adapter_folder / adapter_files.PROPRIO_FILE
    projector = weights.read_tensors(trained) if trained.is_file() else network_io.read_proprio_state(info)
    if projector is not None:
        name = info.proprio_file.name if info.proprio_file else network_io.PROPRIO_FILE
        weights.write_pt(out / name, projector)
    (out / "README.md").write_text(model_card(adapter), encoding="utf-8")


def add_adapter(shard: dict[str, Tensor], adapter: StoredAdapter) -> None:
    """Add the adapter to those tensors of a shard that it adapts, one after the other to save memory."""
    for key in shard:
        module = key.removesuffix("weight")
        if key.endswith("weight") and f"{module}lora_A" in adapter.tensors:
            lora_A = adapter.tensors[f"{module}lora_A"]
            lora_B = adapter.tensors[f"{module}lora_B"]
            shard[key] = merged_weight(shard[key], lora_A, lora_B, adapter.alpha / adapter.rank)


def merged_weight(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """W + scale * B A, summed in float32, in W's dtype. For convolutions, B is 1 x 1."""
    change = (lora_B.float().flatten(1) @ lora_A.float().flatten(1)).view(weight.shape)
    return (weight.float() + scale * change).to(weight.dtype)


def model_card(adapter: StoredAdapter) -> str:
    """What the merged folder's README.md says: where it comes from, and the training run's results if it has some."""
    lines = [
        f"OpenVLA-OFT policy: LoRA adapter {adapter.folder} (rank {adapter.rank}, alpha {adapter.alpha}) merged into "
        f"`{adapter.base_model}`.",
        "",
    ]
    results = adapter.folder / "metadata.json"
    if results.is_file():
        lines += [f"* {key}: {value}" for key, value in read_json(results).items()]
    return "\n".join([*lines, ""])


def judge(unmerged: Tensor, merged: Tensor, untrained: Tensor, precision: float) -> str:
    """Whether two policies are the same but for rounding, in a sentence; logits (N, A, 256). Raises BadInput if not.

    They are when their logits differ by less than half of what training has changed, or no more than by rounding to
    `precision`; and when they choose the same tokens wherever the two best differ by more than this.
    """
    difference = (unmerged - merged).abs().amax(-1).median().item()
    effect = (unmerged - untrained).abs().amax(-1).median().item()
    # Rounding moves the logits of the bundled policy in bfloat16 by 2.5 times the precision of the largest.
    limit = max(effect / 2, 8 * precision * unmerged.abs().amax(-1).median().item(), 1e-3)
    best = unmerged.topk(2).values
    is_clear = best[..., 0] - best[..., 1] > 4 * difference
    is_same = (unmerged.argmax(-1) == merged.argmax(-1))[is_clear]
    agreement = is_same.float().mean().item() if len(is_same) else 1.0
    verdict = (
        f"merged and unmerged policy agree on {agreement:.1%} of the {len(is_same)} action tokens (of "
        f"{is_clear.numel()}) that rounding does not decide; their logits differ by {difference:.1e}, training changed "
        f"them by {effect:.1e}"
    )
    if agreement < LEAST_AGREEMENT or not difference <= limit:  # `not` for NaN, too
        raise BadInput(
            f"{verdict}; expected {LEAST_AGREEMENT:.0%} and at most {limit:.1e}: nothing was written; evaluate and use "
            "the adapter folder itself (as --checkpoint), or try another --device"
        )
    return verdict


def main(argv: Sequence[str]) -> None:
    args = parse_flags(MergeArgs, argv, prog="python -m vla.merge")
    from vla.device import choose_device

    verdict = merge(args.adapter, args.out, args.base, str(choose_device(args.device)))
    print(f"wrote {args.out}: {verdict}")


if __name__ == "__main__":
    sys.exit(main_guard("vla.merge", main))
