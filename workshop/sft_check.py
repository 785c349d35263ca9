"""After supervised training: is what was written the policy that was trained?

A policy with a low loss that never succeeds is most often not read as it was trained: without its token head, with
statistics of other data, on pictures that are cropped or turned otherwise.
"""

import gc
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from contracts import Observation, SelfCheckError
from envs.tasks import MAX_ENV_STEPS
from experiment.terminal import say
from vla.device import is_large
from vla.loading import LoadOptions
from vla.policy import Policy
from vla.tokens import FIRST_ACTION_TOKEN, decode
from workshop.sft_config import SftArgs
from workshop.sft_data import KEY_SUFFIX, Demos, chunk_tokens, make_observations
from workshop.sft_update import in_batches, logits_of

SHOWN_EPISODES = 4  # training episodes whose frames are compared
# Nats between the two likeliest tokens: rounded weights or other kernels do not decide there.
CLEAR_MARGIN = 1.0
CLOSE = 0.1  # between normalised actions of an L1 head, from -1 to 1: rounded weights move them by less
LEAST_AGREEMENT = 0.98  # of the clear tokens, or of the L1 head's actions, before and after saving


def check_written(args: SftArgs, demos: Demos, outputs_before: Tensor, device: torch.device) -> None:
    """Load what was written as every program will, and compare its decisions with those of the trained network.

    outputs_before: of the trained network on the first SHOWN_EPISODES training episodes: logits (N, A, 256), or with
    --l1 the L1 head's normalised actions (N, 8, D). Also writes first_frame.png, and prints what to do next. Raises
    SelfCheckError when too few decisions agree.
    """
    policy = load_written(args, demos, device)
    episodes = demos.train[:SHOWN_EPISODES]
    observations = make_observations(episodes)
    first_frame = np.concatenate(list(policy.model_inputs.images_of(observations[0])), axis=1)
    Image.fromarray(first_frame).save(args.out / "first_frame.png")

    tokens, agrees = compare_decisions(policy, observations, outputs_before, args.l1)
    agreement = agrees.float().mean().nan_to_num(1.0).item()  # NaN where no token is clear
    accuracy = (tokens == chunk_tokens(episodes, policy.statistics)).float().mean().item()
    compared = "actions of the L1 head" if args.l1 else "clear tokens"
    finding = (
        f"{args.out}, read again: {agreement:.1%} of {len(agrees)} {compared} on training frames "
        "are as before saving"
    )
    if agreement < LEAST_AGREEMENT:
        raise SelfCheckError(f"{finding}: what was written is not what was trained")
    say(
        f"{finding}, {accuracy:.1%} of all are as demonstrated; statistics: {demos.unnorm_key}. "
        + _next_steps(args, demos)
    )


def load_written(args: SftArgs, demos: Demos, device: torch.device) -> Policy:
    """The policy in `args.out`, read as every program reads it."""
    gc.collect()  # frees the network that was trained: there may be no memory for two
    torch.cuda.empty_cache()
    options = LoadOptions(
        task_suite=demos.unnorm_key,
        unnorm_key=demos.unnorm_key,
        device=device,
        frozen_weights="auto" if args.lora_rank else "float32",
        compile="off",
    )
    return Policy.load(str(args.out), options)


def compare_decisions(
    policy: Policy, observations: list[Observation], outputs_before: Tensor, is_l1: bool
) -> tuple[Tensor, Tensor]:
    """The policy's tokens (N, A), and whether each token that is compared is as before saving, (M,) bool."""
    if is_l1:
        tokens = in_batches(lambda part: policy.act(part, "l1").tokens, observations)
        return tokens, close_actions(tokens, outputs_before)
    tokens = logits_of(policy, observations).argmax(-1) + FIRST_ACTION_TOKEN
    return tokens, same_clear_tokens(tokens, outputs_before)


def same_clear_tokens(tokens: Tensor, logits_before: Tensor) -> Tensor:
    """(M,) bool: whether the tokens (N, A) are those of the logits (N, A, 256), where these are clear."""
    two_best = logits_before.topk(2)
    tokens_before = two_best.indices[..., 0] + FIRST_ACTION_TOKEN
    is_clear = two_best.values[..., 0] - two_best.values[..., 1] > CLEAR_MARGIN
    return (tokens == tokens_before)[is_clear]


def close_actions(tokens: Tensor, actions_before: Tensor) -> Tensor:
    """(N * A,) bool: whether the tokens (N, A) stand for nearly the normalised actions (N, 8, D)."""
    actions = torch.from_numpy(decode(tokens.numpy()))
    difference = actions - actions_before.flatten(1).clamp(-1.0, 1.0)
    return difference.abs().flatten() < CLOSE


def _next_steps(args: SftArgs, demos: Demos) -> str:
    suite = demos.unnorm_key.removesuffix(KEY_SUFFIX)
    if suite not in MAX_ENV_STEPS:
        suite = "SUITE"  # for the user to fill in
    flags = f"--checkpoint {args.out} --task-suite {suite}"
    network = args.out if args.lora_rank is None else Path(str(args.init)).expanduser()
    # The preset has no warmup, which a token head beside an L1 head needs.
    has_preset = not args.l1 and not is_large(network)
    preset = "--preset tiny " if has_preset else ""
    return (
        "Evaluate it on the tasks that were demonstrated (--task-ids), and go on by RL:\n"
        f"  python eval.py {flags}\n"
        f"  python train_grpo.py {preset}{flags}\n"
        f"No success although most tokens are as demonstrated? Compare {args.out}/first_frame.png, what it was trained "
        "on, with first_frame.png of a run (--flip, --assets)"
    )
