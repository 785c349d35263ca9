"""Supervised training by RL's own update: a demonstration is a rollout that somebody else has played.

The loss is over all ids, as openvla-oft's (`Phase.SUPERVISED`): the token head of a checkpoint that was trained by L1
regression speaks words, and RL, like an argmax over all ids, wants action tokens.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.config import TrainConfig, changed
from contracts import Observation, read_json, write_json
from rl.phases import Phase, PhaseState
from rl.trajectory import Decision, Episode, Trajectory, flatten
from rl.update import make_learner, update
from vla.checkpoint import CheckpointInfo
from vla.dataset_statistics import STATISTICS_FILE
from vla.memory import fit_to_memory
from vla.network_io import check_dimensions, load_network, save_checkpoint
from vla.policy import Policy
from vla.preprocessing import ImageProcessor, Inputs
from vla.prompts import load_tokenizer
from vla.tokens import ACTION_TOKEN_IDS, FIRST_ACTION_TOKEN, NUM_BINS
from workshop.demo_files import CHUNK_LENGTH
from workshop.sft_data import augment

if TYPE_CHECKING:
    from workshop.sft import SftArgs

SUPERVISED = PhaseState(Phase.SUPERVISED, epsilon=1.0, warmup_progress=0.0, transition_progress=0.0)
WEIGHT_DECAY = 0.02
NETWORK_BETAS = (0.9, 0.98)  # of AdamW, for all parameters of a small network
PROPRIO_NOISE = 0.02  # on the robot's state, as a share of its standard deviation
METRICS = ("distill/loss", "distill/accuracy", "train/grad_norm")  # of `update`


class WholeNetwork:
    """A network of which all parameters learn, in float32, with what `rl.update` and `Policy`'s readers ask for.

    Rows of `lm_head` that are no action tokens become zero and are never computed: the logits of their ids are 0, their
    share of the softmax is known, and an argmax finds none. It stays in eval mode, which differs from training in no
    layer.
    """

    def __init__(self, info: CheckpointInfo, key: str, device: torch.device):
        self.info, self.device = info, device
        statistics = info.statistics[key]
        self.action_dim, self.chunk_length = statistics.action.dim, CHUNK_LENGTH
        tokenizer, processor = load_tokenizer(info.folder), ImageProcessor.load(info.folder)
        self.network = load_network(info, CHUNK_LENGTH * self.action_dim, device, torch.float32)
        check_dimensions(info, key, None, self.network.proprio_projector)
        proprio = statistics.proprio if info.uses_proprio else None
        self.model_inputs = Inputs(processor, tokenizer, info.num_images, proprio, device)
        head = self.network.language_model.lm_head.weight
        head[: ACTION_TOKEN_IDS.start] = 0.0
        head[ACTION_TOKEN_IDS.stop :] = 0.0
        self.other_logits = math.log(len(head) - NUM_BINS)  # of the sum of exp(0) over the other ids
        self.network.requires_grad_(True)

    def chunk_logits(self, observations: Sequence[Observation]) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.network(*self.model_inputs(observations))[0]

    def logits_and_other_logsumexp(self, observations: Sequence[Observation]) -> tuple[Tensor, Tensor]:
        logits = self.chunk_logits(observations)
        return logits, logits.new_full(logits.shape[:2], self.other_logits)

    def named_trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.network.named_parameters())

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """No layer keeps a copy of a parameter."""

    def recompute_everything(self) -> bool:
        before, self.network.recomputed_blocks = self.network.recomputed_blocks, self.network.num_blocks
        return before < self.network.num_blocks

    def save(self, folder: Path, looks: Sequence[str], dtype: torch.dtype) -> None:
        """A whole checkpoint folder: weights in `dtype`, the demonstrations' statistics, else the files it began with.

        An L1 head stays behind: it reads hidden states that training has changed. As the head is also how the number
        of images is found out, config.json states that number.
        """
        config, name = read_json(self.info.folder / "config.json"), str(dtype).removeprefix("torch.")
        statistics = read_json(self.info.statistics_folder / STATISTICS_FILE)
        config |= {"num_images_in_input": self.info.num_images, "norm_stats": statistics, "torch_dtype": name}
        config |= {"looks": looks, "text_config": config.get("text_config", {}) | {"torch_dtype": name}}
        save_checkpoint(folder, self.network, config, dtype=dtype)
        write_json(folder / STATISTICS_FILE, statistics)
        for file in self.info.folder.iterdir():  # the others are written anew
            if "token" in file.name or "processor" in file.name:
                shutil.copyfile(file, folder / file.name)


def supervised_steps(
    policy: Any, observations: Sequence[Observation], tokens: Tensor, args: SftArgs
) -> Iterator[Tensor]:
    """Take the optimizer steps, each on frames drawn at random; yields METRICS of each.

    policy: a Policy, whose adapters learn, or a WholeNetwork; observations: N, `prepared`, to be cropped if
    `args.augment`; tokens (N, A) int64.
    """
    size, device = args.batch_size, policy.device
    micro_batch_size = fit_to_memory(policy, "auto", "auto", size) if isinstance(policy, Policy) else size
    print(f"{len(tokens)} frames, {size} a step, {micro_batch_size} at a time", flush=True)
    sizes: Any = {"batch_size": size, "micro_batch_size": micro_batch_size, "weight_decay": WEIGHT_DECAY}
    config = changed(TrainConfig(), seed=args.seed, n_epochs=1, **sizes)
    learner = make_learner(policy, config)
    if not isinstance(policy, Policy):
        learner.optimizer.param_groups[0]["betas"] = NETWORK_BETAS
    generator = torch.Generator(device).manual_seed(args.seed)
    noise_scale = PROPRIO_NOISE * np.std([observation.proprio for observation in observations], axis=0)
    for step in range(args.steps):
        rows = torch.randint(len(tokens), (size,), device=device, generator=generator).tolist()
        seen = [observations[row] for row in rows]
        images = np.stack([one.images for one in seen])
        if args.augment:
            planes = torch.from_numpy(images).to(device).movedim(-1, 2)  # (B, n, 3, S, S)
            images = augment(planes.flatten(0, 1), generator).view(planes.shape).movedim(2, -1).cpu().numpy()
        noise = torch.randn(size, len(noise_scale), device=device, generator=generator).cpu().numpy()
        states = np.stack([one.proprio for one in seen]) + noise_scale * noise
        decisions = [
            Decision(
                replace(one, images=of_one, proprio=state), tokens[row], True, executed=policy.chunk_length
            )
            for one, of_one, state, row in zip(seen, images, states, rows, strict=True)
        ]
        batch = flatten([Trajectory(Episode(0, 0, None, 0), decisions)], policy.action_dim)
        found = update(learner, batch, SUPERVISED, changed(config, lr=args.learning_rate(step)), step)
        yield torch.tensor([found[name] for name in METRICS])


@torch.no_grad()
def logits_of(policy: Any, observations: Sequence[Observation], size: int = 8) -> Tensor:
    """(N, A, 256) float32 on the CPU, `size` observations at a time."""
    starts = range(0, len(observations), size)
    return torch.cat([policy.chunk_logits(observations[start : start + size]).cpu() for start in starts])


def held_out_metrics(policy: Any, observations: Sequence[Observation], tokens: Tensor) -> dict[str, float]:
    """How well a policy predicts held-out frames: nats and share of right ones per action token."""
    logits, targets = logits_of(policy, observations), tokens - FIRST_ACTION_TOKEN
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    accuracy = (logits.argmax(-1) == targets).float().mean()
    return {"held_out/nll": nll.item(), "held_out/accuracy": accuracy.item()}
