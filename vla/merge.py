"""python -m vla.merge --adapter RUN/checkpoints/best --out FOLDER [--base FOLDER_OR_HUB_ID]

Merging in other programs has ruined policies: adapters merged twice, into another base, or in bfloat16. Here the base
must have the fingerprint that the adapter holds, the sum is computed in float32, one shard at a time, and before the
folder gets its name, merged and unmerged policy must decide alike.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.cli import main_guard, parse_flags
from contracts import BadInput, read_json, resolve_pointer, write_json

if TYPE_CHECKING:  # imported where it is used: --help needs no torch
    from torch import Tensor

    from vla.checkpoint import CheckpointInfo


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
    """Write the merged folder, unless it disagrees with the unmerged policy; return how well it agrees, in a sentence.

    They are compared in the base's dtype, on made-up observations: on any, only rounding may tell them apart.
    """
    import torch

    from vla import checkpoint
    from vla.hub import resolve_checkpoint
    from vla.policy import Policy
    from vla.preprocessing import synthetic_observations

    adapter = resolve_pointer(adapter)
    if out.exists():
        raise BadInput(f"--out {out} exists already: name a new folder")
    if (base := base or checkpoint.base_of_adapter(adapter)) is None:
        raise BadInput(f"--adapter {adapter} holds no adapter_config.json: give a folder of RUN/checkpoints")
    info = checkpoint.inspect_checkpoint(resolve_checkpoint(base), adapter=str(adapter))
    key, stored = next(iter(info.statistics)), next(iter(info.weights.values())).dtype
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16}.get(stored, torch.float32)
    options: dict[str, Any] = {"task_suite": key, "unnorm_key": key, "device": device, "compile": "off"}
    options["frozen_weights"] = "bf16" if dtype == torch.bfloat16 else "float32"
    policy = Policy.load(base, adapter=str(adapter), **options)  # checks that they fit
    observations = synthetic_observations(policy.num_images, policy.statistics.proprio)

    @torch.no_grad()
    def logits(policy: Policy) -> Tensor:
        return torch.cat([policy.chunk_logits([observation]).cpu() for observation in observations])

    unmerged = logits(policy)
    with policy.teacher():
        untrained = logits(policy)
    del policy  # there may be no memory for two
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        folder = Path(temporary) / out.name
        folder.mkdir()
        write_merged(info, adapter, folder)
        merged = logits(Policy.load(str(folder), **options))
        finding = judge(unmerged, merged, untrained, torch.finfo(dtype).eps)
        folder.rename(out)
    return finding


def write_merged(info: CheckpointInfo, folder: Path, out: Path) -> None:
    """The base's weights with the adapter of `folder` added, its small files, and the trained projector.

    Its L1 head stays behind, for training has changed what it reads; config.json states the number of images instead.
    """
    from vla import dataset_statistics, lora, network_io, weights

    adapter, files = lora.read_adapter(folder), weights.by_file(info.weights.values())
    needed, free = sum(path.stat().st_size for path in files), shutil.disk_usage(out).free
    if free < 1.02 * needed:
        raise BadInput(f"--out {out.name}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
    for path, entries in files.items():
        merged = dict(weights.stream_tensors(entries))
        for key in merged.keys() & {name.replace("lora_A", "weight") for name in adapter.tensors}:
            down, up = (
                adapter.tensors[key.removesuffix("weight") + matrix] for matrix in ("lora_A", "lora_B")
            )
            merged[key] = merged_weight(merged[key], down, up, adapter.alpha / adapter.rank)
        weights.write_tensors(out / path.name, merged)
    for path in (*info.folder.iterdir(), *info.statistics_folder.glob(dataset_statistics.STATISTICS_FILE)):
        if path.name == "tokenizer.model" or path.suffix == ".json":
            shutil.copyfile(path, out / path.name)
    if (out / weights.INDEX_FILE).exists():
        weight_map = {key: tensor.path.name for key, tensor in info.weights.items()}
        write_json(out / weights.INDEX_FILE, {"metadata": {"total_size": needed}, "weight_map": weight_map})
    changes = {"num_images_in_input": info.num_images, "looks": info.looks}
    write_json(out / "config.json", read_json(out / "config.json") | changes)
    trained = folder / lora.PROPRIO_FILE
    state = weights.read_tensors(trained) if trained.is_file() else network_io.read_proprio_state(info)
    if state is not None:
        weights.write_pt(
            out / (info.proprio_file.name if info.proprio_file else network_io.PROPRIO_FILE), state
        )
    results = folder / "metadata.json"  # of the training run
    rows = [f"* {key}: {value}" for key, value in (read_json(results) if results.is_file() else {}).items()]
    card = (
        f"OpenVLA-OFT policy: LoRA adapter {folder} (rank {adapter.rank}, alpha {adapter.alpha}) merged into"
    )
    (out / "README.md").write_text(
        "\n".join([f"{card} `{adapter.base_model}`.", "", *rows, ""]), encoding="utf-8"
    )


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """W + scale * B A, summed in float32, in W's dtype. For convolutions, B is 1 x 1."""
    change = (up.float().flatten(1) @ down.float().flatten(1)).view(weight.shape)
    return (weight.float() + scale * change).to(weight.dtype)


def judge(unmerged: Tensor, merged: Tensor, untrained: Tensor, precision: float) -> str:
    """Whether two policies are the same but for rounding, in a sentence; logits (N, A, 256). Raises BadInput if not.

    They are when their logits differ by less than half of what training has changed, or no more than by rounding to
    `precision`; and when they choose the same tokens wherever the two best differ by more than this.
    """
    difference, effect = ((unmerged - other).abs().amax(-1).median().item() for other in (merged, untrained))
    # Rounding moves the logits of the bundled policy in bfloat16 by 2.5 times the precision of the largest.
    limit = max(effect / 2, 8 * precision * unmerged.abs().amax(-1).median().item(), 1e-3)
    best = unmerged.topk(2).values
    is_clear = best[..., 0] - best[..., 1] > 4 * difference
    same = (unmerged.argmax(-1) == merged.argmax(-1))[is_clear]
    share = same.float().mean().item() if len(same) else 1.0
    finding = (
        f"merged and unmerged policy agree on {share:.1%} of the {len(same)} action tokens (of {is_clear.numel()}) "
        f"that rounding does not decide; their logits differ by {difference:.1e}, training changed them by {effect:.1e}"
    )
    if share < 0.99 or not difference <= limit:
        advice = "evaluate and use the adapter folder itself (as --checkpoint), or try another --device"
        raise BadInput(f"{finding}; expected 99% and at most {limit:.1e}: nothing was written; {advice}")
    return finding


def main(argv: Sequence[str]) -> None:
    args = parse_flags(MergeArgs, argv, prog="python -m vla.merge")
    from vla.policy import choose_device

    finding = merge(args.adapter, args.out, args.base, str(choose_device(args.device)))
    print(f"wrote {args.out}: {finding}")


if __name__ == "__main__":
    sys.exit(main_guard("vla.merge", main))
