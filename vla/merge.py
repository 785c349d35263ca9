"""Merge a trained adapter into its base: a plain OpenVLA-OFT folder that other OFT programs load.

    python -m vla.merge --adapter RUN/checkpoints/best --out FOLDER [--base FOLDER_OR_HUB_ID]

Merging in other programs has ruined policies: adapters merged twice, into another base, or in bfloat16. Here the base
is checked against the fingerprint that the adapter holds, the sum is computed in float32, and before the folder gets
its name, merged and unmerged policy must choose the same action tokens. The merge itself takes one shard of memory.
"""

import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from command_line import answer_at_once, main_guard, parse_flags
from vla.settings import MergeArgs

parse = partial(parse_flags, MergeArgs, prog="python -m vla.merge")

if __name__ == "__main__":
    answer_at_once("vla.merge", parse)  # before the seconds that the imports below take

import torch
from torch import Tensor

from contracts import BadInput, Observation
from untrusted.json_file import read_json
from vla.checkpoint import CheckpointInfo, inspect_checkpoint, read_proprio_state
from vla.checkpoint_writer import write_json, write_state_dict
from vla.hub import resolve_checkpoint
from vla.lora import CONFIG_FILE, PROPRIO_FILE, SAMPLES_FILE, Adapter, check_base, read_adapter
from vla.policy import Policy
from vla.policy import choose_device as named_device
from vla.preprocessing import read_observations, synthetic_observations
from vla.weights import INDEX_FILE, StoredTensor, fingerprint, read_tensors, stream_tensors, write_tensors

METADATA_FILE = "merge_metadata.json"
SMALLEST_AGREEMENT = 0.99  # of the action tokens
ROUNDED = (
    "It was trained with its base in 4 bits (NF4), and is merged into the base as it is stored: evaluate it before use."
)
_STATISTICS_SUFFIX = "_no_noops"
_TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def merge(adapter_folder: Path, out: Path, base: str | None = None, device: str = "cpu") -> float:
    """Write the merged folder and return the agreement of its action tokens with the unmerged policy's.

    Raises BadInput when anything does not fit, and when the agreement is below 99 %; then there is no folder `out`.
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

    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _check_disk_space(info, partial)
    _write_weights(info, adapter, partial)
    _copy_other_files(info, adapter_folder, partial)
    metadata = {
        "base_model": base,
        "base_fingerprint": base_fingerprint,
        "adapter": str(adapter_folder.resolve()),
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "merged_modules": len(adapter.targets),
    }
    write_json(partial / METADATA_FILE, metadata)
    (partial / "README.md").write_text(model_card(metadata, _evaluation(adapter_folder)), encoding="utf-8")
    stored = adapter_folder / SAMPLES_FILE
    samples = read_observations(stored) if stored.is_file() else None
    agreement = action_token_agreement(info, base, adapter_folder, partial, device, samples)
    if agreement < SMALLEST_AGREEMENT:
        raise BadInput(
            f"merged and unmerged policy agree on {agreement:.1%} of the action tokens, expected "
            f"{SMALLEST_AGREEMENT:.0%}: the merge is not usable and was left in {partial}"
        )
    partial.rename(out)
    return agreement


def _check_disk_space(info: CheckpointInfo, folder: Path) -> None:
    needed = sum(tensor.end - tensor.start for tensor in info.weights.values())
    free = shutil.disk_usage(folder).free
    if free < 1.02 * needed:
        raise BadInput(f"--out: {needed / 1e9:.1f} GB are needed in {folder.parent}, {free / 1e9:.1f} GB are free")


def _write_weights(info: CheckpointInfo, adapter: Adapter, out: Path) -> None:
    """The base's files one by one with the adapter added; a proprio projector among them is left out."""
    used = set()
    by_file: dict[Path, list[StoredTensor]] = {}
    for tensor in info.weights.values():
        by_file.setdefault(tensor.path, []).append(tensor)
    for path, entries in by_file.items():
        merged = {}
        for key, value in stream_tensors(entries, torch.device("cpu")):
            module = key.removesuffix(".weight")
            if key.endswith(".weight") and f"{module}.lora_A" in adapter.tensors:
                value = merged_weight(value, adapter, module)
                used.add(module)
            merged[key] = value
        write_tensors(out / path.name, merged)
    if unused := sorted(set(adapter.targets) - used):
        raise BadInput(f"{adapter.folder}: {len(unused)} modules are not in the base, first {unused[0]}: wrong base")
    if len(by_file) > 1:
        size = sum(tensor.end - tensor.start for tensor in info.weights.values())
        weight_map = {key: tensor.path.name for key, tensor in info.weights.items()}
        write_json(out / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})


def merged_weight(weight: Tensor, adapter: Adapter, module: str) -> Tensor:
    """W + alpha / rank * B A, summed in float32, in W's dtype. For convolutions, B is 1 x 1."""
    down, up = adapter.tensors[f"{module}.lora_A"].float(), adapter.tensors[f"{module}.lora_B"].float()
    if (len(up), down[0].numel()) != (len(weight), weight[0].numel()):
        raise BadInput(f"{adapter.folder}: {module} belongs to a matrix of another shape than the base's: wrong base")
    change = (up.flatten(1) @ down.flatten(1)).view(weight.shape)
    return (weight.float() + adapter.alpha / adapter.rank * change).to(weight.dtype)


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
        write_state_dict(out / name, state)


def action_token_agreement(
    info: CheckpointInfo,
    base: str,
    adapter: Path | None,
    merged: Path,
    device: str,
    samples: Sequence[Observation] | None,
) -> float:
    """Share of greedy action tokens on which `base` with the adapter and `merged` agree, in the base's dtype.

    samples: observations of the training run; None: made-up ones.
    """
    key = next(iter(info.statistics))
    dtype = _TORCH_DTYPES.get(next(iter(info.weights.values())).dtype, torch.float32)
    tokens = []
    for checkpoint, adapter_name in ((base, None if adapter is None else str(adapter)), (str(merged), None)):
        # One after the other: there is never memory for two policies.
        policy = Policy.load(
            checkpoint,
            task_suite=key.removesuffix(_STATISTICS_SUFFIX),
            unnorm_key=key,
            adapter=adapter_name,
            device=device,
            dtype=dtype,
        )
        observations = samples or synthetic_observations(policy.num_images, policy.statistics.proprio)
        tokens.append(torch.cat([policy.act([observation]).tokens for observation in observations]))
        del policy
    return (tokens[0] == tokens[1]).float().mean().item()


def _evaluation(adapter_folder: Path) -> dict[str, Any]:
    """What the training run wrote about this checkpoint; empty if nothing."""
    path = adapter_folder / "metadata.json"
    return read_json(path) if path.is_file() else {}


def model_card(metadata: dict[str, Any], evaluation: dict[str, Any]) -> str:
    rows = [f"| {key} | {value} |" for key, value in evaluation.items() if not isinstance(value, dict | list)]
    results = ["", "## Evaluation at the end of training", "", "| what | value |", "|---|---|", *rows] if rows else []
    lines = [
        "# OpenVLA-OFT policy, trained by reinforcement learning",
        "",
        f"LoRA adapter (rank {metadata['rank']}, alpha {metadata['alpha']}) merged into `{metadata['base_model']}`.",
        "Load it like any OpenVLA-OFT checkpoint that acts by action tokens.",
        *results,
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    agreement = merge(args.adapter, args.out, args.base, str(named_device(args.device)))
    print(f"wrote {args.out}: {agreement:.1%} of the action tokens are those of the unmerged policy")


if __name__ == "__main__":
    sys.exit(main_guard("vla.merge", main))
