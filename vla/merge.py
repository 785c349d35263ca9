"""Merge a trained adapter into its base checkpoint.

    python -m vla.merge --adapter RUN/checkpoints/best --out FOLDER

Merging with other programs has ruined policies: adapters were merged twice, into another base, or in bfloat16. So here
the base that the adapter names must have the fingerprint that it names, and the sum is computed in float32, one shard
at a time. The folder gets its final name only after the merged policy was found to decide like the unmerged one. Upload
it by `hf upload OWNER/NAME FOLDER`.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from command_line import handle_stop_signals, main_guard, parse_flags
from contracts import BadInput, Observation, first_line, read_json, unfinished_folder, write_json
from vla.adapter_folder import (
    ADAPTER_PROPRIO_FILE,
    StoredAdapter,
    base_and_adapter,
    read_adapter,
    read_metadata,
)
from vla.checkpoint import CheckpointInfo, inspect_checkpoint
from vla.dataset_statistics import STATISTICS_FILE
from vla.device import choose_device
from vla.hub import resolve_checkpoint
from vla.load_options import LoadOptions
from vla.loading import check_scale
from vla.model_card import write_card
from vla.network_io import PROPRIO_FILE, read_proprio_state
from vla.policy import Policy
from vla.preprocessing import synthetic_observations
from vla.weights import INDEX_FILE, by_file, read_tensors, stream_tensors, write_pt, write_tensors

# Share of the clear tokens (see `judge`) on which merged and unmerged policy must agree.
LEAST_AGREEMENT = 0.99
# In nats. Around an L1 head neighbouring bins are never further apart (0.16), so there no token is clear.
LEAST_CLEAR = 0.2
SMALLEST_CHANGE = 1e-3  # of logits, in nats; smaller ones say nothing


@dataclass(frozen=True)
class MergeArgs:
    """Merge a trained adapter into its base: a plain OpenVLA-OFT folder that other OFT programs load."""

    # Adapter folder, such as runs/RUN/checkpoints/best.
    adapter: Path
    # Folder to write; must not exist.
    out: Path
    # Where the two policies are compared (auto: on a GPU if there is one); the merge itself needs no GPU.
    device: str = "auto"


def merge(adapter: Path, out: Path, device: str = "cpu") -> str:
    """Write the merged folder. Returns a sentence that says how well it agrees with the unmerged policy.

    The two are compared in the base's dtype, on synthetic observations. Raises BadInput, and leaves no folder, when
    they differ by more than rounding.
    """
    with unfinished_folder(out) as folder:
        base, adapter_folder = base_and_adapter(str(adapter))
        if adapter_folder is None:
            raise BadInput(
                f"--adapter {adapter} holds no adapter_config.json: give a folder of RUN/checkpoints"
            )
        stored = read_adapter(Path(adapter_folder))
        info = inspect_checkpoint(resolve_checkpoint(base), adapter_folder=adapter_folder)
        check_scale(stored, info)
        unnorm_key = stored.unnorm_key or next(iter(info.statistics))
        stored_dtype = next(iter(info.weights.values())).dtype
        dtype = {"BF16": torch.bfloat16, "F16": torch.float16}.get(stored_dtype, torch.float32)
        options = LoadOptions(
            task_suite=unnorm_key,
            unnorm_key=unnorm_key,
            num_images=info.num_images,
            device=device,
            frozen_weights="bf16" if dtype == torch.bfloat16 else "float32",
            compile="off",
            l1_student=stored.l1_student,
        )
        # Raises BadInput if the adapter does not fit to the base.
        policy = Policy.load(adapter_folder, replace(options, statistics=str(info.statistics_folder)))
        observations = synthetic_observations(policy.num_images, policy.statistics.proprio)
        unmerged = _logits(policy, observations)
        with policy.teacher():
            untrained = _logits(policy, observations)
        del policy  # there may be no memory for two
        write_merged(info, stored, folder)
        write_card(folder, out.name, base, info.weights_folder, stored)
        merged = _logits(Policy.load(str(folder), options), observations)
        return judge(unmerged, merged, untrained, torch.finfo(dtype).eps)


def _logits(policy: Policy, observations: Sequence[Observation]) -> Tensor:
    """The policy's logits for N observations, (N, A, 256) on the CPU, computed one observation at a time."""
    with torch.no_grad():
        return torch.cat([policy.chunk_logits([observation]).cpu() for observation in observations])


