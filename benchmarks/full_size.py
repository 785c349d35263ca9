"""The 7B network with random weights on one GPU: load time, memory and speed of deciding and of one update sample.

    python -m benchmarks.full_size [--memory-gib 24] [--folder FOLDER]

Writes a checkpoint in the public format first (15 GB; kept if --folder is given, and then used again), loads it by the
program's own code, and limits the allocator to --memory-gib: what does not fit fails.
"""

import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro

from rl.selfcheck import check_logits_path
from vla.checkpoint_writer import save_checkpoint, write_json
from vla.heads import ProprioProjector
from vla.model_config import read_model_config
from vla.openvla_oft import OpenVLAOFT
from vla.policy import Policy
from vla.probes import attention_probe, image_probe, synthetic_observations
from vla.tiny import make_tiny_checkpoint

GIB = 2**30
CONFIG = {
    "architectures": ["OpenVLAForActionPrediction"],
    "model_type": "openvla",
    "arch_specifier": "no-align+fused-gelu-mlp",
    "image_resize_strategy": "resize-naive",
    "image_sizes": [224, 224],
    "n_action_bins": 256,
    "num_images_in_input": 2,
    "pad_to_multiple_of": 64,
    "pad_token_id": 32000,
    "text_config": {"model_type": "llama", "pad_token_id": 32000, "torch_dtype": "bfloat16", "vocab_size": 32064},
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "torch_dtype": "bfloat16",
    "use_fused_vision_backbone": True,
}


@dataclass(frozen=True)
class Args:
    memory_gib: float = 24.0
    """Limit of the GPU allocator."""
    folder: Path | None = None
    """Where the checkpoint is, or is written."""
    repeats: int = 10


def main(args: Args) -> None:
    if args.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), args)
    else:
        measure(args.folder, args)


def measure(folder: Path, args: Args) -> None:
    if not (folder / "config.json").exists():
        started = time.perf_counter()
        write_full_size(folder)
        print(f"wrote {sum(f.stat().st_size for f in folder.iterdir()) / 1e9:.1f} GB", seconds_since(started))
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(args.memory_gib * GIB / total)

    host_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    policy = Policy.load(str(folder), task_suite="libero_spatial", device="cuda", dtype=torch.bfloat16)
    policy.network.recompute(policy.network.num_blocks)
    print("load", seconds_since(started), f"peak GPU {peak():.2f} GiB")
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host_before
    print(f"host memory of loading: {host / 2**20:.2f} GiB above {host_before / 2**20:.2f} GiB before")
    for name, value in policy.describe():
        print(f"{name:>16}  {value}")
    print(attention_probe(policy))
    print(image_probe(policy))

    observations = synthetic_observations(policy, 8)
    print(check_logits_path(policy, observations[0], 1.0, torch.bfloat16))
    for batch in (1, 2, 8):
        torch.cuda.reset_peak_memory_stats()
        took = timed(lambda n=batch: policy.act(observations[:n]), args.repeats)
        acted = policy.act(observations[:batch])
        assert torch.isfinite(acted.logprobs).all(), "NaN in the log-probs"
        print(f"act on {batch}: {1e3 * took:.1f} ms, {1e3 * took / batch:.1f} ms each, peak {peak():.2f} GiB")
    with torch.no_grad():
        alone = policy.chunk_logits(observations[:1])[0]
        together = policy.chunk_logits(observations)[0]
    spread = alone.std().item()
    apart = (alone - together).abs().max().item()
    print(f"logits alone and in a batch of 8 differ by at most {apart / spread:.3f} of their standard deviation")

    for micro_batch_size in (1, 2):
        torch.cuda.reset_peak_memory_stats()
        took = timed(lambda n=micro_batch_size: update_sample(policy, observations[:n]), args.repeats)
        finite = all(torch.isfinite(p.grad).all() for _, p in policy.named_trainable_parameters() if p.grad is not None)
        assert finite, "NaN in a gradient"
        print(
            f"forward and backward of {micro_batch_size}, checkpointing: {1e3 * took:.0f} ms, "
            f"{1e3 * took / micro_batch_size:.0f} ms each, peak {peak():.2f} GiB"
        )
    optimizer = torch.optim.AdamW([p for _, p in policy.named_trainable_parameters()], lr=1e-6)
    update_sample(policy, observations[:1])
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    update_sample(policy, observations[:1])
    print(f"update sample with AdamW's state: peak {peak():.2f} GiB")


def update_sample(policy: Policy, observations: Sequence) -> None:
    """What one micro-batch of an update costs."""
    for _, parameter in policy.named_trainable_parameters():
        parameter.grad = None
    logits = policy.chunk_logits(observations)
    tokens = logits.argmax(-1) + 31744
    policy.token_logprobs(logits, tokens, 1.0).mean().backward()


def write_full_size(folder: Path) -> None:
    """A full-size folder: random weights made on the GPU, tokenizer and statistics of the small checkpoints."""
    with tempfile.TemporaryDirectory() as small:
        make_tiny_checkpoint(Path(small))
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "dataset_statistics.json"):
            (folder / name).write_bytes((Path(small) / name).read_bytes())
        processor = json.loads((Path(small) / "preprocessor_config.json").read_text().replace("120", "224"))
    write_json(folder / "preprocessor_config.json", processor)
    write_json(folder / "config.json", CONFIG)
    with torch.device("meta"):
        network = OpenVLAOFT(read_model_config(folder), num_action_tokens=56)
    network = network.to(torch.bfloat16).to_empty(device="cuda")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(".gamma") or (parameter.ndim == 1 and "norm" in name and name.endswith("weight")):
                parameter.fill_(1.0)
            elif parameter.ndim == 1:
                parameter.zero_()
            else:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
    network.proprio_projector = ProprioProjector(8, 4096)
    save_checkpoint(folder, network, CONFIG)


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call that ends with the GPU idle, after two calls that do not count."""
    durations = []
    for i in range(repeats + 2):
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if i >= 2:
            durations.append(time.perf_counter() - started)
    return median(durations)


def peak() -> float:
    """Most memory in GiB that tensors have held since the last reset."""
    return torch.cuda.max_memory_allocated() / GIB


def seconds_since(started: float) -> str:
    return f"{time.perf_counter() - started:.1f} s"


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
