"""What is trained: the policy's adapters, with `--advantage gae` a critic, and their optimizer; and who trains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from configs.config import TrainConfig, UpdateConfig
from rl.contracts import Policy
from rl.critic import ValueHead
from rl.ranks import ALONE, Ranks

ADAM_EPS = 1e-8  # AdamW's usual one


@dataclass(frozen=True)
class Learner:
    policy: Policy
    critic: ValueHead | None
    optimizer: torch.optim.Optimizer
    ranks: Ranks = ALONE  # every one of them has this learner, with the same numbers in it


def make_learner(policy: Policy, config: TrainConfig, ranks: Ranks = ALONE) -> Learner:
    """AdamW over the policy's trainable parameters, and in a group of its own over the critic's."""
    groups = [{"params": [parameter for _, parameter in policy.named_trainable_parameters()], "lr": config.update.lr}]
    critic = None
    if config.loss.advantage == "gae":
        critic = ValueHead(policy.hidden_dim, config.run.seed).to(policy.device)
        groups.append({"params": list(critic.parameters()), "lr": config.critic.value_lr})
    optimizer = make_optimizer(groups, config.update.weight_decay)
    make_moments(optimizer)
    return Learner(policy, critic, optimizer, ranks)


def make_optimizer(groups: list[dict[str, Any]], weight_decay: float) -> torch.optim.AdamW:
    """For parameter groups with their learning rates.

    Fused: one kernel for all parameters, and no other AdamW leaves out the steps that `rl.update` marks as unusable.
    """
    return torch.optim.AdamW(groups, eps=ADAM_EPS, weight_decay=weight_decay, fused=True)


def make_moments(optimizer: torch.optim.AdamW) -> None:
    """The moments that AdamW would make in its first step, all zero.

    There they may find a GPU full of recorded passes, which give way to one another but not to an optimizer.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def set_learning_rate(learner: Learner, config: UpdateConfig, distilling: bool) -> None:
    """The policy's learning rate for the coming update: imitation bears larger steps than reinforcement."""
    rate = config.warmup_lr if distilling and config.warmup_lr is not None else config.lr
    learner.optimizer.param_groups[0]["lr"] = rate