def write_merged(info: CheckpointInfo, adapter: StoredAdapter, out: Path) -> None:
    """Write the base's weights with the adapter added, the small files, and the trained proprio projector.

    The base's L1 head is copied if the adapter was trained to act by it. Otherwise it is left out, because training has
    changed its inputs. The number of images is written to config.json, because readers would otherwise infer it from
    the presence of that head.
    """
    total_size = 0
    for path, entries in by_file(info.weights.values()).items():
        shard = dict(stream_tensors(entries))
        add_adapter(shard, adapter)
        write_tensors(out / path.name, shard)
        total_size += sum(tensor.nbytes for tensor in shard.values())
    for path in (*info.weights_folder.iterdir(), *info.statistics_folder.glob(STATISTICS_FILE)):
        if path.name == "tokenizer.model" or path.suffix == ".json":
            shutil.copyfile(path, out / path.name)
    if (out / INDEX_FILE).exists():
        weight_map = {key: tensor.path.name for key, tensor in info.weights.items()}
        write_json(out / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
    looks = read_metadata(adapter.folder).get("looks", "").split() or info.looks  # of the last training
    config_changes: dict[str, object] = {"num_images_in_input": info.num_images, "looks": looks}
    config = read_json(out / "config.json")
    statistics = config.get("norm_stats", {})
    if (out / STATISTICS_FILE).exists():  # programs that read only config.json must find the same scales
        statistics = read_json(out / STATISTICS_FILE)
    if adapter.unnorm_key is not None:  # no program may choose another
        statistics = {key: entry for key, entry in statistics.items() if key == adapter.unnorm_key}
        write_json(out / STATISTICS_FILE, statistics)
    write_json(out / "config.json", config | config_changes | {"norm_stats": statistics})
    trained = adapter.folder / ADAPTER_PROPRIO_FILE
    projector = read_tensors(trained) if trained.is_file() else read_proprio_state(info)
    if projector is not None:
        write_pt(out / (info.proprio_file.name if info.proprio_file else PROPRIO_FILE), projector)
    if adapter.l1_student == "laplace" and info.action_head_file is not None:
        shutil.copyfile(info.action_head_file, out / info.action_head_file.name)


def add_adapter(shard: dict[str, Tensor], adapter: StoredAdapter) -> None:
    """Add the adapter to the tensors of a shard that it adapts, in place, one after the other to save memory."""
    for key in shard:
        module = key.removesuffix("weight")
        if key.endswith("weight") and f"{module}lora_A" in adapter.tensors:
            lora_A = adapter.tensors[f"{module}lora_A"]
            lora_B = adapter.tensors[f"{module}lora_B"]
            shard[key] = merged_weight(shard[key], lora_A, lora_B, adapter.alpha / adapter.rank)


def merged_weight(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:
    """W + scale * B A, summed in float32 and returned in W's dtype. For convolutions, B is 1 x 1."""
    change = (lora_B.float().flatten(1) @ lora_A.float().flatten(1)).view(weight.shape)
    return (weight.float() + scale * change).to(weight.dtype)


def judge(unmerged: Tensor, merged: Tensor, untrained: Tensor, precision: float) -> str:
    """Check that two policies are the same up to rounding. Returns a sentence; raises BadInput if they are not.

    unmerged, merged, untrained: logits (N, A, 256). precision: the epsilon of the base's dtype. Three conditions must
    hold. First, the policies' logits differ by at most half of the change by training, or at most by what rounding to
    `precision` explains. Second, the merged policy is not nearer to the untrained one, as it is without the adapter.
    Third, both choose the same token in nearly all clear cases (LEAST_AGREEMENT): those where the unmerged policy's
    best two logits are more than 4 times this difference, and more than LEAST_CLEAR, apart.
    """
    difference = distance(unmerged, merged)
    change_by_training = distance(unmerged, untrained)
    lacks_the_training = distance(merged, untrained) < difference and difference > SMALLEST_CHANGE
    # Measured: rounding the bundled policy to bfloat16 changes its logits by 0.7 * precision * the largest logit, and
    # rounding an earlier one by 2.5 times that product.
    largest_logit = unmerged.abs().amax(-1).median().item()
    limit = max(change_by_training / 2, 8 * precision * largest_logit, SMALLEST_CHANGE)
    best_two = unmerged.topk(2).values
    is_clear = best_two[..., 0] - best_two[..., 1] > max(4 * difference, LEAST_CLEAR)
    is_same = (unmerged.argmax(-1) == merged.argmax(-1))[is_clear]
    agreement = is_same.float().mean().item() if len(is_same) else 1.0
    verdict = f"merged logits are {difference:.1e} off; training changed them by {change_by_training:.1e}"
    if len(is_same) > 0:
        verdict += (
            f"; both agree on {agreement:.1%} of the {len(is_same)} tokens that rounding does not decide"
        )
    if agreement < LEAST_AGREEMENT or not difference <= limit:  # `not` is also true for NaN
        raise BadInput(
            f"{verdict}; expected {LEAST_AGREEMENT:.0%} and at most {limit:.1e}: nothing was written; use "
            "the adapter folder itself, or another --device"
        )
    if lacks_the_training:
        raise BadInput(f"{verdict}; the merged policy is nearer to the untrained one: nothing was written")
    return verdict


def distance(one: Tensor, other: Tensor) -> float:
    """How far the logits (N, A, 256) of two policies are apart: the median of each token's largest difference."""
    return (one - other).abs().amax(-1).median().item()


def main(argv: Sequence[str]) -> None:
    args = parse_flags(MergeArgs, argv, prog="python -m vla.merge")
    handle_stop_signals(signal.default_int_handler)  # so that the unfinished folder is removed
    try:
        verdict = merge(args.adapter, args.out, str(choose_device(args.device)))
    except torch.OutOfMemoryError as error:
        raise BadInput(f"out of GPU memory ({first_line(error)}): use --device cpu") from None
    print(f"wrote {args.out}: {verdict}", flush=True)


if __name__ == "__main__":
    sys.exit(main_guard("vla.merge", main))
