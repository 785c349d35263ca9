"""How much of what a small optimizer step promises arrives: with our adapters, with peft's, in several precisions.

    python -m benchmarks.followed_steps checkpoints/tiny-libero-spatial
    python -m benchmarks.followed_steps FOLDER --device cuda      # one that benchmarks.full_size wrote

The policy gradient of one log-prob, AdamW's first step along it and against it: half the difference of what both bring
is set beside the promise (slope times learning rate), as in the check `learning` of every run. Rounding swallows what
is added to a rounded number and is less than half of its last digit; peft adds an adapter's output to the rounded
output of the frozen layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor, nn

from benchmarks.gpu_timing import free_memory
from benchmarks.plain import make_plain, plain_logits
from rl.learner import ADAM_EPS
from vla.checkpoint import load_network
from vla.policy import Policy
from vla.probes import synthetic_observations


@dataclass(frozen=True)
class Args:
    checkpoint: tyro.conf.Positional[Path]
    device: Literal["cuda", "cpu"] = "cpu"
    observations: int = 4
    promises: tuple[float, ...] = (0.4, 0.2, 0.1)
    """Nats of the mean log-prob."""


def main(args: Args) -> None:
    print(f"{'':18}{'slope':>10}" + "".join(f"{f'{promise} nats':>12}" for promise in args.promises))
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        measure_ours(args, dtype, False, name)
        if dtype == torch.bfloat16:
            measure_ours(args, dtype, True, f"nf4, {name}")
        measure_plain(args, dtype, f"peft, {name}")


def measure_ours(args: Args, dtype: torch.dtype, in_4bit: bool, name: str) -> None:
    policy = load(args, dtype, in_4bit)
    observations = synthetic_observations(policy, args.observations)
    parameters = [parameter for _, parameter in policy.named_trainable_parameters()]
    show(args, name, parameters, lambda: policy.chunk_logits(observations), policy.parameters_changed)


def measure_plain(args: Args, dtype: torch.dtype, name: str) -> None:
    policy = load(args, dtype, False)
    inputs = policy.model_inputs(synthetic_observations(policy, args.observations))
    info, device, num_tokens = policy.info, policy.device, policy.network.num_action_tokens
    del policy
    free_memory()
    network = make_plain(load_network(info, num_tokens, device, dtype))
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    show(args, name, parameters, lambda: plain_logits(network, inputs, False), lambda: None)


def load(args: Args, dtype: torch.dtype, in_4bit: bool) -> Policy:
    free_memory()
    checkpoint = str(args.checkpoint)
    return Policy.load(checkpoint, task_suite="libero_spatial", device=args.device, dtype=dtype, load_in_4bit=in_4bit)


def show(
    args: Args, name: str, parameters: Sequence[nn.Parameter], logits: Callable[[], Tensor], changed: Callable[[], None]
) -> None:
    """A line: the slope (nats for a learning rate of 1), and what part of each promise arrives."""
    tokens = logits().argmin(-1, keepdim=True)
    before = [parameter.detach().clone() for parameter in parameters]
    gradients = torch.autograd.grad(mean_logprob(logits(), tokens), parameters, allow_unused=True)
    steps = [
        torch.zeros_like(p) if g is None else g / (g.abs() + ADAM_EPS)
        for p, g in zip(parameters, gradients, strict=True)
    ]
    slope = sum((g * step).sum().item() for g, step in zip(gradients, steps, strict=True) if g is not None)
    parts = []
    for promise in args.promises:
        found = []
        for lr in (promise / slope, -promise / slope):
            with torch.no_grad():
                torch._foreach_copy_(parameters, torch._foreach_add(before, steps, alpha=lr))
            changed()
            with torch.no_grad():
                found.append(mean_logprob(logits(), tokens).item())
        parts.append((found[0] - found[1]) / 2 / promise)
    print(f"{name:18}{slope:10.3g}" + "".join(f"{part:12.0%}" for part in parts), flush=True)


def mean_logprob(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of tokens (B, A, 1) under logits (B, A, 256)."""
    return logits.log_softmax(-1).gather(-1, tokens).mean()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
