"""Merge a trained adapter into its base: a plain OpenVLA-OFT folder that other OFT programs load.

    python -m vla.merge --adapter RUN/checkpoints/best --out FOLDER [--base FOLDER_OR_HUB_ID]

Merging in other programs has ruined policies: adapters merged twice, into another base, or in bfloat16. Here the base
is checked against the fingerprint that the adapter holds, the sum is computed in float32, and before the folder gets
its name, merged and unmerged policy must decide alike. The merge itself takes one shard of memory.
"""

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.cli import main_guard, parse_flags
from contracts import BadInput, read_json, write_json
from vla.checkpoint import CheckpointInfo, inspect_checkpoint, read_proprio_state, resolve_checkpoint
from vla.lora import CONFIG_FILE, PROPRIO_FILE, SAMPLES_FILE, Adapter, check_base, read_adapter
from vla.policy import Policy, choose_device
from vla.preprocessing import read_observations, synthetic_observations
from vla.weights import INDEX_FILE, by_file, fingerprint, read_tensors, stream_tensors, write_pt, write_tensors

METADATA_FILE = "merge_metadata.json"
SMALLEST_AGREEMENT = 0.99  # of the action tokens whose choice is no matter of rounding
# Rounding moves the logits of the bundled policy in bfloat16 by 2.5 times the precision of the largest (median over
# positions), so that 2 to 6 % of its tokens change.
MOST_ROUNDING = 8
HARMLESS = 1e-3  # of a logit, in any precision
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


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


