"""Advantages of trajectories (SPEC section 4). Pure.

Dimension key: M trajectories, N decisions.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6  # keeps the division by a standard deviation finite
LIMIT = 10.0  # |A| is clamped to this


def decision_advantages(
    kind: str, returns: Tensor, groups: Tensor, trajectory: Tensor, steps_to_end: Tensor, discount: float
) -> Tensor:
    """(N,) advantage of every decision from (M,) returns and group numbers and (N,) positions.

    `absolute` discounts the return per decision from the last one backwards; the relative kinds give every decision of
    a trajectory the same value.
    """
    per_trajectory = {
        "absolute": absolute,
        "group": lambda r: group_relative(r, groups),
        "rloo": lambda r: leave_one_out(r, groups),
        "batch": standardised,
    }[kind](returns)
    advantages = per_trajectory[trajectory]
    if kind == "absolute":
        advantages = advantages * discount**steps_to_end
    return advantages.clamp(-LIMIT, LIMIT)


def absolute(returns: Tensor) -> Tensor:
    """A_i = R_i: no baseline; with a 0/1 return failures give no gradient and cost no compute."""
    return returns


def group_relative(returns: Tensor, groups: Tensor) -> Tensor:
    """A_i = (R_i - mean_g) / (std_g + 1e-6), unbiased std within the group (GRPO, Shao et al. 2024, eq. 3).

    Eight episodes with one success: +2.4749 for it, -0.3536 for the others. Groups of one and groups without
    difference get 0.
    """
    advantages = torch.zeros_like(returns)
    for group in groups.unique():
        members = groups == group
        advantages[members] = standardised(returns[members])
    return advantages


def leave_one_out(returns: Tensor, groups: Tensor) -> Tensor:
    """A_i = R_i - mean of the others in the group (RLOO, Ahmadian et al. 2024). Groups of one get 0."""
    advantages = torch.zeros_like(returns)
    for group in groups.unique():
        members = groups == group
        size = int(members.sum())
        if size > 1:
            own = returns[members]
            advantages[members] = own - (own.sum() - own) / (size - 1)
    return advantages


def standardised(returns: Tensor) -> Tensor:
    """A_i = (R_i - mean) / (std + 1e-6) over all given returns, unbiased std; exactly 0 when they are all equal."""
    if len(returns) < 2 or bool((returns == returns[0]).all()):
        return torch.zeros_like(returns)
    return (returns - returns.mean()) / (returns.std() + EPSILON)