def merge(adapter_folder: Path, out: Path, base: str | None = None, device: str = "cpu") -> str:
    """Write the merged folder and return how well it agrees with the unmerged policy, in a sentence.

    Raises BadInput when anything does not fit, and when the two disagree; then there is no folder `out`.
    """
    if out.exists():
        raise BadInput(f"--out {out} exists already: name a new folder")
    if (adapter_folder / METADATA_FILE).exists():
        raise BadInput(f"--adapter {adapter_folder} is a merged checkpoint already: use it as it is")
    if not (adapter_folder / CONFIG_FILE).is_file():
        raise BadInput(f"--adapter {adapter_folder} holds no {CONFIG_FILE}: give a folder of RUN/checkpoints")
    adapter = read_adapter(adapter_folder)
    base = base or adapter.base_model
    if base is None:
        raise BadInput(f"{adapter_folder} does not name its base: give it with --base")
    info = inspect_checkpoint(resolve_checkpoint(base))
    base_fingerprint = fingerprint(info.weights.values())
    check_base(adapter, base_fingerprint, base)
    if adapter.base_fingerprint is None and (info.folder / METADATA_FILE).exists():
        raise BadInput(f"--base {base} is merged already, and this adapter does not say that it was trained on it")
    metadata = {
        "base_model": base,
        "base_fingerprint": base_fingerprint,
        "adapter": str(adapter_folder.resolve()),
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "merged_modules": len(adapter.targets),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        folder = Path(temporary) / out.name
        folder.mkdir()
        _write_weights(info, adapter, folder)
        _copy_other_files(info, adapter_folder, folder)
        write_json(folder / METADATA_FILE, metadata)
        (folder / "README.md").write_text(model_card(metadata, adapter_folder), encoding="utf-8")
        finding = check_agreement(info, base, adapter_folder, folder, device)
        folder.rename(out)
    return finding


def _write_weights(info: CheckpointInfo, adapter: Adapter, out: Path) -> None:
    """The base's files one by one with the adapter added; a proprio projector among them is left out."""
    files = by_file(info.weights.values())
    needed, free = sum(path.stat().st_size for path in files), shutil.disk_usage(out).free
    if free < 1.02 * needed:
        raise BadInput(f"--out {out.name}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
    unused, total_size = set(adapter.targets), 0
    for path, entries in files.items():
        merged = {}
        for key, value in stream_tensors(entries, torch.device("cpu")):
            module = key.removesuffix(".weight")
            if key.endswith(".weight") and module in unused:
                unused.remove(module)
                down, up = (adapter.tensors[f"{module}.{matrix}"] for matrix in ("lora_A", "lora_B"))
                if (len(up), down[0].numel()) != (len(value), value[0].numel()):
                    raise BadInput(f"{adapter.folder}: {module} has another shape than the base's: wrong base")
                value = merged_weight(value, down, up, adapter.alpha / adapter.rank)
            merged[key] = value
            total_size += value.nbytes
        write_tensors(out / path.name, merged)
    if unused:
        raise BadInput(f"{adapter.folder}: {len(unused)} modules are not in the base, first {min(unused)}: wrong base")
    if len(files) > 1:
        weight_map = {key: tensor.path.name for key, tensor in info.weights.items()}
        write_json(out / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """W + scale * B A, summed in float32, in W's dtype. For convolutions, B is 1 x 1."""
    change = (up.float().flatten(1) @ down.float().flatten(1)).view(weight.shape)
    return (weight.float() + scale * change).to(weight.dtype)


def _copy_other_files(info: CheckpointInfo, adapter_folder: Path, out: Path) -> None:
    """Config, tokenizer, processor and statistics of the base, and the trained proprio projector.

    The base's L1 head stays behind: it reads hidden states that training has changed. Since the head is also how the
    number of images is found out, config.json states that number.
    """
    for path in info.folder.iterdir():
        if path.name == "tokenizer.model" or (path.suffix == ".json" and path.name not in (INDEX_FILE, METADATA_FILE)):
            shutil.copyfile(path, out / path.name)
    write_json(out / "config.json", read_json(out / "config.json") | {"num_images_in_input": info.num_images})
    trained = adapter_folder / PROPRIO_FILE
    state = read_tensors(trained) if trained.is_file() else read_proprio_state(info)
    if state is not None:
        name = info.proprio_file.name if info.proprio_file else "proprio_projector--latest_checkpoint.pt"
        write_pt(out / name, state)


def check_agreement(info: CheckpointInfo, base: str, adapter_folder: Path, merged: Path, device: str) -> str:
    """Compare the logits of the merged folder with those of the base with its adapter, in the base's dtype.

    On the observations that training has left in the adapter folder, or on made-up ones. Raises BadInput.
    """
    key = next(iter(info.statistics))
    dtype = _TORCH_DTYPES.get(next(iter(info.weights.values())).dtype, torch.float32)
    options: dict[str, Any] = {"task_suite": key, "unnorm_key": key, "device": device, "dtype": dtype, "compile": "off"}
    policy = Policy.load(base, adapter=str(adapter_folder), **options)
    if (adapter_folder / SAMPLES_FILE).is_file():
        observations = read_observations(adapter_folder / SAMPLES_FILE)
    else:
        observations = synthetic_observations(policy.num_images, policy.statistics.proprio)

    @torch.no_grad()
    def logits(policy: Policy) -> Tensor:
        return torch.cat([policy.chunk_logits([observation]).cpu() for observation in observations])

    unmerged = logits(policy)
    with policy.teacher():
        untrained = logits(policy)
    del policy  # there may be no memory for two
    return judge(unmerged, logits(Policy.load(str(merged), **options)), untrained, torch.finfo(dtype).eps)


def judge(unmerged: Tensor, merged: Tensor, untrained: Tensor, precision: float) -> str:
    """Whether two policies are the same but for rounding, in a sentence; logits (N, A, 256). Raises BadInput if not.

    They are when their logits differ by less than half of what training has changed, or by no more than rounding to
    `precision` explains; and when they choose the same tokens, except where the two best are so close that this
    difference decides.
    """
    difference, effect = ((unmerged - other).abs().amax(-1).median().item() for other in (merged, untrained))
    limit = max(effect / 2, MOST_ROUNDING * precision * unmerged.abs().amax(-1).median().item(), HARMLESS)
    best = unmerged.topk(2).values
    is_clear = best[..., 0] - best[..., 1] > 4 * difference
    same = (unmerged.argmax(-1) == merged.argmax(-1))[is_clear]
    share = same.float().mean().item() if len(same) else 1.0
    finding = (
        f"merged and unmerged policy agree on {share:.1%} of the {len(same)} action tokens (of {is_clear.numel()}) "
        f"that rounding does not decide; their logits differ by {difference:.1e}, training changed them by {effect:.1e}"
    )
    if share < SMALLEST_AGREEMENT or not difference <= limit:
        raise BadInput(
            f"{finding}; expected {SMALLEST_AGREEMENT:.0%} and at most {limit:.1e}: nothing was written; evaluate and "
            "use the adapter folder itself (as --checkpoint), or try another --device"
        )
    return finding


def model_card(metadata: dict[str, Any], adapter_folder: Path) -> str:
    """README.md, with what the training run wrote about this adapter, if it did."""
    path = adapter_folder / "metadata.json"
    results = read_json(path) if path.is_file() else {}
    rows = [f"| {key} | {value} |" for key, value in results.items() if not isinstance(value, dict | list)]
    lines = [
        "# OpenVLA-OFT policy, trained by reinforcement learning",
        "",
        f"LoRA adapter (rank {metadata['rank']}, alpha {metadata['alpha']}) merged into `{metadata['base_model']}`.",
        "Load it like any OpenVLA-OFT checkpoint that acts by action tokens.",
        *(["", "## Evaluation at the end of training", "", "| what | value |", "|---|---|", *rows] if rows else []),
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    args = parse_flags(MergeArgs, argv, prog="python -m vla.merge")
    finding = merge(args.adapter, args.out, args.base, str(choose_device(args.device)))
    print(f"wrote {args.out}: {finding}")


if __name__ == "__main__":
    sys.exit(main_guard("vla.merge", main))
